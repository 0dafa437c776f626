"""Arrays on the host in files, each in its own; the only module that calls Orbax (its v1 interface).

One directory for each array, uncompressed and not merged (no OCDBT), so that files can be kept, removed and verified
array by array, and a file has exactly the bytes of its array.
"""

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
