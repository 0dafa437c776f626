"""The one module that calls Orbax (its v1 interface): arrays on the host, each in files of its own.

One directory for each array, uncompressed and not merged (no OCDBT), so that files can be kept, removed and found
damaged array by array, and so that a file takes the bytes of its array.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

_ARRAYS = "state"


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays; any thread may.

    Args:
        path: the directory to make; one that is there is replaced. Until it is whole it has another name.
        arrays: by name, without slashes; none is empty, which Orbax does not take.

    Raises:
        OSError, ValueError: as Orbax tells that a file could not be written.
    """
    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    context.array.saving.use_zarr3 = False
    context.array.saving.use_compression = False
    context.array.saving.enable_write_sharding_file = False
    with _quiet(), context:
        ocp.save_async(path.absolute(), dict(arrays), overwrite=True).result()


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
