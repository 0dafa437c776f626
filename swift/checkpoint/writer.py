"""Saves a checkpoint: writes the arrays, reads them back, writes the manifest, and renames the directory.

The rename commits the checkpoint. A save that is interrupted before it leaves the earlier checkpoints unchanged.
"""

import errno
import math
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swift.checkpoint.array_files import files_of, write_arrays
from swift.checkpoint.arrays import unit_array, wrong_values
from swift.checkpoint.manifest import (
    ARRAYS,
    Copy,
    Dense,
    Files,
    Ledger,
    Manifest,
    array_digest,
    begin_save,
    commit_save,
    delete_old_checkpoints,
    remove_archived,
    synced_digests,
    temporary_path,
    write_manifest,
)
from swift.checkpoint.units import Snapshot, StateSplit, Unit, shape_text
from swift.files import sync_directory


class WrittenArrays(NamedTuple):
    """Digests of the arrays that a save has written and verified.

    Attributes:
        files: digests of each stored array's files, by array name.
        common: digests of the files that every read needs.
        dense: digests of each dense array's values, by name; empty arrays are not stored and have no digest.
        units: digests of each expert's values.
    """

    files: Mapping[str, Files]
    common: Files
    dense: Mapping[str, str]
    units: Mapping[Unit, str]


def save_checkpoint(
    directory: Path,
    step: int,
    snapshot: Snapshot,
    split: StateSplit,
    ledger: Ledger,
    *,
    identity: Mapping[str, Any],
    extra: Mapping[str, Any],
    num_kept: int,
    num_best: int = 0,
) -> Manifest:
    """Saves a snapshot, verifies the files against memory, then removes checkpoints that are no longer needed.

    Args:
        directory: directory of all checkpoints of a run.
        step: iterations done.
        snapshot: snapshot of the state.
        split: division of the state.
        ledger: ledger as of the snapshot; its copies must be older than ``step`` and still on the disk.
        identity: settings by name that a run must share to read the checkpoint, JSON-serializable.
        extra: other state, such as the loader's, JSON-serializable.
        num_kept: number of checkpoints to keep, the newest.
        num_best: number of checkpoints to keep besides, those with the lowest validation loss.

    Returns:
        The checkpoint's manifest.

    Raises:
        OSError, ValueError: the checkpoint could not be written; earlier ones are untouched.
    """
    temporary = begin_save(directory, step)
    try:
        # Computed before anything is written, so that they are digests of the values in memory.
        arrays = _named_arrays(snapshot)
        contents = {name: array_digest([array]) for name, array in arrays.items()}
        units = {unit: _unit_content(unit, unit_arrays, contents) for unit, unit_arrays in snapshot.experts()}
        write_arrays(temporary / ARRAYS, arrays)
        files_by_array, common = _by_array(synced_digests(temporary), arrays)
        check_written(temporary, arrays, contents, files_by_array)
        written = WrittenArrays(files_by_array, common, contents, units)
        options: dict[str, Any] = {"identity": identity, "extra": extra, "num_kept": num_kept, "num_best": num_best}
        return finish_save(directory, step, written, split, snapshot.chosen_LK, ledger, **options)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # frees the space on a full disk
        raise


def finish_save(
    directory: Path,
    step: int,
    written: WrittenArrays,
    split: StateSplit,
    chosen_LK: np.ndarray,
    ledger: Ledger,
    *,
    identity: Mapping[str, Any],
    extra: Mapping[str, Any],
    num_kept: int,
    num_best: int = 0,
) -> Manifest:
    """Writes the manifest of a save, renames its directory, and removes checkpoints that are no longer needed.

    See ``save_checkpoint`` for the other arguments.

    Args:
        written: digests of the arrays, which have been written and verified.
        chosen_LK: expert classes that were saved, ``[L, K]``.

    Raises:
        OSError: the manifest could not be written, or the directory could not be renamed.
    """
    assert all(copies[0].step < step for copies in ledger.copies.values()), "a copy would be replaced by its own step"
    temporary = temporary_path(directory, step)
    copies = _copies(step, split, ledger, written)
    manifest = Manifest(
        step=step,
        identity=identity,
        extra=extra,
        dense=_dense(split, written),
        unit_shapes={dtype: shape_text(shape) for dtype, shape in split.unit_shapes.items()},
        chosen=chosen_LK.tolist(),
        bytes_per_rank=split.bytes_per_rank(chosen_LK.shape[-1]),
        ledger=ledger.saved(step, chosen_LK, copies, written.common),
    )
    write_manifest(temporary, manifest)
    _sync_directories(temporary)
    commit_save(directory, step)
    _remove_older(directory, step, num_kept, num_best)
    return manifest


def _remove_older(directory: Path, step: int, num_kept: int, num_best: int) -> None:
    """Removes checkpoints that are no longer needed; files that cannot be removed are retried after the next save."""
    with suppress(OSError):
        delete_old_checkpoints(directory, num_kept, num_best)
        remove_archived(directory, step)


def check_written(
    path: Path, arrays: Mapping[str, np.ndarray], contents: Mapping[str, str], files_by_array: Mapping[str, Files]
) -> None:
    """Raises OSError if an array on the disk differs from the one in memory.

    Call this before removing an older checkpoint.

    Args:
        path: directory of the checkpoint.
        arrays: arrays in memory, by name.
        contents: digests of the arrays' values, computed before they were written.
        files_by_array: digests of the arrays' files, read back from the disk.
    """
    for name, array in arrays.items():
        reason = wrong_values(path, {name: shape_text(array)}, contents[name], files_by_array[name])
        if reason is not None:
            raise OSError(errno.EIO, f"{reason} ({os.strerror(errno.EIO)})")


def _unit_content(unit: Unit, unit_arrays: Mapping[str, np.ndarray], contents: Mapping[str, str]) -> str:
    """Returns the digest of an expert's values, which is already known if all have the same dtype."""
    if len(unit_arrays) == 1:
        return contents[unit_array(unit, *unit_arrays)]
    return array_digest(unit_arrays.values())


def _named_arrays(snapshot: Snapshot) -> dict[str, np.ndarray]:
    """Returns all arrays by name, except empty ones such as the placement of a model without experts."""
    arrays = {name: array for name, array in snapshot.dense.items() if array.size}
    for unit, unit_arrays in snapshot.experts():
        arrays |= {unit_array(unit, dtype): array for dtype, array in unit_arrays.items()}
    return arrays


def _by_array(files: Files, arrays: Collection[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Divides files into (files of each array, other files, which every read needs)."""
    files_by_array: dict[str, dict[str, str]] = {name: {} for name in arrays}
    common: dict[str, str] = {}
    names = {f"{ARRAYS}/{files_of(name)}": name for name in arrays}
    for path, digest in files.items():
        name = names.get(path.rpartition("/")[0])
        (common if name is None else files_by_array[name])[path] = digest
    return files_by_array, common


def _dense(split: StateSplit, written: WrittenArrays) -> Dense:
    leaves = split.dense_shapes
    files = {path: digest for name in leaves for path, digest in written.files.get(name, {}).items()}
    shapes = {name: shape_text(leaf) for name, leaf in leaves.items()}
    contents = {name: written.dense.get(name, array_digest([])) for name in leaves}
    return Dense(shapes, contents, sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values()), files)


def _copies(step: int, split: StateSplit, ledger: Ledger, written: WrittenArrays) -> dict[Unit, Copy]:
    copies = {}
    for unit, content in written.units.items():
        names = [unit_array(unit, dtype) for dtype in split.unit_shapes]
        files = {path: digest for name in names for path, digest in written.files[name].items()}
        copies[unit] = Copy(step, int(ledger.tally.contained_LE[unit]), split.unit_bytes, content, files)
    return copies


def _sync_directories(path: Path) -> None:
    """Calls fsync on all directories, so that the names of written files survive a power failure."""
    for directory in (path, *(below for below in path.rglob("*") if below.is_dir())):
        sync_directory(directory)
