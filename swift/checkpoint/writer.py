"""Writing a checkpoint: arrays, which are read back, then the manifest, then the rename that makes it count."""

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
    delete_old,
    remove_set_aside,
    synced_digests,
    temporary_path,
    write_manifest,
)
from swift.checkpoint.units import Snapshot, StateSplit, Unit, shape_text
from swift.files import sync_directory

RETRY_PAUSES_S = (2.0, 5.0, 10.0, 20.0)
"""Seconds before each new attempt of a failed save; after the last one, the run waits until the next save is due."""


class WrittenArrays(NamedTuple):
    """Digests of a save that is on the disk, and found right.

    Attributes:
        files: digests of the files of each stored array, by its name.
        common: digests of the files that all arrays need.
        dense: digests of the values of arrays of the dense part, by name; empty ones, which are not stored, have none.
        units: digests of the values of experts.
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
) -> Manifest:
    """Saves a snapshot, verifies the files against memory, then removes what is no longer needed.

    Args:
        directory: directory of all checkpoints of a run.
        step: iterations done.
        snapshot: snapshot of the state.
        split: division of the state.
        ledger: ledger as of the snapshot; its copies are older and still on the disk.
        identity: settings that a run has to share to read it, by name; JSON.
        extra: other state, such as the loader's; JSON.
        num_kept: number of checkpoints to keep.

    Returns:
        The checkpoint's manifest.

    Raises:
        OSError, ValueError: the checkpoint could not be written; earlier ones are untouched.
    """
    temporary = begin_save(directory, step)
    try:
        # Taken before anything is written, so that they are digests of the values in memory.
        arrays = _named_arrays(snapshot)
        contents = {name: array_digest([array]) for name, array in arrays.items()}
        units = {unit: _unit_content(unit, unit_arrays, contents) for unit, unit_arrays in snapshot.experts()}
        write_arrays(temporary / ARRAYS, arrays)
        files_by_array, common = _by_array(synced_digests(temporary), arrays)
        check_written(temporary, arrays, contents, files_by_array)
        written = WrittenArrays(files_by_array, common, contents, units)
        options: dict[str, Any] = {"identity": identity, "extra": extra, "num_kept": num_kept}
        return finish_save(directory, step, written, split, snapshot.chosen_LK, ledger, **options)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
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
) -> Manifest:
    """Writes the manifest of a save, whose files are there, renames it, and removes what is no longer needed.

    The other arguments are those of ``save_checkpoint``.

    Args:
        written: what is on the disk.
        chosen_LK: classes that are saved.

    Raises:
        OSError: the manifest could not be written, or the directory not renamed.
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
    _remove_older(directory, step, num_kept)
    return manifest


def _remove_older(directory: Path, step: int, num_kept: int) -> None:
    """Removes what a new checkpoint replaces; what cannot be removed now is removed after the next one."""
    with suppress(OSError):
        delete_old(directory, num_kept)
        remove_set_aside(directory, step)


def check_written(
    path: Path, arrays: Mapping[str, np.ndarray], contents: Mapping[str, str], files_by_array: Mapping[str, Files]
) -> None:
    """Raises OSError where an array on the disk differs from that in memory, before any older checkpoint is removed.

    Args:
        path: directory of the checkpoint.
        arrays: arrays in memory, by name.
        contents: digests of their values, taken before they were written.
        files_by_array: digests of their files, read after they were written.
    """
    for name, array in arrays.items():
        reason = wrong_values(path, {name: shape_text(array)}, contents[name], files_by_array[name])
        if reason is not None:
            raise OSError(errno.EIO, f"{reason} ({os.strerror(errno.EIO)})")


def _unit_content(unit: Unit, unit_arrays: Mapping[str, np.ndarray], contents: Mapping[str, str]) -> str:
    """Digest of an expert's values; already known where they are of one dtype."""
    if len(unit_arrays) == 1:
        return contents[unit_array(unit, *unit_arrays)]
    return array_digest(unit_arrays.values())


def _named_arrays(snapshot: Snapshot) -> dict[str, np.ndarray]:
    """All arrays by name but empty ones, such as the placement of a model without experts."""
    arrays = {name: array for name, array in snapshot.dense.items() if array.size}
    for unit, unit_arrays in snapshot.experts():
        arrays |= {unit_array(unit, dtype): array for dtype, array in unit_arrays.items()}
    return arrays


def _by_array(files: Files, arrays: Collection[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """(the files of each array, those that all arrays need)."""
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
    """Syncs all directories, so that the names of the files are on the disk, too."""
    for directory in (path, *(below for below in path.rglob("*") if below.is_dir())):
        sync_directory(directory)
