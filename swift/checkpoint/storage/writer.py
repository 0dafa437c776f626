"""Writing a checkpoint: arrays, which are read back, then the manifest, then the rename that makes it count."""

import errno
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from swift.checkpoint.partial import Snapshot, StateSplit, Unit, shape_text
from swift.checkpoint.storage.digests import array_digest, synced_digests
from swift.checkpoint.storage.directory import ARRAYS, begin_save, commit_save, remove_set_aside, retire
from swift.checkpoint.storage.manifest import Copy, Dense, Files, Ledger, Manifest, write_manifest
from swift.checkpoint.storage.orbax_files import files_of, write_arrays
from swift.checkpoint.storage.verification import unit_array, wrong_values
from swift.files import sync_directory

RETRY_PAUSES_S = (2.0, 5.0, 10.0, 20.0)
"""Seconds before each new attempt of a failed save; after the last one, the run waits until the next save is due."""


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
    write: Callable[[Path, Mapping[str, np.ndarray]], None] | None = None,
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
        write: function that writes the arrays in another process, see ``write_arrays``; None: this process does.

    Returns:
        The checkpoint's manifest.

    Raises:
        OSError, ValueError: the checkpoint could not be written; earlier ones are untouched.
    """
    assert all(copies[0].step < step for copies in ledger.copies.values()), "a copy would be replaced by its own step"
    temporary = begin_save(directory, step)
    try:
        # Taken before anything is written, so that they are digests of the values in memory.
        arrays = _named_arrays(snapshot)
        contents = {name: array_digest([array]) for name, array in arrays.items()}
        unit_contents = {unit: _unit_content(unit, of_unit, contents) for unit, of_unit in snapshot.experts()}
        (write or write_arrays)(temporary / ARRAYS, arrays)
        of_array, common = _by_array(synced_digests(temporary), arrays)
        check_written(temporary, arrays, contents, of_array)
        copies = _copies(step, snapshot, ledger, unit_contents, of_array)
        manifest = Manifest(
            step=step,
            identity=identity,
            extra=extra,
            dense=_dense(snapshot, contents, of_array),
            unit_shapes={dtype: shape_text(shape) for dtype, shape in split.unit_shapes.items()},
            chosen=snapshot.chosen_LK.tolist(),
            bytes_per_rank=split.bytes_per_rank(snapshot),
            ledger=ledger.saved(step, snapshot.chosen_LK, copies, common),
        )
        write_manifest(temporary, manifest)
        _sync_directories(temporary)
        commit_save(directory, step)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _remove_older(directory, step, num_kept)
    return manifest


def _remove_older(directory: Path, step: int, num_kept: int) -> None:
    """Removes what a new checkpoint replaces; what cannot be removed now is removed after the next one."""
    with suppress(OSError):
        retire(directory, num_kept)
        remove_set_aside(directory, step)


def check_written(
    path: Path, arrays: Mapping[str, np.ndarray], contents: Mapping[str, str], of_array: Mapping[str, Files]
) -> None:
    """Raises OSError where an array on the disk differs from that in memory, before any older checkpoint is removed.

    Args:
        path: directory of the checkpoint.
        arrays: arrays in memory, by name.
        contents: digests of their values, taken before they were written.
        of_array: digests of their files, read after they were written.
    """
    for name, array in arrays.items():
        why = wrong_values(path, {name: shape_text(array)}, contents[name], of_array[name])
        if why is not None:
            raise OSError(errno.EIO, f"{why} ({os.strerror(errno.EIO)})")


def _unit_content(unit: Unit, of_unit: Mapping[str, np.ndarray], contents: Mapping[str, str]) -> str:
    """Digest of an expert's values; already known where they are of one dtype."""
    if len(of_unit) == 1:
        return contents[unit_array(unit, *of_unit)]
    return array_digest(of_unit.values())


def _named_arrays(snapshot: Snapshot) -> dict[str, np.ndarray]:
    """All arrays by name but empty ones, such as the placement of a model without experts."""
    arrays = {name: array for name, array in snapshot.dense.items() if array.size}
    for unit, of_unit in snapshot.experts():
        arrays |= {unit_array(unit, dtype): array for dtype, array in of_unit.items()}
    return arrays


def _by_array(files: Files, arrays: Collection[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """(the files of each array, those that all arrays need)."""
    of_array: dict[str, dict[str, str]] = {name: {} for name in arrays}
    common: dict[str, str] = {}
    names = {f"{ARRAYS}/{files_of(name)}": name for name in arrays}
    for path, digest in files.items():
        name = names.get(path.rpartition("/")[0])
        (common if name is None else of_array[name])[path] = digest
    return of_array, common


def _dense(snapshot: Snapshot, contents: Mapping[str, str], of_array: Mapping[str, Files]) -> Dense:
    files = {path: digest for name in snapshot.dense for path, digest in of_array.get(name, {}).items()}
    shapes = {name: shape_text(array) for name, array in snapshot.dense.items()}
    mine = {name: contents[name] if name in contents else array_digest([snapshot.dense[name]]) for name in shapes}
    return Dense(shapes, mine, sum(array.nbytes for array in snapshot.dense.values()), files)


def _copies(
    step: int, snapshot: Snapshot, ledger: Ledger, contents: Mapping[Unit, str], of_array: Mapping[str, Files]
) -> dict[Unit, Copy]:
    copies = {}
    for unit, of_unit in snapshot.experts():
        files = {path: digest for dtype in of_unit for path, digest in of_array[unit_array(unit, dtype)].items()}
        num_bytes = sum(array.nbytes for array in of_unit.values())
        copies[unit] = Copy(step, int(ledger.tally.contained_LE[unit]), num_bytes, contents[unit], files)
    return copies


def _sync_directories(path: Path) -> None:
    """Syncs all directories, so that the names of the files are on the disk, too."""
    for directory in (path, *(below for below in path.rglob("*") if below.is_dir())):
        sync_directory(directory)
