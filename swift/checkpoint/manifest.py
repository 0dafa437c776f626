"""Checkpoint manifests, the ledger that a run keeps of them, and the checkpoint directory's layout.

A manifest is self-contained. For every expert, it lists the step and files of the two newest copies, with digests,
sizes and the token updates that they contain; for the dense part, it lists the files of its own step. It also holds the
ledger, which determines what the next checkpoint saves. No data are used before they are verified against their digest.

    step-00000040/manifest.json    written last: makes the iteration restorable
    step-00000040/arrays/          arrays saved at iteration 40, see swift.checkpoint.array_files
    step-00000020/arrays/          without a manifest: experts with one of their two newest copies from iteration 20
    step-00000020/retired.json     its former manifest, if an older iteration is still restorable
    .step-00000060.tmp/            a save in progress, or an interrupted one
    .step-00000060.5f0c.hosts.tmp/ messages between hosts that save together, see swift.checkpoint.multi_host_save
    step-00000040.earlier/         a checkpoint while a new one of the same iteration replaces it
    step-00000060.aside/           a checkpoint that a restore has skipped; it is never read again, and is removed
                                   once the run has saved iteration 60 or a later one

Only one process at a time writes here, except that several hosts that save together fill in the same files.

Legend: L MoE layers of the model, E expert classes, K classes of a layer that a checkpoint saves, P stages, N ranks.
"""

import hashlib
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from swift.checkpoint.selection import (
    TokenUpdateCounter,
    everything,
    initial_rotation,
    load_aware,
    next_rotation,
    sequential,
)
from swift.checkpoint.units import Unit
from swift.errors import SettingError
from swift.files import replace_file, sync_directory, sync_file

_SIZE = 16
BLOCK, _READ = 1 << 26, 1 << 20
"""Number of bytes written or compared at a time, and bytes read at a time; progress is reported after each block."""
MANIFEST, ARRAYS = "manifest.json", "arrays"
VALIDATION = "validation"
"""Name of the validation losses in ``Manifest.extra``."""
_VERSION = 2
_NUM_COPIES = 2
"""Number of an expert's copies that a manifest lists: the newest, and one to fall back to if the newest is damaged."""
_RETIRED = "retired.json"
"""Name of the manifest of a checkpoint that was removed while others need some of its experts."""
_PREFIX, _EARLIER, _ASIDE = "step-", ".earlier", ".aside"

Files = Mapping[str, str]
"""Digests of files, by path relative to a step's directory."""


def digest(content: bytes) -> str:
    """Returns the BLAKE2b digest of bytes, as hexadecimal text."""
    return hashlib.blake2b(content, digest_size=_SIZE).hexdigest()


def array_digest(arrays: Iterable[np.ndarray]) -> str:
    """Returns the digest of the arrays' concatenated values."""
    digest = hashlib.blake2b(digest_size=_SIZE)
    for array in arrays:
        digest.update(raw_bytes(array))
    return digest.hexdigest()


def array_checksum(arrays: Iterable[np.ndarray], before: int = 0) -> int:
    """Returns the CRC-32 of the arrays' concatenated values, continuing from the checksum ``before``.

    It detects values that a killed process left partly written, and is five times as fast as ``array_digest``.
    """
    checksum = before
    for array in arrays:
        checksum = zlib.crc32(raw_bytes(array), checksum)
    return checksum


def raw_bytes(array: np.ndarray) -> memoryview:
    """Returns an array's bytes in C order, without a copy if the array already is in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def nothing() -> None:
    """Ignores progress; the default progress function."""


def file_digest(path: Path, progress: Callable[[], None] = nothing) -> str:
    """Returns a file's digest; calls ``progress`` after each block."""
    digest = hashlib.blake2b(digest_size=_SIZE)
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ):
            digest.update(block)
            progress()
    return digest.hexdigest()


def synced_digests(directory: Path) -> dict[str, str]:
    """Calls fsync on every file under a directory and returns the files' digests, by relative path."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): synced_digest(path) for path in paths}


def synced_digest(path: Path, progress: Callable[[], None] = nothing) -> str:
    """Calls fsync on a file and returns its digest; calls ``progress`` after each block."""
    sync_file(path)
    return file_digest(path, progress)


def difference(path: Path, expected: str) -> str | None:
    """Compares a file with its expected digest; returns a phrase such as "is missing", or None if they agree."""
    if not path.is_file():
        return "is missing"
    try:
        digest = file_digest(path)
    except OSError as error:  # such as a bad sector or missing permission; there may be another copy
        return f"cannot be read: {error.strerror}"
    return None if digest == expected else "is not as it was saved"


@dataclass(frozen=True)
class Copy:
    """An expert's saved state in one checkpoint.

    Attributes:
        step: iteration of the checkpoint.
        contained: token updates that the state contains, see ``TokenUpdateCounter``.
        num_bytes: bytes of its values.
        content: digest of its values.
        files: digests of the files that hold them.
    """

    step: int
    contained: int
    num_bytes: int
    content: str
    files: Files


@dataclass(frozen=True)
class Dense:
    """The saved dense part of one checkpoint.

    Attributes:
        shapes: dtypes and shapes of its arrays, by name.
        contents: digests of their values, by name.
        num_bytes: bytes of all values.
        files: digests of the files that hold them.
    """

    shapes: Mapping[str, str]
    contents: Mapping[str, str]
    num_bytes: int
    files: Files


@dataclass(frozen=True)
class Ledger:
    """The history of a run's checkpoints, on which the next checkpoint depends.

    Attributes:
        tally: counter of token updates.
        copies: saved copies of every expert, newest first; empty before the first checkpoint.
        common: by step, the digests of the files that every read of that step needs.
        turn_L: int64, the class in each layer with which the next sequential selection starts.
        k: number of experts in each layer that a partial checkpoint saves, K.
    """

    tally: TokenUpdateCounter
    copies: Mapping[Unit, tuple[Copy, ...]]
    common: Mapping[int, Files]
    turn_L: np.ndarray
    k: int

    @classmethod
    def first(cls, num_layers: int, num_classes: int, k: int) -> "Ledger":
        """Returns the ledger of a run that has not saved a checkpoint yet."""
        turn_L = initial_rotation(num_layers, num_classes, k)
        return cls(TokenUpdateCounter.none(num_layers, num_classes), {}, {}, turn_L, k)

    @property
    def num_classes(self) -> int:
        """Number of expert classes, E."""
        return self.tally.contained_LE.shape[1]

    def counted(self, popularity_LE: Any, dropped_LE: Any) -> "Ledger":
        """Returns the ledger after one more iteration, see ``TokenUpdateCounter.count``."""
        return replace(self, tally=self.tally.count(popularity_LE, dropped_LE))

    def uncounted(self, num_iterations: int, most_updates: int) -> "Ledger":
        """Returns the ledger after iterations without a record, see ``TokenUpdateCounter.uncounted``."""
        return replace(self, tally=self.tally.uncounted(num_iterations, most_updates))

    def choose(self, selection: str, *, full: bool) -> Int[np.ndarray, "L K"]:
        """Chooses the classes ``[L, K]`` that the next checkpoint saves.

        All classes are chosen if ``full``, or if an expert has no saved copy yet.
        """
        num_layers, num_classes = self.tally.contained_LE.shape
        if full or self.k >= num_classes or not all(self._newest()):
            return everything(num_layers, num_classes)
        if selection == "sequential":
            return sequential(self.turn_L, num_classes, self.k)
        newest = [(copy.contained, copy.step) for copy in self._newest() if copy]
        saved_LE = np.array(newest, np.int64).reshape(num_layers, num_classes, 2)
        return load_aware(self.tally.contained_LE - saved_LE[..., 0], saved_LE[..., 1], self.k)

    def saved(
        self, step: int, chosen_LK: Int[np.ndarray, "L K"], copies: Mapping[Unit, Copy], common: Files
    ) -> "Ledger":
        """Returns the ledger after a checkpoint of iteration ``step`` that saved these copies."""
        merged = dict(self.copies)
        for unit, copy in copies.items():
            merged[unit] = (copy, *(old for old in self.copies.get(unit, ()) if old.step < step))[:_NUM_COPIES]
        used = {copy.step for unit_copies in merged.values() for copy in unit_copies} | {step}
        files = {old: self.common[old] for old in used if old != step} | {step: common}
        is_partial = chosen_LK.shape[-1] < self.num_classes
        turn_L = next_rotation(self.turn_L, self.num_classes, self.k) if is_partial else self.turn_L
        return replace(self, copies=merged, common=files, turn_L=turn_L)

    def emptied(self, k: int) -> "Ledger":
        """Returns the ledger for a state of another shape, without copies, so that the next checkpoint is full.

        A manifest has a single shape for all copies of experts, so it cannot refer to copies of the old shape.
        """
        return replace(self, copies={}, common={}, k=k)

    def _newest(self) -> list[Copy | None]:
        """Returns each expert's newest copy, in order of layer and class; None for an expert without copies."""
        return [next(iter(self.copies.get(unit, ())), None) for unit in np.ndindex(*self.tally.contained_LE.shape)]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint, without its values.

    Attributes:
        step: iterations done.
        identity: settings by name that a run must share to read the checkpoint, JSON-serializable.
        extra: other state, such as the loader's, JSON-serializable.
        dense: the dense part.
        unit_shapes: dtype and shape of one expert's state, by dtype.
        chosen: classes that this checkpoint saved, ``[L][K]``.
        bytes_per_rank: bytes that it wrote, by stage and rank, ``[P][N]``.
        ledger: ledger after this checkpoint.
    """

    step: int
    identity: Mapping[str, Any]
    extra: Mapping[str, Any]
    dense: Dense
    unit_shapes: Mapping[str, str]
    chosen: list[list[int]]
    bytes_per_rank: list[list[int]]
    ledger: Ledger

    @property
    def num_bytes(self) -> int:
        """Bytes of the values that this checkpoint wrote."""
        return sum(map(sum, self.bytes_per_rank))

    @property
    def validation_loss(self) -> float | None:
        """Validation loss after this iteration, in nats per token; None if it was not evaluated or is not finite."""
        validation = self.extra.get(VALIDATION)
        loss = validation.get("loss") if isinstance(validation, dict) and validation.get("step") == self.step else None
        return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None

    @property
    def validation_tokens(self) -> object:
        """Number of tokens of an evaluation; losses over other numbers are over other text."""
        validation = self.extra.get(VALIDATION)
        return validation.get("num_tokens") if isinstance(validation, dict) else None

    @property
    def is_full(self) -> bool:
        """Whether this checkpoint saved every expert."""
        return all(len(classes) == self.ledger.num_classes for classes in self.chosen)

    def files_needed(self) -> dict[int, dict[str, str]]:
        """Returns the digests of all files that a restore may read, by step; older steps' files hold experts."""
        needed = {step: dict(files) for step, files in self.ledger.common.items()}
        needed[self.step].update(self.dense.files)
        for copies in self.ledger.copies.values():
            for copy in copies:
                needed[copy.step].update(copy.files)
        return needed


_KINDS: Mapping[type, Sequence[str]] = {
    int: ("step", "num_classes", "experts_per_layer"),
    dict: ("identity", "extra", "dense", "unit_shapes", "tally", "common"),
    list: ("chosen", "bytes_per_rank", "turn", "copies"),
}
"""JSON types of a manifest's fields."""


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes the manifest into a checkpoint's directory, which makes the checkpoint restorable."""
    ledger = manifest.ledger
    fields = {
        "version": _VERSION,
        "step": manifest.step,
        "identity": dict(manifest.identity),
        "extra": dict(manifest.extra),
        "dense": asdict(manifest.dense),
        "unit_shapes": dict(manifest.unit_shapes),
        "chosen": manifest.chosen,
        "bytes_per_rank": manifest.bytes_per_rank,
        "tally": ledger.tally.to_json(),
        "num_classes": ledger.num_classes,
        "turn": ledger.turn_L.tolist(),
        "experts_per_layer": ledger.k,
        "common": {str(step): dict(files) for step, files in sorted(ledger.common.items())},
        "copies": [[*unit, [asdict(copy) for copy in copies]] for unit, copies in sorted(ledger.copies.items())],
    }
    write_signed(path, fields)


def read_manifest(path: Path, setting: str) -> Manifest:
    """Reads the manifest in a checkpoint's directory.

    Args:
        path: directory of the checkpoint.
        setting: the option or setting that names the checkpoint, for error messages.

    Raises:
        SettingError: the manifest is missing, damaged, incomplete, of another version, or of another checkpoint.
    """
    fields = read_signed(path, setting, _VERSION)
    try:
        manifest = _manifest_of(fields)
        manifest.files_needed()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        allowed = f"is damaged: its file {MANIFEST} is incomplete ({type(error).__name__}: {error})"
        raise SettingError(setting, str(path), allowed) from error
    if not path.name.endswith(f"-{manifest.step:08d}"):
        raise SettingError(setting, str(path), f"has the manifest of another checkpoint, of iteration {manifest.step}")
    return manifest


def _manifest_of(fields: Mapping[str, Any]) -> Manifest:
    """Parses a manifest; raises LookupError if a field is missing, and TypeError if it has the wrong type."""
    for kind, names in _KINDS.items():
        for name in names:
            if type(fields[name]) is not kind:
                raise TypeError(f"{name} is {type(fields[name]).__name__}, not {kind.__name__}")
    tally = TokenUpdateCounter.from_json(fields["tally"], fields["num_classes"])
    copies = {(layer, class_): tuple(Copy(**entry) for entry in entries) for layer, class_, entries in fields["copies"]}
    common = {int(step): files for step, files in fields["common"].items()}
    ledger = Ledger(tally, copies, common, np.array(fields["turn"], np.int64), fields["experts_per_layer"])
    names = ("step", "identity", "extra", "unit_shapes", "chosen", "bytes_per_rank")
    return Manifest(**{name: fields[name] for name in names}, dense=Dense(**fields["dense"]), ledger=ledger)


def write_signed(path: Path, fields: Mapping[str, Any], name: str = MANIFEST) -> None:
    """Writes fields as JSON, after a line with the JSON's digest, for ``read_signed``; replaces the file atomically."""
    text = json.dumps(fields).encode()
    replace_file(path / name, digest(text).encode() + b"\n" + text)


def read_signed(path: Path, setting: str, version: int, name: str = MANIFEST) -> dict[str, Any]:
    """Reads and checks a file that ``write_signed`` wrote.

    Raises:
        SettingError: the file is missing, damaged or of another version.
    """
    try:
        signature, _, text = (path / name).read_bytes().partition(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        raise SettingError(setting, str(path), f"holds no checkpoint: there is no {name} in it") from None
    except OSError as error:
        raise SettingError(setting, str(path), f"its file {name} cannot be read: {error.strerror}") from None
    if signature != digest(text).encode():
        raise SettingError(setting, str(path), f"is damaged: its file {name} is not as it was saved")
    try:
        fields = dict(json.loads(text))
    except (TypeError, ValueError):
        raise SettingError(setting, str(path), f"is damaged: its file {name} holds no JSON object") from None
    if fields.get("version") != version:
        allowed = f"is of version {fields.get('version')} of this format, and this Swift reads version {version}"
        raise SettingError(setting, str(path), allowed)
    return fields


def check_shapes(
    path: Path, setting: str, stored_shapes: Mapping[str, str], expected_shapes: Mapping[str, str]
) -> None:
    """Raises SettingError that names an array if a checkpoint's shapes differ from the expected ones."""
    for name in sorted({*stored_shapes, *expected_shapes}):
        stored, expected = stored_shapes.get(name, "nothing"), expected_shapes.get(name, "nothing")
        if stored != expected:
            raise SettingError(setting, str(path), f"is of another model: it has {stored} for {name}, here {expected}")


def checkpoint_steps(directory: Path) -> list[int]:
    """Lists the iterations that have a manifest and can be restored, oldest first."""
    return [step for step in _saved_steps(directory) if (checkpoint_path(directory, step) / MANIFEST).is_file()]


def committed_steps(directory: Path) -> list[int]:
    """Lists the restorable iterations and those whose manifest was lost, oldest first.

    ``delete_old_checkpoints`` removes the manifests that are older than all others that it keeps, and renames the rest.
    An iteration without a manifest that is newer than the oldest restorable one and has no renamed manifest has
    therefore lost it. If there are no manifests, all iterations have lost them.
    """
    restorable = checkpoint_steps(directory)
    saved = [
        step
        for step in _saved_steps(directory)
        if step in restorable or not (checkpoint_path(directory, step) / _RETIRED).exists()
    ]
    return [step for step in saved if not restorable or step >= restorable[0]]


def checkpoint_path(directory: Path, step: int) -> Path:
    """Returns the path of an iteration's checkpoint."""
    return directory / f"{_PREFIX}{step:08d}"


def clean_up_saves(directory: Path, excluded: Path | None = None) -> None:
    """Cleans up after interrupted saves: removes their files, and restores the checkpoints that they were replacing.

    Otherwise, unfinished saves would take up space on a full disk.

    Args:
        directory: directory of all checkpoints.
        excluded: directory to keep, with the messages of the hosts that are saving now.
    """
    for half in directory.glob(f".{_PREFIX}*.tmp"):
        if half != excluded:
            shutil.rmtree(half, ignore_errors=True)
    for earlier in directory.glob(f"{_PREFIX}*{_EARLIER}"):
        path = earlier.with_suffix("")
        if path.exists():
            shutil.rmtree(earlier, ignore_errors=True)
        else:
            earlier.rename(path)


def begin_save(directory: Path, step: int, excluded: Path | None = None) -> Path:
    """Creates a save's temporary directory, which ``commit_save`` renames; see ``clean_up_saves`` for ``excluded``."""
    directory.mkdir(parents=True, exist_ok=True)
    clean_up_saves(directory, excluded)
    path = temporary_path(directory, step)
    path.mkdir()
    return path


def temporary_path(directory: Path, step: int) -> Path:
    """Returns the path of the directory that ``begin_save`` creates."""
    return directory / f".{checkpoint_path(directory, step).name}.tmp"


def commit_save(directory: Path, step: int) -> Path:
    """Renames the directory of ``begin_save`` to its final name, and returns that path.

    An earlier checkpoint of the same iteration is kept until then, and ``clean_up_saves`` restores it after a crash.
    """
    path = checkpoint_path(directory, step)
    if path.exists():  # a rename cannot replace a directory with files
        path.rename(path.with_suffix(_EARLIER))
    temporary_path(directory, step).rename(path)
    sync_directory(directory)  # before the checkpoint that this one replaces is removed
    clean_up_saves(directory)
    return path


def archive_newer(directory: Path, step: int) -> list[str]:
    """Renames the checkpoints newer than ``step``, where a run resumes, so that they do not shadow those it saves next.

    Returns:
        The new names of the directories.
    """
    names = []
    for newer in _saved_steps(directory):
        if newer > step:
            path = checkpoint_path(directory, newer)
            aside = path.with_suffix(_ASIDE)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            names.append(aside.name)
    return names


def remove_archived(directory: Path, step: int) -> None:
    """Removes the checkpoints that ``archive_newer`` archived, up to iteration ``step``.

    Call this once iteration ``step`` or a later one is saved and verified.
    """
    for path in directory.glob(f"{_PREFIX}*{_ASIDE}"):
        number = path.name.removeprefix(_PREFIX).removesuffix(_ASIDE)
        if number.isdigit() and int(number) <= step:
            shutil.rmtree(path)


def delete_old_checkpoints(directory: Path, num_kept: int, num_best: int = 0) -> None:
    """Removes the files that no kept checkpoint needs.

    Removes nothing if a manifest is unreadable that tells which files are needed, or which checkpoints are the best.

    Args:
        directory: directory of all checkpoints of a run.
        num_kept: number of checkpoints to keep, the newest ones.
        num_best: number of checkpoints to keep besides these, or among them, with the lowest validation losses.
    """
    steps = checkpoint_steps(directory)
    try:
        read = [
            read_manifest(checkpoint_path(directory, step), "checkpoint")
            for step in (steps if num_best else steps[-num_kept:])
        ]
    except SettingError:
        return  # it may be readable later
    kept_steps = {*steps[-num_kept:], *_by_loss(read)[:num_best]}
    manifests = [manifest for manifest in read if manifest.step in kept_steps]
    for step in steps:  # manifests first, as a partly removed checkpoint must not look restorable
        if step not in kept_steps:
            path = checkpoint_path(directory, step)
            if step < min(kept_steps):
                (path / MANIFEST).unlink()
            else:  # it must not look as if it had lost its manifest
                (path / MANIFEST).rename(path / _RETIRED)
    needed = files_needed(manifests)
    for step in _saved_steps(directory):
        _keep_only(checkpoint_path(directory, step), needed.get(step, frozenset()))


def best_steps(directory: Path) -> list[int]:
    """Lists the restorable iterations whose validation losses are over the same text as the newest one.

    The one with the lowest loss is first; of equal ones, the oldest.
    """
    manifests = []
    for step in checkpoint_steps(directory):
        with suppress(SettingError):  # damaged: its loss is unknown
            manifests.append(read_manifest(checkpoint_path(directory, step), "checkpoint"))
    return _by_loss(manifests)


def _by_loss(manifests: Sequence[Manifest]) -> list[int]:
    """Lists the iterations as ``best_steps`` does."""
    known = {
        manifest.step: (loss, manifest.validation_tokens)
        for manifest in manifests
        if (loss := manifest.validation_loss) is not None
    }
    newest_tokens = known[max(known)][1] if known else None
    return sorted(
        (step for step, (_, tokens) in known.items() if tokens == newest_tokens),
        key=lambda step: (known[step][0], step),
    )


def step_named(directory: Path, step: int | Literal["best"] | None) -> int | None:
    """Returns the iteration that ``--step`` names: ``best`` is the restorable one with the lowest validation loss.

    Raises:
        SettingError: no iteration has a validation loss.
    """
    if step != "best":
        return step
    steps = best_steps(directory)
    if not steps:
        raise SettingError("--step", "best", f"no checkpoint in {directory} has a validation loss: name an iteration")
    return steps[0]


def files_needed(manifests: list[Manifest]) -> dict[int, frozenset[str]]:
    """Returns the files that restores of these checkpoints may read, including the manifests, by step."""
    needed: dict[int, set[str]] = {}
    for manifest in manifests:
        for step, files in manifest.files_needed().items():
            needed.setdefault(step, set()).update(files)
        needed[manifest.step].add(MANIFEST)
    return {step: frozenset(files) for step, files in needed.items()}


def _keep_only(path: Path, names: frozenset[str]) -> None:
    """Removes all files that are not in ``names``, and directories that become empty."""
    if not names:
        shutil.rmtree(path)
        return
    names |= {_RETIRED}
    for below in sorted(path.rglob("*"), reverse=True):  # the content of a directory comes before the directory
        if below.is_dir():
            if not any(below.iterdir()):
                below.rmdir()
        elif below.relative_to(path).as_posix() not in names:
            below.unlink()


def _saved_steps(directory: Path) -> list[int]:
    """Lists the iterations that have files, oldest first."""
    names = [path.name.removeprefix(_PREFIX) for path in directory.glob(f"{_PREFIX}*")] if directory.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())
