"""The manifest of a checkpoint, the ledger that a run keeps of its checkpoints, and the directory of all of them.

A manifest is complete by itself. It names, for every expert, the step and files of its newest copy and of the one
before, with digests, sizes and the token updates that they contain; for the dense part, the files of its own step. It
also holds the ledger, which decides what the next checkpoint saves. Everything that is read is checked against digests
of its bytes first.

    step-00000040/manifest.json    written last: makes the iteration restorable
    step-00000040/arrays/          arrays saved at iteration 40, see swift.checkpoint.array_files
    step-00000020/arrays/          without a manifest: experts whose newest copy, or the one before, is of iteration 20
    .step-00000060.tmp/            a save in progress, or an interrupted one
    .step-00000060.5f0c.hosts.tmp/ what hosts that save together tell each other, see swift.checkpoint.multi_host_save
    step-00000040.earlier/         a checkpoint while another of the same iteration replaces it
    step-00000060.aside/           a checkpoint that a restore has passed over; it is never read again, and removed once
                                   the run has saved iteration 60 or a later one

One process at a time writes here, but for the files in a save that several hosts fill in together.

Legend: L MoE layers of the model, E expert classes, K classes of a layer that a checkpoint saves, P stages, N ranks.
"""

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
"""Bytes that are written or compared at a time, and read into memory; then whoever waits is told of the progress."""
MANIFEST, ARRAYS = "manifest.json", "arrays"
_VERSION = 2
_NUM_COPIES = 2
"""Copies of an expert that a manifest names: the newest, and one to fall back to."""
_PREFIX, _EARLIER, _ASIDE = "step-", ".earlier", ".aside"

Files = Mapping[str, str]
"""Digests of files, by path in the directory of a step."""


def digest(content: bytes) -> str:
    """Digest of bytes."""
    return hashlib.blake2b(content, digest_size=_SIZE).hexdigest()


def array_digest(arrays: Iterable[np.ndarray]) -> str:
    """Digest of the values of arrays, one array after the other."""
    digest = hashlib.blake2b(digest_size=_SIZE)
    for array in arrays:
        digest.update(raw_bytes(array))
    return digest.hexdigest()


def array_checksum(arrays: Iterable[np.ndarray], before: int = 0) -> int:
    """CRC-32 of the values of arrays, one after the other, and after others of which it is ``before``.

    It detects what a killed process left half-written, at five times the speed of ``array_digest``.
    """
    checksum = before
    for array in arrays:
        checksum = zlib.crc32(raw_bytes(array), checksum)
    return checksum


def raw_bytes(array: np.ndarray) -> memoryview:
    """Bytes of an array's values in C order; a copy only if the array is in another order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def nothing() -> None:
    """Tells nobody of progress."""


def file_digest(path: Path, progress: Callable[[], None] = nothing) -> str:
    """Digest of a file; ``progress`` is called now and then."""
    digest = hashlib.blake2b(digest_size=_SIZE)
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ):
            digest.update(block)
            progress()
    return digest.hexdigest()


def synced_digests(directory: Path) -> dict[str, str]:
    """Digests of all files under a directory, by path from there, each taken after the file is synced to the disk."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): synced_digest(path) for path in paths}


def synced_digest(path: Path, progress: Callable[[], None] = nothing) -> str:
    """Digest of a file, taken after it is synced to the disk; ``progress`` is called now and then."""
    sync_file(path)
    return file_digest(path, progress)


def difference(path: Path, expected: str) -> str | None:
    """Says how a file differs from its expected digest, as a phrase; None if it does not."""
    if not path.is_file():
        return "is missing"
    try:
        digest = file_digest(path)
    except OSError as error:  # a bad sector, or no permission: there may be another copy
        return f"cannot be read: {error.strerror}"
    return None if digest == expected else "is not as it was saved"


@dataclass(frozen=True)
class Copy:
    """An expert's state in one checkpoint.

    Attributes:
        step: iteration of the checkpoint.
        contained: token updates that it contains, see ``TokenUpdateCounter``.
        num_bytes: bytes of its values.
        content: digest of its values.
        files: files that hold them.
    """

    step: int
    contained: int
    num_bytes: int
    content: str
    files: Files


@dataclass(frozen=True)
class Dense:
    """The dense part in one checkpoint.

    Attributes:
        shapes: dtypes and shapes of its arrays, by name.
        contents: digests of their values, by name.
        num_bytes: bytes of all values.
        files: files that hold them.
    """

    shapes: Mapping[str, str]
    contents: Mapping[str, str]
    num_bytes: int
    files: Files


@dataclass(frozen=True)
class Ledger:
    """The history that the next checkpoint depends on.

    Attributes:
        tally: token updates so far.
        copies: copies of every expert, the newest first; empty before the first checkpoint.
        common: files that are needed to read any array of a step, by step.
        turn_L: int64, class of every layer with which its next sequential selection begins.
        k: experts of a layer that a partial checkpoint saves.
    """

    tally: TokenUpdateCounter
    copies: Mapping[Unit, tuple[Copy, ...]]
    common: Mapping[int, Files]
    turn_L: np.ndarray
    k: int

    @classmethod
    def first(cls, num_layers: int, num_classes: int, k: int) -> "Ledger":
        """The ledger of a run that has saved nothing."""
        turn_L = initial_rotation(num_layers, num_classes, k)
        return cls(TokenUpdateCounter.none(num_layers, num_classes), {}, {}, turn_L, k)

    @property
    def num_classes(self) -> int:
        """Number of expert classes, E."""
        return self.tally.contained_LE.shape[1]

    def counted(self, popularity_LE: Any, dropped_LE: Any) -> "Ledger":
        """The ledger after one more iteration, see ``Tally.count``."""
        return replace(self, tally=self.tally.count(popularity_LE, dropped_LE))

    def uncounted(self, num_iterations: int, most_updates: int) -> "Ledger":
        """The ledger after more iterations without a record, see ``Tally.uncounted``."""
        return replace(self, tally=self.tally.uncounted(num_iterations, most_updates))

    def choose(self, selection: str, *, full: bool) -> Int[np.ndarray, "L K"]:
        """The classes ``[L, K]`` that the next checkpoint saves: all where some have no copy yet, or where ``full``."""
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
        """The ledger after a checkpoint that made these copies."""
        merged = dict(self.copies)
        for unit, copy in copies.items():
            merged[unit] = (copy, *(old for old in self.copies.get(unit, ()) if old.step < step))[:_NUM_COPIES]
        used = {copy.step for unit_copies in merged.values() for copy in unit_copies} | {step}
        files = {old: self.common[old] for old in used if old != step} | {step: common}
        is_partial = chosen_LK.shape[-1] < self.num_classes
        turn_L = next_rotation(self.turn_L, self.num_classes, self.k) if is_partial else self.turn_L
        return replace(self, copies=merged, common=files, turn_L=turn_L)

    def emptied(self, k: int) -> "Ledger":
        """The ledger for a state of another shape: without copies, so that the next checkpoint is full.

        All copies in a checkpoint have one shape.
        """
        return replace(self, copies={}, common={}, k=k)

    def _newest(self) -> list[Copy | None]:
        """The newest copy of every expert, in order; None where there is no copy."""
        return [next(iter(self.copies.get(unit, ())), None) for unit in np.ndindex(*self.tally.contained_LE.shape)]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its values.

    Attributes:
        step: iterations done.
        identity: settings that a run has to share to read it, by name; JSON.
        extra: other state, such as the loader's; JSON.
        dense: the dense part.
        unit_shapes: shapes of an expert's state, by dtype.
        chosen: classes that this checkpoint has saved, ``[L][K]``.
        bytes_per_rank: bytes that it has written, ``[P][N]``.
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
        """Bytes of the values that this checkpoint has written."""
        return sum(map(sum, self.bytes_per_rank))

    @property
    def is_full(self) -> bool:
        """Whether it has saved every expert."""
        return all(len(classes) == self.ledger.num_classes for classes in self.chosen)

    def files_needed(self) -> dict[int, dict[str, str]]:
        """The files that a restore of this checkpoint may read, by step."""
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
"""Kinds of the fields in a manifest's file."""


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes the manifest to the directory of a checkpoint, which makes the checkpoint restorable."""
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
    """Reads the manifest from the directory of a checkpoint.

    Args:
        path: directory of the checkpoint.
        setting: the user's name for it, for errors.

    Raises:
        SettingError: there is no manifest, or it is damaged, incomplete, of another version, or of another checkpoint.
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
    """Makes a manifest of the fields of its file; raises LookupError or TypeError where one is missing or no such."""
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
    """Writes a manifest of any kind as JSON, for ``read_signed``."""
    text = json.dumps(fields).encode()
    replace_file(path / name, digest(text).encode() + b"\n" + text)


def read_signed(path: Path, setting: str, version: int, name: str = MANIFEST) -> dict[str, Any]:
    """Reads a manifest of any kind, whose first line is the digest of the second; raises as ``read_manifest`` does."""
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
    """Raises SettingError, naming one array, where a checkpoint's shapes by name are not the expected ones."""
    for name in sorted({*stored_shapes, *expected_shapes}):
        stored, expected = stored_shapes.get(name, "nothing"), expected_shapes.get(name, "nothing")
        if stored != expected:
            raise SettingError(setting, str(path), f"is of another model: it has {stored} for {name}, here {expected}")


def checkpoint_steps(directory: Path) -> list[int]:
    """The iterations that can be restored, oldest first."""
    return [step for step in _saved_steps(directory) if (checkpoint_path(directory, step) / MANIFEST).is_file()]


def committed_steps(directory: Path) -> list[int]:
    """The iterations that can be restored, and those that have lost their manifests, oldest first.

    Removal takes manifests oldest first, so an iteration without one that is newer than the oldest checkpoint has lost
    it, as have all where no checkpoint is left.
    """
    saved, restorable = _saved_steps(directory), checkpoint_steps(directory)
    return [step for step in saved if not restorable or step >= restorable[0]]


def checkpoint_path(directory: Path, step: int) -> Path:
    """The path of an iteration's checkpoint."""
    return directory / f"{_PREFIX}{step:08d}"


def clean_up_saves(directory: Path, excluded: Path | None = None) -> None:
    """Cleans up after interrupted saves: removes what they wrote, and puts back the checkpoints they were replacing.

    Unfinished saves would keep a full disk full.

    Args:
        directory: directory of all checkpoints.
        excluded: directory that is not removed, in which several hosts tell each other about a save.
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
    """Makes the temporary directory of a save, which ``commit_save`` renames; ``excluded`` as in ``clean_up_saves``."""
    directory.mkdir(parents=True, exist_ok=True)
    clean_up_saves(directory, excluded)
    path = temporary_path(directory, step)
    path.mkdir()
    return path


def temporary_path(directory: Path, step: int) -> Path:
    """The path of the directory that ``begin_save`` creates."""
    return directory / f".{checkpoint_path(directory, step).name}.tmp"


def commit_save(directory: Path, step: int) -> Path:
    """Renames the directory of ``begin_save``; an earlier checkpoint of the iteration remains until that is done."""
    path = checkpoint_path(directory, step)
    if path.exists():
        path.rename(path.with_suffix(_EARLIER))
    temporary_path(directory, step).rename(path)
    sync_directory(directory)  # before the checkpoint that this one replaces is removed
    clean_up_saves(directory)
    return path


def archive_newer(directory: Path, step: int) -> list[str]:
    """Sets aside the checkpoints of iterations after ``step``, from which a run resumes: they would shadow new ones.

    Returns:
        Their new names.
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


def remove_set_aside(directory: Path, step: int) -> None:
    """Removes checkpoints set aside, up to an iteration that has been saved and read back since."""
    for path in directory.glob(f"{_PREFIX}*{_ASIDE}"):
        number = path.name.removeprefix(_PREFIX).removesuffix(_ASIDE)
        if number.isdigit() and int(number) <= step:
            shutil.rmtree(path)


def delete_old(directory: Path, num_kept: int) -> None:
    """Removes files that no kept checkpoint needs; removes nothing if the manifest of a kept one cannot be read.

    Args:
        directory: directory of all checkpoints of a run.
        num_kept: number of checkpoints to keep, the newest ones.
    """
    steps = checkpoint_steps(directory)
    try:
        manifests = [read_manifest(checkpoint_path(directory, step), "checkpoint") for step in steps[-num_kept:]]
    except SettingError:
        return  # it is unknown which files that checkpoint needs
    for step in steps[:-num_kept]:  # manifests first, so that a checkpoint that is half removed does not count
        (checkpoint_path(directory, step) / MANIFEST).unlink()
    needed = files_needed(manifests)
    for step in _saved_steps(directory):
        _keep_only(checkpoint_path(directory, step), needed.get(step, frozenset()))


def files_needed(manifests: list[Manifest]) -> dict[int, frozenset[str]]:
    """The files that restores of some checkpoints may read, by step, manifests included."""
    needed: dict[int, set[str]] = {}
    for manifest in manifests:
        for step, files in manifest.files_needed().items():
            needed.setdefault(step, set()).update(files)
        needed[manifest.step].add(MANIFEST)
    return {step: frozenset(files) for step, files in needed.items()}


def _keep_only(path: Path, names: frozenset[str]) -> None:
    """Removes all other files of a directory, and directories that become empty."""
    if not names:
        shutil.rmtree(path)
        return
    for below in sorted(path.rglob("*"), reverse=True):
        if below.is_dir():
            if not any(below.iterdir()):
                below.rmdir()
        elif below.relative_to(path).as_posix() not in names:
            below.unlink()


def _saved_steps(directory: Path) -> list[int]:
    """The iterations with any files, oldest first."""
    names = [path.name.removeprefix(_PREFIX) for path in directory.glob(f"{_PREFIX}*")] if directory.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())
