"""Arrays on the host in files, each in its own; the only module that calls Orbax (its v1 interface).

One directory for each array, uncompressed and not merged (no OCDBT), so that files can be kept, removed and verified
array by array, and a file has exactly the bytes of its array.
"""

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from swift.files import check_room

_ARRAYS = "state"
_CODE = re.compile(r"os_error_code='(\d+)'")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays; safe to call from any thread.

    Args:
        path: directory to make; an existing one is replaced. Until it is complete it has another name.
        arrays: arrays by name, without slashes; none may be empty, which Orbax does not take.

    Raises:
        OSError: a file could not be written, or there is no room for all of them.
        ValueError: the same, where Orbax does not report the system's error.
    """
    check_room(path.parent, sum(array.nbytes for array in arrays.values()))
    context = ocp.Context()
    context.memory.deepcopy_host_arrays = False  # snapshots never change, and there may be no room for two
    context.array.saving.use_ocdbt = False
    context.array.saving.use_zarr3 = False
    context.array.saving.use_compression = False
    context.array.saving.enable_write_sharding_file = False
    with _quiet(), context:
        try:
            ocp.save_async(path.absolute(), dict(arrays), overwrite=True).result()
        except ValueError as error:  # from TensorStore, which wraps the system's error in half a page
            code = _CODE.search(str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def read_arrays(path: Path, like: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Reads some arrays, whose files have to be sound: TensorStore's errors on damaged files are long.

    Args:
        path: directory that ``write_arrays`` made; files of other arrays may be missing.
        like: shapes and dtypes of the arrays, by name.
    """
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    abstract = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in like.items()}
    with context:
        return dict(ocp.load(path.absolute(), abstract)) if abstract else {}


def files_of(name: str) -> str:
    """The directory of an array's files, relative to that of all arrays."""
    return f"{_ARRAYS}/{name}"


def map_array(path: Path, name: str) -> np.ndarray:
    """Maps an array's file into memory, after reading its shape and dtype; its values are not read.

    Args:
        path: directory that ``write_arrays`` made.
        name: name of the array.

    Raises:
        OSError, ValueError: its files are missing, or not laid out as by ``write_arrays``.
    """
    file = path / data_file(path, name)
    shape, dtype = _header(path, name)
    if file.stat().st_size != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, which are not {dtype}{list(shape)}")
    return np.memmap(file, dtype, "r", shape=shape)


def read_part(path: Path, name: str, place: Sequence[slice]) -> np.ndarray:
    """Reads a part of an array from its file, and no other bytes of it.

    Args:
        path: directory that ``write_arrays`` made.
        name: name of the array.
        place: a slice for each of the first dims, at least one.

    Raises:
        OSError, ValueError: its files are missing, not laid out as by ``write_arrays``, or too short.
    """
    (shape, dtype), depth = _header(path, name), len(place)
    *outer, inner = (range(*one.indices(length)) for one, length in zip(place, shape[:depth], strict=True))
    row = math.prod(shape[depth:]) * dtype.itemsize
    values = np.empty((*map(len, outer), len(inner), *shape[depth:]), dtype)
    flat = values.reshape(*map(len, outer), -1).view(np.uint8)
    with (path / data_file(path, name)).open("rb", buffering=0) as file:
        for nth in np.ndindex(*map(len, outer)):
            at = [of_dim[one] for of_dim, one in zip(outer, nth, strict=True)]
            file.seek((int(np.ravel_multi_index((*at, 0), shape[:depth])) + inner.start) * row)
            if not _fills(file, memoryview(flat[nth].data)):
                raise ValueError(f"{path / data_file(path, name)} ends early")
    return values


def _fills(file: FileIO, room: memoryview) -> bool:
    """Whether a file has enough for some room, which is then full; a single system call reads 2 GiB at most."""
    while room and (num_bytes := file.readinto(room)):
        room = room[num_bytes:]
    return not room


def data_file(path: Path, name: str) -> str:
    """Path of the file whose bytes are an array's values; raises as ``map_array`` does."""
    shape, _ = _header(path, name)
    return f"{files_of(name)}/{'.'.join('0' for _ in shape) or '0'}"


def _header(path: Path, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of an array that is stored in one piece, as raw bytes."""
    said = json.loads((path / files_of(name) / ".zarray").read_bytes())
    try:
        shape, dtype = tuple(said["shape"]), np.dtype(said["dtype"])
        is_raw = said["chunks"] == said["shape"] and said["order"] == "C"
        is_raw = is_raw and said["compressor"] is None and said["filters"] is None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / files_of(name)} has no header of an array") from error
    if not is_raw:
        raise ValueError(f"{path / files_of(name)} is not stored in one piece")
    return shape, dtype


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses log messages of orbax 0.12.8 that are expected (no OCDBT files to merge) or raised too (errors)."""

    def is_news(record: logging.LogRecord) -> bool:
        text = str(record.msg)
        return "Skipping merge of OCDBT" not in text and "raised an exception" not in text

    logger = logging.getLogger("absl")
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)
