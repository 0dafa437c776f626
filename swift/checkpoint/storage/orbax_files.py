"""The one module that calls Orbax (its v1 interface): arrays on the host, each in files of its own.

One directory for each array, uncompressed and not merged (no OCDBT), so that files can be kept, removed and found
damaged array by array, and so that a file takes the bytes of its array.
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

_ARRAYS = "state"
_CODE = re.compile(r"os_error_code='(\d+)'")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays; any thread may.

    Args:
        path: the directory to make; one that is there is replaced. Until it is whole it has another name.
        arrays: by name, without slashes; none is empty, which Orbax does not take.

    Raises:
        OSError: a file could not be written.
        ValueError: the same, where Orbax does not tell the system's reason.
    """
    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    context.array.saving.use_zarr3 = False
    context.array.saving.use_compression = False
    context.array.saving.enable_write_sharding_file = False
    with _quiet(), context:
        try:
            ocp.save_async(path.absolute(), dict(arrays), overwrite=True).result()
        except ValueError as error:  # of TensorStore, which wraps the system's errors in half a page
            code = _CODE.search(str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def read_arrays(path: Path, like: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Reads some arrays, whose files have to be sound: of damaged ones TensorStore complains at length.

    Args:
        path: what ``write_arrays`` made; files of other arrays may be missing.
        like: what has the shape and type of each array.
    """
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    abstract = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in like.items()}
    with context:
        return dict(ocp.load(path.absolute(), abstract)) if abstract else {}


def files_of(name: str) -> str:
    """The directory of an array's files, within that of all arrays."""
    return f"{_ARRAYS}/{name}"


def map_array(path: Path, name: str) -> np.ndarray:
    """Maps an array where it lies, without reading its numbers; reads its shape and type.

    Args:
        path: what ``write_arrays`` made.
        name: one of its arrays.

    Raises:
        OSError, ValueError: its files are missing, or not laid out as ``write_arrays`` does.
    """
    file = path / data_file(path, name)
    shape, dtype = _header(path, name)
    if file.stat().st_size != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, which are not {dtype}{list(shape)}")
    return np.memmap(file, dtype, "r", shape=shape)


def data_file(path: Path, name: str) -> str:
    """Name of the one file whose bytes are those of an array's numbers; raises as ``map_array`` does."""
    shape, _ = _header(path, name)
    return f"{files_of(name)}/{'.'.join('0' for _ in shape) or '0'}"


def _header(path: Path, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of an array that is stored in one piece, as raw bytes."""
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
    """Without what orbax 0.12.8 logs, as it was asked for (no OCDBT files to merge) or is raised, too (errors)."""

    def is_news(record: logging.LogRecord) -> bool:
        text = str(record.msg)
        return "Skipping merge of OCDBT" not in text and "raised an exception" not in text

    logger = logging.getLogger("absl")
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)
