"""A checkpoint that several hosts write together: each writes its ranges of the files that a single host would write.

``HostSave`` performs the steps of a save on one host. The first host creates the files without values, and all hosts
fill in the ranges that they hold. A file contains a whole array, as if a single host had written it. The files are then
divided among the hosts by size. Each host reads its files back, compares every range with the checksum that the writer
computed from memory, and computes the file's digest. The first host writes the manifest. No host ever holds more of the
state in memory than its own pieces.

Saving runs in threads while training continues, so it cannot use collectives, which would have to be ordered in the
same way on all hosts relative to those of training. Instead, the hosts exchange messages in shared files, see
``SaveNotes``:

    .step-00000040.5f0c.hosts.tmp/host-0.begun      the files of the checkpoint exist, without values
    .step-00000040.5f0c.hosts.tmp/host-1.filled     which ranges host 1 has written
    .step-00000040.5f0c.hosts.tmp/host-1.checked    digests of the files that host 1 has read back
    .step-00000040.5f0c.hosts.tmp/host-1.failed     why host 1 failed, which makes all hosts give up
    .step-00000040.5f0c.hosts.tmp/host-1.signs      grows as long as host 1 makes progress

A save has a token, here 5f0c, so that another save of the same iteration does not read its messages. The next save or
the next start of the run removes leftover messages.
"""

import errno
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from swift.checkpoint.array_files import data_file, files_of, map_array, reserve_arrays, runs, writing_parts
from swift.checkpoint.arrays import host_subset, is_persisted, unit_array
from swift.checkpoint.manifest import (
    ARRAYS,
    BLOCK,
    Files,
    Ledger,
    Manifest,
    array_checksum,
    array_digest,
    begin_save,
    checkpoint_path,
    read_signed,
    synced_digest,
    temporary_path,
    write_signed,
)
from swift.checkpoint.units import StateSplit, Unit, shape_text
from swift.checkpoint.writer import WrittenArrays, finish_save
from swift.errors import SettingError, first_line

_PATIENCE_S, _SIGN_S, _VERSION = 120.0, 1.0, 1
_LOOK_S, _LAZIEST_S = 0.02, 1.0
"""Initial and maximum polling interval, in seconds. It grows, because many hosts poll the same file system."""
_ENDING = ".hosts.tmp"

Stage = Literal["begun", "filled", "checked"]

_Place = tuple[slice, ...]


class InvalidState(Exception):
    """The state must not replace a valid checkpoint, for example because its values are not finite."""


class HostFailed(OSError):
    """Another host failed to write its part of a checkpoint."""


class Save(NamedTuple):
    """The identity of a save, the same on all hosts.

    Attributes:
        step: iterations done.
        token: random text that distinguishes this save from others of the same iteration.
    """

    step: int
    token: str


class SaveNotes:
    """Exchanges messages about one save among the hosts, through files in a shared directory.

    Args:
        directory: directory of all checkpoints of a run.
        save: the save.
        host_index: number of this host.
        patience_s: seconds within which an awaited host has to show progress.

    Attributes:
        path: directory of the messages.
    """

    def __init__(self, directory: Path, save: Save, host_index: int, patience_s: float = _PATIENCE_S):
        self.path = directory / f".{checkpoint_path(directory, save.step).name}.{save.token}{_ENDING}"
        self._save, self._host_index, self._patience_s = save, host_index, patience_s
        self._signed_at = -_SIGN_S

    def post(self, stage: Stage, fields: Mapping[str, Any]) -> None:
        """Announces that this host has finished a stage; ``fields`` are JSON-serializable."""
        self._write(stage, fields)

    def sign(self) -> None:
        """Signals to the other hosts that this one is making progress; writes at most once a second."""
        now = time.monotonic()
        if now - self._signed_at >= _SIGN_S:
            self._signed_at = now
            self.path.mkdir(parents=True, exist_ok=True)
            with self._file(self._host_index, "signs").open("ab") as file:
                file.write(b".")

    def give_up(self, error: Exception) -> None:
        """Tells the other hosts not to wait for this one; a message that cannot be written is skipped."""
        with suppress(OSError):
            self._write("failed", {"reason": first_line(error), "is_spoilt": isinstance(error, InvalidState)})

    def read(self, host: int, stage: Stage) -> dict[str, Any]:
        """Waits until a host has finished a stage, and returns the fields that it announced.

        Raises:
            HostFailed, InvalidState: another host has given up.
            TimeoutError: the host has made no progress for ``patience_s``.
            OSError: the message is damaged.
        """
        until, before, pause_s = time.monotonic() + self._patience_s, 0, _LOOK_S
        while not self._file(host, stage).exists():
            self._check_all()
            signs = self._signs(host)
            if signs != before:  # the file may also be shorter, after a save has begun again
                until, before = time.monotonic() + self._patience_s, signs
            if time.monotonic() > until:
                raise TimeoutError(f"{self._complaint(host)} in {self._patience_s:g} s")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LAZIEST_S)
        return self._read(host, stage)

    def _check_all(self) -> None:
        for path in self.path.glob("host-*.failed"):
            host = int(path.stem.removeprefix("host-"))
            if host != self._host_index:
                fields = self._read(host, "failed")
                kind = InvalidState if fields["is_spoilt"] else HostFailed
                raise kind(f"{self._complaint(host)}: {fields['reason']}")

    def _complaint(self, host: int) -> str:
        return f"host {host} has not written its part of iteration {self._save.step}"

    def _signs(self, host: int) -> int:
        try:
            return self._file(host, "signs").stat().st_size
        except OSError:
            return 0

    def _write(self, label: str, fields: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_signed(self.path, {"version": _VERSION, **fields}, self._file(self._host_index, label).name)

    def _read(self, host: int, label: str) -> dict[str, Any]:
        try:
            return read_signed(self.path, "checkpoint", _VERSION, self._file(host, label).name)
        except SettingError as error:
            raise OSError(f"{error.value} {error.allowed}") from error

    def _file(self, host: int, label: str) -> Path:
        return self.path / f"host-{host}.{label}"


class HostShard(NamedTuple):
    """The piece of a state's array that a host holds.

    Attributes:
        name: name of the array.
        place: index of the piece in the array, a slice for each leading dimension.
        values: the piece's values.
    """

    name: str
    place: _Place
    values: np.ndarray


@dataclass(frozen=True)
class _WrittenRanges:
    """One host's report on the ranges that it has written.

    Attributes:
        places: for each of the host's pieces, the name of the state's array and the index of the piece in it.
        checksums: checksums of the values in the host's memory, by stored array.
        num_bytes: bytes of values that the host has written.
    """

    places: tuple[tuple[str, _Place], ...]
    checksums: Mapping[str, int]
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for ``from_json``."""
        places = [[name, [[part.start, part.stop] for part in place]] for name, place in self.places]
        return {"places": places, "checksums": dict(self.checksums), "num_bytes": self.num_bytes}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Parses a report that a host announced."""
        places = tuple((name, tuple(slice(*ends) for ends in place)) for name, place in fields["places"])
        return cls(places, fields["checksums"], fields["num_bytes"])


@dataclass(frozen=True)
class _Contents:
    """Digests of the stored arrays that have been verified.

    Attributes:
        files: digests of each array's files.
        dense: digests of each dense array's values.
        units: digests of each expert's values.
    """

    files: dict[str, Files] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)
    units: dict[Unit, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for ``adopt``."""
        return {
            "files": self.files,
            "dense": self.dense,
            "units": [[*unit, content] for unit, content in self.units.items()],
        }

    def adopt(self, fields: Mapping[str, Any]) -> None:
        """Adds the digests that a host announced."""
        self.files.update(fields["files"])
        self.dense.update(fields["dense"])
        self.units.update({(layer, class_): content for layer, class_, content in fields["units"]})


def stored_shapes(split: StateSplit, chosen_LK: np.ndarray) -> dict[str, Any]:
    """Returns the shapes and dtypes, by name, of all arrays that a checkpoint with the chosen experts stores."""
    shapes = {name: leaf for name, leaf in split.dense_shapes.items() if is_persisted(shape_text(leaf))}
    for unit in _units(chosen_LK):
        shapes.update({unit_array(unit, dtype): shape for dtype, shape in split.unit_shapes.items()})
    return shapes


def write_ranges(
    arrays: Path, split: StateSplit, chosen_LK: np.ndarray, pieces: Iterable[HostShard], progress: Callable[[], None]
) -> _WrittenRanges:
    """Writes a host's pieces into the files of a checkpoint, and calls fsync on the files.

    Args:
        arrays: directory of the arrays, created by ``reserve_arrays``.
        split: division of the state.
        chosen_LK: expert classes to save, ``[L, K]``.
        pieces: the host's pieces of the state; expert arrays have only the saved classes, in the order of
            ``chosen_LK``.
        progress: function that is called after each block.

    Returns:
        The host's report on the written ranges.

    Raises:
        OSError, ValueError: the pieces cannot be written.
    """
    places, parts = [], dict[str, list[tuple[_Place, np.ndarray]]]()
    for piece in pieces:
        places.append((piece.name, piece.place))
        for name, place, index in _parts(split, chosen_LK, piece.name, piece.place):
            parts.setdefault(name, []).append((place, piece.values[index]))
    checksums, num_bytes = dict.fromkeys(parts, 0), 0
    for name, parts_of_array in parts.items():  # each file is opened once
        with writing_parts(arrays, name, progress) as write:
            for place, part in parts_of_array:
                values = np.ascontiguousarray(part)
                checksums[name] = array_checksum([values], checksums[name])
                num_bytes += write(place, values)
    return _WrittenRanges(tuple(places), checksums, num_bytes)


def verify_ranges(
    arrays: Path,
    split: StateSplit,
    chosen_LK: np.ndarray,
    hosts: Sequence[_WrittenRanges],
    host_index: int,
    progress: Callable[[], None],
) -> _Contents:
    """Reads back and verifies this host's share of a checkpoint's files, which are divided among the hosts by size.

    Args:
        arrays: directory of the arrays.
        split: division of the state.
        chosen_LK: expert classes to save, ``[L, K]``.
        hosts: the report of each host on the ranges that it has written.
        host_index: number of this host.
        progress: function that is called after each block.

    Returns:
        Digests of these files and of the values in them.

    Raises:
        OSError: values are missing, or differ from those in the memory of the host that wrote them.
        ValueError: a file does not have the layout with which it was created.
    """
    shapes, contents = stored_shapes(split, chosen_LK), _Contents()
    assigned_items = host_subset(_items(split, chosen_LK), host_index, len(hosts))
    names = [name for item in assigned_items for name in item.arrays]
    places = _places_of(split, chosen_LK, hosts, names)
    for name in names:
        array = map_array(arrays, name)
        if shape_text(array) != shape_text(shapes[name]):
            raise ValueError(f"{name} is {shape_text(shapes[name])} and is stored as {shape_text(array)}")
        _compare(array, name, hosts, places[name], progress)
        folder = files_of(name)
        contents.files[name] = {
            f"{ARRAYS}/{folder}/{path.name}": synced_digest(path, progress)
            for path in sorted((arrays / folder).iterdir())
        }
    for item in assigned_items:
        content = _content(arrays, item.arrays, contents.files)
        progress()
        if isinstance(item.key, str):
            contents.dense[item.key] = content
        else:
            contents.units[item.key] = content
    return contents


class _Item(NamedTuple):
    """A dense array or an expert, and the stored arrays that hold its values."""

    key: str | Unit
    arrays: tuple[str, ...]


def _units(chosen_LK: np.ndarray) -> Iterator[Unit]:
    return ((layer, class_) for layer, classes in enumerate(chosen_LK.tolist()) for class_ in classes)


def _items(split: StateSplit, chosen_LK: np.ndarray) -> Iterator[tuple[int, _Item]]:
    """Yields (bytes, item) for every dense array and chosen expert that is stored."""
    for name, leaf in split.dense_shapes.items():
        if is_persisted(shape_text(leaf)):
            yield math.prod(leaf.shape) * leaf.dtype.itemsize, _Item(name, (name,))
    for unit in _units(chosen_LK):
        yield split.unit_bytes, _Item(unit, tuple(unit_array(unit, dtype) for dtype in split.unit_shapes))


def _parts(
    split: StateSplit, chosen_LK: np.ndarray, name: str, place: _Place
) -> Iterator[tuple[str, _Place, tuple[Any, ...]]]:
    """Yields the parts of stored arrays that a piece fills, as (name, place, index into the piece's values).

    A dense array is stored unchanged. The values of an expert array are in the stored arrays ``[V, N, w]`` of all
    experts.
    """
    if name not in split.expert_names:
        yield name, place, ()
        return
    dtype = str(split.shapes[name].dtype)
    index = split.names_of_type[dtype].index(name)
    stages, stack, ranks, _, values = (*place, *[slice(None)] * (5 - len(place)))
    for row, layers in enumerate(split.layers_of_stages[stages]):
        for stack_index, layer in enumerate(layers[stack]):
            for k, class_ in enumerate(chosen_LK[layer].tolist()):
                unit_place = slice(index, index + 1), ranks, values
                yield unit_array((layer, class_), dtype), unit_place, (row, stack_index, slice(None), k)


def _places_of(
    split: StateSplit, chosen_LK: np.ndarray, hosts: Sequence[_WrittenRanges], names: Iterable[str]
) -> dict[str, list[list[_Place]]]:
    """Returns, for each stored array, the places that each host has written, in the order of writing.

    The order matters: a host's checksum covers its values in this order.
    """
    places: dict[str, list[list[_Place]]] = {name: [[] for _ in hosts] for name in names}
    for host, filled in enumerate(hosts):
        for piece, where in filled.places:
            for name, place, _ in _parts(split, chosen_LK, piece, where):
                if name in places:
                    places[name][host].append(place)
    return places


def _compare(
    array: np.ndarray,
    name: str,
    hosts: Sequence[_WrittenRanges],
    places: Sequence[Sequence[_Place]],
    progress: Callable[[], None],
) -> None:
    """Raises OSError unless an array on the disk has the values that the hosts had in memory, without gaps."""
    flat, missing, length = array.reshape(-1), array.size, max(1, BLOCK // array.itemsize)
    for host, (filled, host_places) in enumerate(zip(hosts, places, strict=True)):
        checksum = 0
        for run in (run for place in host_places for run in runs(array.shape, place)):
            for start in range(run.start, run.stop, length):
                checksum = array_checksum([flat[start : min(run.stop, start + length)]], checksum)
                progress()
            missing -= run.stop - run.start
        if checksum != filled.checksums.get(name, 0):  # 0: the checksum of no values
            reason = f"the values of {name} are not those that host {host} has saved"
            raise OSError(errno.EIO, f"{reason} ({os.strerror(errno.EIO)})")
    if missing:
        raise OSError(f"not all of the state has come: {name}")


def _content(arrays: Path, names: Sequence[str], files: Mapping[str, Files]) -> str:
    """Returns the digest of the arrays' values; for a single array, this is its file's digest."""
    if len(names) > 1:
        return array_digest(map_array(arrays, name) for name in names)
    return files[names[0]][f"{ARRAYS}/{data_file(arrays, names[0])}"]


@dataclass(frozen=True)
class HostSave:
    """A save's steps on one of several hosts.

    The first host calls ``begin``, ``write`` and ``commit``; the others call ``wait`` and ``write``.

    Attributes:
        directory: directory of all checkpoints of a run.
        save: identity of the save, the same on all hosts.
        host_index: number of this host.
        num_hosts: number of hosts.
        split: division of the state.
        chosen_LK: expert classes to save, ``[L, K]``.
    """

    directory: Path
    save: Save
    host_index: int
    num_hosts: int
    split: StateSplit
    chosen_LK: np.ndarray

    @cached_property
    def board(self) -> SaveNotes:
        """The hosts' messages about this save."""
        return SaveNotes(self.directory, self.save, self.host_index)

    def begin(self, write: Callable[[Path, Mapping[str, np.ndarray]], None]) -> None:
        """Creates the checkpoint's files, on the first host; may be called again after a failure.

        Args:
            write: function that writes small arrays, see ``reserve_arrays``.

        Raises:
            OSError, ValueError: the disk is too full, or the files cannot be created.
        """
        temporary = begin_save(self.directory, self.save.step, self.board.path)
        try:
            reserve_arrays(temporary / ARRAYS, self._shapes, write, self.board.sign)
            self.board.post("begun", {})
        except BaseException:
            self.discard()
            raise

    def wait(self) -> None:
        """Waits until the first host has created the files; raises the errors of ``SaveNotes.read``."""
        self.board.read(0, "begun")

    def write(self, pieces: Iterable[HostShard]) -> None:
        """Writes this host's pieces, waits for all hosts, and verifies this host's share of the files.

        Raises:
            OSError, ValueError: the pieces cannot be written, a file is damaged, or another host has failed.
            InvalidState: another host's state must not be saved.
        """
        filled = write_ranges(self._arrays, self.split, self.chosen_LK, pieces, self.board.sign)
        self.board.post("filled", filled.to_json())
        contents = verify_ranges(
            self._arrays, self.split, self.chosen_LK, self._filled, self.host_index, self.board.sign
        )
        self.board.post("checked", contents.to_json())

    def commit(
        self, ledger: Ledger, *, identity: Mapping[str, Any], extra: Mapping[str, Any], num_kept: int, num_best: int = 0
    ) -> tuple[Manifest, list[int]]:
        """Writes the manifest and renames the checkpoint to its final name, on the first host; see ``save_checkpoint``.

        Returns:
            (manifest, bytes of values that each host wrote).
        """
        contents, bytes_of_hosts = _Contents(), [filled.num_bytes for filled in self._filled]
        for host in range(self.num_hosts):
            contents.adopt(self.board.read(host, "checked"))
        written = WrittenArrays(contents.files, self._common(), contents.dense, contents.units)
        step = self.save.step
        options: dict[str, Any] = {"identity": identity, "extra": extra, "num_kept": num_kept, "num_best": num_best}
        return finish_save(self.directory, step, written, self.split, self.chosen_LK, ledger, **options), bytes_of_hosts

    def discard(self) -> None:
        """Removes the files of a failed save, on the first host, to free disk space."""
        shutil.rmtree(temporary_path(self.directory, self.save.step), ignore_errors=True)

    @cached_property
    def _shapes(self) -> dict[str, Any]:
        return stored_shapes(self.split, self.chosen_LK)

    @property
    def _arrays(self) -> Path:
        return temporary_path(self.directory, self.save.step) / ARRAYS

    @cached_property
    def _filled(self) -> list[_WrittenRanges]:
        """The reports of all hosts on the ranges that they wrote; the first access waits for them."""
        return [_WrittenRanges.from_json(self.board.read(host, "filled")) for host in range(self.num_hosts)]

    def _common(self) -> dict[str, str]:
        """Calls fsync on the files that do not belong to an array, and returns their digests."""
        root, array_folders = self._arrays.parent, {self._arrays / files_of(name) for name in self._shapes}
        paths = [path for path in self._arrays.rglob("*") if path.is_file() and path.parent not in array_folders]
        return {path.relative_to(root).as_posix(): synced_digest(path) for path in sorted(paths)}
