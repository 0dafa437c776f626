"""A store for the states of a process, in files in shared memory that outlive its devices and the process itself.

At the end of a generation, the arrays on its devices are lost (see ``swift.elastic.jax_group``). ``SharedMemoryStore``
keeps what the process needs for the next generation; if the process was killed, its next incarnation reads it from
there. A file that does not fit into the memory is written to a disk, with a link in its place; the node's memory
directory has a link to the directory for such files, see ``node_memory``.

A whole state has a row for every stage or worker. A process has ``Shards`` of every array, see
``swift.mesh.state_rows``: for each of its devices, RANKED ``[1, layer, 1, ...]``, or SHARED ``[1, ...]`` and equal on
all devices. ``process_parts`` and ``join_parts`` convert between the two.

Legend: P stages or workers, N expert ranks.
"""

import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import jax
import numpy as np
from jax.sharding import PartitionSpec

from swift.checkpoint.manifest import array_checksum, digest, raw_bytes
from swift.elastic.membership.messages import Process, StateId
from swift.errors import RunError
from swift.mesh.per_rank import RANKED, is_spec, map_specs
from swift.mesh.state_rows import Shards

SPILL = "swift-spill"
"""Name of the link in a memory directory to its directory on a disk."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PREFIX, _ALIGNMENT = "state-", 64


class SharedMemoryStore:
    """The stored states of one process, one file per stamp.

    Args:
        directory: directory for all processes of a run on this machine, preferably in shared memory. It must exist,
            since a directory that was removed with its run must not be created again.
        process: owner of the states, and the only writer.
    """

    def __init__(self, directory: Path, process: Process):
        self._directory = directory / directory_name(process)
        self._directory.mkdir(exist_ok=True)

    def stamps(self) -> frozenset[StateId]:
        """Returns the stamps of all stored states."""
        names = [path.name.removeprefix(_PREFIX).split("-") for path in self._directory.glob(f"{_PREFIX}*")]
        return frozenset(StateId(int(generation), int(step)) for generation, step in names)

    def save(self, stamp: StateId, tree: Any, records: Sequence[Mapping[str, Any]] = ()) -> None:
        """Stores a tree of arrays, replacing one with the same stamp.

        Args:
            stamp: stamp of the state.
            tree: the state.
            records: records (JSON) of the iterations up to the state that may not be in the log yet.

        Raises:
            OSError: there is no space, neither in this directory nor on the disk that it may be linked to.
        """
        self._directory.mkdir(exist_ok=True)  # see ``NodeMemory.mend``
        arrays = [np.asarray(leaf, order="C") for leaf in jax.tree.leaves(tree)]
        head = {"arrays": [_shape(array) for array in arrays], "checksum": array_checksum(arrays)}
        text = json.dumps(list(records))
        head |= {"records": text, "records_digest": digest(text.encode())}

        def write(file: BinaryIO) -> None:
            file.write(json.dumps(head).encode() + b"\n")
            for array in arrays:
                file.seek(_aligned(file.tell()))
                file.write(raw_bytes(array))
            file.truncate()

        if write_or_spill(self._path(stamp), self._temporary(stamp), write):
            print(f"{self._directory} is full: the state after iteration {stamp.step} is on a disk", file=sys.stderr)

    def load(self, stamp: StateId, like: Any, *, is_own: bool = False) -> Any:
        """Loads a state without copying it: the arrays are views of the file, and stay valid if the file is removed.

        Args:
            stamp: one of ``stamps``.
            like: tree of objects with the expected shapes and types.
            is_own: whether this incarnation has saved the state, which makes the checksum unnecessary.

        Raises:
            RunError: the state cannot be read, is damaged, or belongs to another model.
        """
        path, leaves, buffers = self._path(stamp), jax.tree.leaves(like), []
        damaged = RunError(f"{path} is damaged: it is not as it was saved")
        try:
            with path.open("rb") as file:
                head, offset = json.loads(file.readline()), file.tell()
                shapes, checksum = head["arrays"], head["checksum"]
            whole = np.memmap(path, np.uint8, "r")
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError):
            raise damaged from None
        if shapes != [_shape(leaf) for leaf in leaves]:
            raise RunError(f"{path} holds the state of another model")
        for leaf in leaves:
            begin = _aligned(offset)
            offset = begin + math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
            buffers.append(whole[begin:offset])
        if len(whole) != offset or not (is_own or array_checksum(buffers) == checksum):
            raise damaged
        arrays = [buffer.view(leaf.dtype).reshape(leaf.shape) for buffer, leaf in zip(buffers, leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(like), arrays)

    def records(self) -> dict[int, dict[str, Any]]:
        """Returns the records that were stored with any state, by iteration; damaged ones are skipped."""
        records: dict[int, dict[str, Any]] = {}
        for stamp in sorted(self.stamps()):
            with (
                suppress(OSError, ValueError, TypeError, KeyError, AttributeError),
                self._path(stamp).open("rb") as file,
            ):
                head = json.loads(file.readline())
                if digest(head["records"].encode()) == head["records_digest"]:
                    records |= {record["step"]: record for record in json.loads(head["records"])}
        return records

    def hand_over(self, other: "SharedMemoryStore") -> None:
        """Adds all states to another store, as hard links if both are on the same file system."""
        for stamp in self.stamps() - other.stamps():
            _link_or_copy(self._path(stamp), other._path(stamp), other._temporary(stamp))

    def retain_only(self, stamps: frozenset[StateId] = frozenset()) -> None:
        """Removes all states except these."""
        for stamp in self.stamps() - stamps:
            remove_with_spill(self._path(stamp))
        for unfinished in self._directory.glob(f".{_PREFIX}*"):  # left by an incarnation that died while writing
            remove_with_spill(unfinished)

    def _path(self, stamp: StateId) -> Path:
        return self._directory / f"{_PREFIX}{stamp.generation}-{stamp.step}"

    def _temporary(self, stamp: StateId) -> Path:
        """Returns the path of a state that is being written; unique, since the directory has only one writer."""
        return self._directory / f".{_PREFIX}{stamp.generation}-{stamp.step}.tmp"


def directory_name(process: Process) -> str:
    """Returns the directory name of a process: pipeline, stage and rank.

    >>> directory_name(Process((1, 0), 2)), process_of(directory_name(Process((1, 0), 2))) == Process((1, 0), 2)
    ('1-0-2', True)
    """
    return "-".join(map(str, (*process.worker, process.rank)))


def process_of(name: str) -> Process:
    """Returns the process that a directory belongs to; the inverse of ``directory_name``."""
    pipeline, stage, rank = map(int, name.split("-"))
    return Process((pipeline, stage), rank)


def _shape(leaf: Any) -> list[Any]:
    return [str(leaf.dtype), list(leaf.shape)]


def _aligned(offset: int) -> int:
    """Rounds an offset up to the alignment that lets devices use an array in place, without a copy."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def process_parts(specs: Any, tree: Any, index: int, ranks: Sequence[int]) -> Any:
    """Returns one process's part of a whole state.

    Args:
        specs: RANKED or SHARED for each array, or a prefix tree of these.
        tree: arrays on the host, RANKED ``[P, layer, N, ...]`` and SHARED ``[P, ...]``.
        index: row of the process, from 0 to P - 1.
        ranks: expert ranks of the process's devices.

    Returns:
        A tree of ``Shards``, which are views.
    """

    def cut(spec: PartitionSpec, whole: np.ndarray) -> Shards:
        local_rows = whole[index : index + 1]
        return [local_rows[:, :, rank : rank + 1] if spec == RANKED else local_rows for rank in ranks]

    return map_specs(cut, specs, tree)


def join_parts(specs: Any, shapes: Any, parts: Sequence[Any]) -> Any:
    """Returns the whole state from the parts of all processes.

    Args:
        specs: RANKED or SHARED for each array, or a prefix tree of these.
        shapes: shapes of the result.
        parts: trees of ``Shards``, one per process: all ranks of the first stage or worker, then those of the next.

    Returns:
        Arrays on the host, RANKED ``[P, layer, N, ...]`` and SHARED ``[P, ...]``.
    """

    def join(spec: PartitionSpec, whole: Any, *process_shards: Shards) -> np.ndarray:
        shards, num_stages = list(chain(*process_shards)), whole.shape[0]
        num_ranks = len(shards) // num_stages
        rows = [shards[stage * num_ranks : (stage + 1) * num_ranks] for stage in range(num_stages)]
        return np.concatenate([np.concatenate(row, axis=2) if spec == RANKED else row[0] for row in rows])

    return jax.tree.map(
        lambda spec, *below: jax.tree.map(partial(join, spec), *below), specs, shapes, *parts, is_leaf=is_spec
    )


def write_or_spill(path: Path, temporary: Path, write: Callable[[BinaryIO], object]) -> bool:
    """Writes a file atomically, by renaming a temporary file; writes to a disk instead if the memory is full.

    Args:
        path: path of the file; an existing file is replaced.
        temporary: path of the temporary file, in the same directory; nobody else may write to it.
        write: writes the content; called again if the content did not fit.

    Returns:
        Whether the file was written to the disk.

    Raises:
        OSError: the file fits nowhere, or cannot be written; nothing is left behind.
    """
    try:
        with temporary.open("wb") as file:
            write(file)
        spilled = None
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        spill = _spill_of(path)
        if spill is None or not (isinstance(error, OSError) and error.errno in _FULL):
            raise
        spilled = spill / uuid4().hex
        try:
            with spilled.open("wb") as file:
                write(file)
            temporary.symlink_to(spilled)
        except BaseException:
            spilled.unlink(missing_ok=True)
            raise
    _rename(temporary, path)
    return spilled is not None


def _link_or_copy(path: Path, other: Path, temporary: Path) -> None:
    """Makes a file available under a second path: as a hard link, or as a copy if the file system differs.

    Args:
        path: path of the file.
        other: second path.
        temporary: path of a temporary file in the directory of ``other``; nobody else may write to it.

    Raises:
        OSError: the file fits nowhere, or cannot be read.
    """
    temporary.unlink(missing_ok=True)
    spill = _spill_of(other)
    if path.is_symlink() and spill is not None:
        shared = spill / uuid4().hex
        os.link(path.resolve(), shared)
        temporary.symlink_to(shared)
        _rename(temporary, other)
        return
    try:
        os.link(path.resolve(), temporary)
        _rename(temporary, other)
    except OSError:
        with path.open("rb") as file:
            write_or_spill(other, temporary, lambda copy: _copy(file, copy))


def remove_with_spill(path: Path) -> None:
    """Removes a file, and its content on the disk if it was written there."""
    target = path.resolve() if path.is_symlink() else None
    path.unlink(missing_ok=True)
    if target is not None:
        target.unlink(missing_ok=True)


def _rename(temporary: Path, path: Path) -> None:
    """Renames a file, and removes the content of the replaced file from the disk if it was written there."""
    before = path.resolve() if path.is_symlink() else None
    temporary.replace(path)
    if before is not None:
        before.unlink(missing_ok=True)


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    source.seek(0)
    shutil.copyfileobj(source, target, 1 << 20)


def _spill_of(path: Path) -> Path | None:
    """Returns the directory on a disk for files that do not fit into the memory of ``path``, or None if none exists."""
    with suppress(OSError):
        for parent in path.parent.resolve().parents:
            link = parent / SPILL
            # Check the owner: in a directory that all users may write to, such as /tmp, others could create the link.
            if link.is_symlink() and link.lstat().st_uid == os.getuid() and link.is_dir():
                return link.resolve()
    return None
