"""Host arrays in files, one file for each array; the only module that calls Orbax (its v1 interface).

Each array has its own directory and is stored uncompressed and unmerged (no OCDBT). Files can therefore be kept,
removed and verified array by array, and a file holds exactly the bytes of its array.
"""

import errno
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from swift.checkpoint.manifest import BLOCK, nothing, raw_bytes
from swift.files import check_room, sync_file
from swift.tasks import THREAD_S, check_threads, retried

_ARRAYS, _HEADER = "state", ".zarray"
_CODE = re.compile(r"os_error_code='(\d+)'")
_NO_LIMIT_S = 100 * 365 * 86_400
_LIMIT_S, _LEAST_BYTES_PER_S = 1200.0, 10_000_000
"""Time limit of a save in seconds, extended by one second per ``_LEAST_BYTES_PER_S`` bytes; uses a monotonic clock."""
NUM_THREADS = min(128, 32 + 2 * (os.cpu_count() or 1))
"""Maximum number of threads that a save starts; a process's first save on 2 cores starts 24 to 32.

TensorStore aborts the process if it cannot start a thread, so a save first checks that this many can be started.
"""


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays to a new directory; safe to call from any thread.

    Args:
        path: directory to create; an existing one is replaced. It has a temporary name until it is complete.
        arrays: arrays by name, without slashes in the names. No array may be empty, as Orbax does not write those.

    Raises:
        OSError: a file could not be written, the disk is too full, or the save took too long.
        ValueError: a file could not be written, and Orbax does not report the system's error.
    """
    num_bytes = sum(array.nbytes for array in arrays.values())
    check_room(path.parent, num_bytes)
    context = ocp.Context()
    # Orbax 0.12.8 measures its time limits by the wall clock, which may jump; the one for directories cannot be set.
    context.asynchronous.timeout_secs = _NO_LIMIT_S
    context.asynchronous.create_directories_asynchronously = False
    context.memory.deepcopy_host_arrays = False  # snapshots never change, and a second copy may not fit in memory
    context.array.saving.use_ocdbt = False
    context.array.saving.use_zarr3 = False
    context.array.saving.use_compression = False
    context.array.saving.enable_write_sharding_file = False

    def save() -> None:
        check_threads(NUM_THREADS)
        saving = ocp.save_async(path.absolute(), dict(arrays), overwrite=True)
        saving.result(timeout=_LIMIT_S + num_bytes / _LEAST_BYTES_PER_S)

    with _quiet(), context:
        try:
            retried(save, THREAD_S)  # retry, as no later save makes up for a failure of the run's last save
        except TimeoutError as error:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error
        except ValueError as error:  # TensorStore wraps the system's error in a long text
            code = _CODE.search(str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def reserve_arrays(
    path: Path,
    like: Mapping[str, Any],
    write: Callable[[Path, Mapping[str, np.ndarray]], None],
    progress: Callable[[], None] = nothing,
) -> None:
    """Creates the files that ``write_arrays`` would write, but without values, which ``writing_parts`` fills in.

    Args:
        path: directory to create.
        like: shapes and dtypes of the arrays, by name; no array may be empty.
        write: ``write_arrays``, or a function that calls it in another process.
        progress: function that is called after each array.

    Raises:
        OSError, ValueError: the files cannot be created, see ``write_arrays``.
    """
    check_room(path.parent, sum(_num_bytes(leaf) for leaf in like.values()))
    # Reserve sparse files: write arrays of one value, then enlarge the shape in the header and the file. The hole
    # takes no disk space, and hosts can write disjoint ranges of it.
    write(path, {name: np.zeros([1] * len(leaf.shape), leaf.dtype) for name, leaf in like.items()})
    for name, leaf in like.items():
        header, shape = path / files_of(name) / _HEADER, list(leaf.shape)
        fields = json.loads(header.read_bytes()) | {"shape": shape, "chunks": shape}
        header.write_text(json.dumps(fields, separators=(",", ":")))
        sync_file(header)  # another host may compute the header's digest
        os.truncate(path / _value_file(name, shape), _num_bytes(leaf))
        progress()


def read_arrays(path: Path, like: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Reads some of a directory's arrays.

    Verify the files first, since TensorStore's errors on damaged files are hard to read.

    Args:
        path: directory that ``write_arrays`` created; files of other arrays may be missing.
        like: shapes and dtypes of the arrays to read, by name.
    """
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    abstract = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in like.items()}

    def load() -> Any:
        check_threads(NUM_THREADS)
        return ocp.load(path.absolute(), abstract)

    with context:
        return dict(retried(load, THREAD_S)) if abstract else {}


def files_of(name: str) -> str:
    """Returns an array's directory, relative to the directory of all arrays."""
    return f"{_ARRAYS}/{name}"


def map_array(path: Path, name: str) -> np.ndarray:
    """Maps an array's file into memory, read-only; reads its shape and dtype, but no values.

    Args:
        path: directory that ``write_arrays`` created.
        name: name of the array.

    Raises:
        OSError, ValueError: the array's files are missing, or not laid out as by ``write_arrays``.
    """
    shape, dtype = _header(path, name)
    file = path / _value_file(name, shape)
    if file.stat().st_size != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{file} has {file.stat().st_size} bytes; that is no {dtype}{list(shape)}")
    return np.memmap(file, dtype, "r", shape=shape)


def read_part(path: Path, name: str, place: Sequence[slice]) -> np.ndarray:
    """Reads a part of an array without reading the whole file.

    Args:
        path: directory that ``write_arrays`` created.
        name: name of the array.
        place: index of the part, a slice for each leading dimension, at least one.

    Raises:
        OSError, ValueError: the array's files are missing, not laid out as by ``write_arrays``, or too short.
    """
    shape, dtype = _header(path, name)
    lengths = [len(range(*part.indices(length))) for part, length in zip(place, shape, strict=False)]
    values = np.empty((*lengths, *shape[len(place) :]), dtype)
    room = raw_bytes(values)
    with (path / _value_file(name, shape)).open("rb", buffering=0) as file:
        for run in runs(shape, place):
            num_bytes = (run.stop - run.start) * dtype.itemsize
            file.seek(run.start * dtype.itemsize)
            if not _fills(file, room[:num_bytes]):
                raise ValueError(f"{path / _value_file(name, shape)} ends early")
            room = room[num_bytes:]
    return values


@contextmanager
def writing_parts(
    path: Path, name: str, progress: Callable[[], None] = nothing
) -> Iterator[Callable[[Sequence[slice], np.ndarray], int]]:
    """Opens an array's file to write parts of it, and no bytes outside these parts; calls fsync at the end.

    The file is opened for writing only. Other hosts may write neighboring bytes in the same memory page, and a network
    file system's client must not overwrite those with stale bytes. The Linux NFS client sends a whole page if it has
    read that page, and it cannot read the pages of a write-only file.

    Args:
        path: directory that ``reserve_arrays`` created.
        name: name of the array.
        progress: function that is called after each block.

    Yields:
        A function that writes a part and returns its number of bytes. It takes the part's index, a slice for each
        leading dimension (at least one), and the part's values.

    Raises:
        OSError, ValueError: the array's files are missing, not laid out as by ``write_arrays``, or cannot be written.
    """
    shape, dtype = _header(path, name)
    with open(os.open(path / _value_file(name, shape), os.O_WRONLY), "wb", buffering=0) as file:

        def write(place: Sequence[slice], values: np.ndarray) -> int:
            content, at = raw_bytes(values), 0
            for run in runs(shape, place):
                file.seek(run.start * dtype.itemsize)
                end = at + (run.stop - run.start) * dtype.itemsize
                while at < end:
                    at += file.write(content[at : min(end, at + BLOCK)])
                    progress()
            return at

        yield write
        os.fsync(file.fileno())
    progress()


def runs(shape: Sequence[int], place: Sequence[slice]) -> Iterator[slice]:
    """Yields the contiguous ranges of the flattened array that make up one part, in order.

    Args:
        shape: shape of the array.
        place: index of the part, a slice for each leading dimension, at least one.

    >>> list(runs((2, 3, 4), (slice(1, 2), slice(0, 2))))
    [slice(12, 20, None)]
    """
    ranges = [range(*part.indices(length)) for part, length in zip(place, shape, strict=False)]
    while len(ranges) > 1 and ranges[-1] == range(shape[len(ranges) - 1]):
        ranges.pop()  # runs extend over a dimension that is taken completely
    *outer, inner = ranges
    row = math.prod(shape[len(ranges) :])
    for offsets in np.ndindex(*map(len, outer)):
        index = [dim_range[offset] for dim_range, offset in zip(outer, offsets, strict=True)]
        first = (int(np.ravel_multi_index((*index, 0), shape[: len(ranges)])) + inner.start) * row
        yield slice(first, first + len(inner) * row)


def _fills(file: FileIO, room: memoryview) -> bool:
    """Fills a buffer from a file; returns False if the file ends early. A single read returns at most 2 GiB."""
    while room and (num_bytes := file.readinto(room)):
        room = room[num_bytes:]
    return not room


def data_file(path: Path, name: str) -> str:
    """Returns the relative path of the file that holds an array's values; raises as ``map_array`` does."""
    return _value_file(name, _header(path, name)[0])


def _value_file(name: str, shape: Sequence[int]) -> str:
    return f"{files_of(name)}/{'.'.join('0' for _ in shape) or '0'}"


def _num_bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _header(path: Path, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Reads an array's shape and dtype; raises ValueError unless the array is stored as one chunk of raw bytes."""
    header = json.loads((path / files_of(name) / _HEADER).read_bytes())
    try:
        shape, dtype = tuple(header["shape"]), np.dtype(header["dtype"])
        is_raw = header["chunks"] == header["shape"] and header["order"] == "C"
        is_raw = is_raw and header["compressor"] is None and header["filters"] is None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / files_of(name)} has no header of an array") from error
    if not is_raw:
        raise ValueError(f"{path / files_of(name)} is not stored in one piece")
    return shape, dtype


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses log messages of Orbax 0.12.8 about missing OCDBT files, and about errors that it also raises."""

    def is_news(record: logging.LogRecord) -> bool:
        text = str(record.msg)
        return "Skipping merge of OCDBT" not in text and "raised an exception" not in text

    logger = logging.getLogger("absl")
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)
