"""Store of a process's states as files in shared memory: they outlive its devices, and the process itself.

A generation ends with everything on its devices (see ``swift.elastic.jax_group``). What a process needs for the next
one is here, and its next incarnation finds it if the process was killed.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from swift.checkpoint.storage.digests import array_checksum, digest, raw_bytes
from swift.elastic.membership.members import Process, Stamp
from swift.elastic.state.disk_spill import remove_with_spill, share_or_copy, write_or_spill
from swift.errors import RunError

_PREFIX, _ALIGNMENT = "state-", 64


class SharedMemoryStore:
    """The states that one process has kept.

    Args:
        directory: directory of all processes of a run on this machine, preferably in shared memory. It must exist: one
            that was removed with its run must not be created again.
        process: the process.
    """

    def __init__(self, directory: Path, process: Process):
        self._directory = directory / directory_name(process)
        self._directory.mkdir(exist_ok=True)

    def stamps(self) -> frozenset[Stamp]:
        """Returns the stamps of all kept states."""
        found = [path.name.removeprefix(_PREFIX).split("-") for path in self._directory.glob(f"{_PREFIX}*")]
        return frozenset(Stamp(int(generation), int(step)) for generation, step in found)

    def save(self, stamp: Stamp, tree: Any, records: Sequence[Mapping[str, Any]] = ()) -> None:
        """Keeps a tree of arrays, replacing one with the same stamp.

        Args:
            stamp: stamp of the state.
            tree: the state.
            records: records, JSON, of the iterations up to it that may not be written yet.

        Raises:
            OSError: there is no room for it, neither here nor on the disk that may belong to the directory.
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

    def load(self, stamp: Stamp, like: Any, *, is_own: bool = False) -> Any:
        """Loads a state; its arrays are views of the file, and stay valid if the file is removed.

        Args:
            stamp: one of ``stamps``.
            like: tree of objects with the expected shapes and types.
            is_own: whether this incarnation has saved it, so that its checksum need not be checked.

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
        """Returns the records kept with all states, by iteration, except those that cannot be read."""
        found: dict[int, dict[str, Any]] = {}
        for stamp in sorted(self.stamps()):
            with (
                suppress(OSError, ValueError, TypeError, KeyError, AttributeError),
                self._path(stamp).open("rb") as file,
            ):
                head = json.loads(file.readline())
                if digest(head["records"].encode()) == head["records_digest"]:
                    found |= {record["step"]: record for record in json.loads(head["records"])}
        return found

    def hand_over(self, other: "SharedMemoryStore") -> None:
        """Adds all states to another store; free of cost on the same file system."""
        for stamp in self.stamps() - other.stamps():
            share_or_copy(self._path(stamp), other._path(stamp), other._temporary(stamp))

    def keep_only(self, stamps: frozenset[Stamp] = frozenset()) -> None:
        """Removes all states except some."""
        for stamp in self.stamps() - stamps:
            remove_with_spill(self._path(stamp))
        for unfinished in self._directory.glob(f".{_PREFIX}*"):  # by an incarnation that died meanwhile
            remove_with_spill(unfinished)

    def _path(self, stamp: Stamp) -> Path:
        return self._directory / f"{_PREFIX}{stamp.generation}-{stamp.step}"

    def _temporary(self, stamp: Stamp) -> Path:
        """Path of a state that is being written; the directory has one writer."""
        return self._directory / f".{_PREFIX}{stamp.generation}-{stamp.step}.tmp"


def directory_name(process: Process) -> str:
    """Returns the name of a process's directory.

    >>> directory_name(Process((1, 0), 2)), process_of(directory_name(Process((1, 0), 2))) == Process((1, 0), 2)
    ('1-0-2', True)
    """
    return "-".join(map(str, (*process.worker, process.rank)))


def process_of(name: str) -> Process:
    """Returns the process of a directory."""
    pipeline, stage, rank = map(int, name.split("-"))
    return Process((pipeline, stage), rank)


def _shape(leaf: Any) -> list[Any]:
    return [str(leaf.dtype), list(leaf.shape)]


def _aligned(offset: int) -> int:
    """Rounds up to the alignment with which devices can use an array where it is."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
