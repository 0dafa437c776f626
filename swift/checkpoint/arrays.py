"""Verifies stored arrays, and saves pytrees of arrays in a directory with its own manifest.

An array is stored as the raw bytes of its values, in one file. If the digest of that file equals the digest of the
array in memory before it was written, the values are correct, so one pass over the file verifies both. ``Verifier``
checks a run's checkpoints. ``save_arrays`` writes any pytree, and ``load_arrays`` checks every file and reads the
pytree back.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from swift.checkpoint.array_files import data_file, map_array, read_arrays, write_arrays
from swift.checkpoint.manifest import (
    ARRAYS,
    Copy,
    Files,
    Manifest,
    array_digest,
    check_shapes,
    checkpoint_path,
    difference,
    read_signed,
    synced_digests,
    write_signed,
)
from swift.checkpoint.units import Unit, by_name, shape_text
from swift.errors import RunError, SettingError

_BLOCK = 2**22
"""Number of values checked at a time."""
_VERSION = 1
_Item = TypeVar("_Item")


class CorruptFile(Exception):
    """A checkpoint is damaged; the message is a phrase that describes the damage."""


class Verifier:
    """Checks the files and arrays of a run's checkpoints, and caches the results, so that each check is done only once.

    The methods that check return a phrase that says what is damaged, or None if there is no damage.

    Args:
        directory: directory of all checkpoints of a run.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._findings: dict[tuple[int, str, str], str | None] = {}

    def dense(self, manifest: Manifest) -> str | None:
        """Checks the files and values of a checkpoint's dense part."""
        step, dense = manifest.step, manifest.dense
        reason = self.files(step, dense.files, manifest.ledger.common[step])
        for name, shape in dense.shapes.items():
            if reason is None and is_persisted(shape):
                reason = self._values(step, {name: shape}, dense.contents[name], dense.files)
        return reason

    def copy(self, manifest: Manifest, unit: Unit, copy: Copy) -> str | None:
        """Checks the files and values of an expert's copy that a manifest refers to."""
        reason = self.files(copy.step, manifest.ledger.common[copy.step], copy.files)
        if reason is None and copy.num_bytes:
            shapes = {unit_array(unit, dtype): shape for dtype, shape in manifest.unit_shapes.items()}
            reason = self._values(copy.step, shapes, copy.content, copy.files)
        return reason

    def files(self, step: int, *all_files: Files) -> str | None:
        """Checks files of a step against their digests, and stops at the first damaged one."""
        return next(
            (reason for files in all_files for name, d in files.items() if (reason := self.file(step, name, d))), None
        )

    def file(self, step: int, name: str, expected: str) -> str | None:
        """Checks one file of a step against its expected digest."""
        key = (step, name, expected)
        if key not in self._findings:
            wrong = difference(self._path(step) / name, expected)
            self._findings[key] = wrong and self._damaged(step, f"its file {name} {wrong}")
        return self._findings[key]

    def finite(self, step: int, name: str) -> str | None:
        """Checks that an array's values are finite; check its files first."""
        key = (step, name, "finite")
        if key not in self._findings:
            try:
                array = map_array(self._path(step) / ARRAYS, name)
                wrong = None if is_finite(array) else f"{name} has values that are not finite"
            except (OSError, ValueError) as error:  # a run may have removed it in the meantime
                wrong = f"{name} cannot be read: {error}"
            self._findings[key] = wrong and self._damaged(step, wrong)
        return self._findings[key]

    def check_equal_part(self, manifest: Manifest, host_index: int, num_hosts: int) -> list[list[Any]]:
        """Checks this host's share of a checkpoint's files and newest copies, divided among the hosts by size.

        Args:
            manifest: manifest of the checkpoint.
            host_index: number of this host.
            num_hosts: number of hosts.

        Returns:
            The new findings, JSON-serializable, for ``adopt`` on the other hosts.
        """
        step = manifest.step
        files = {**manifest.dense.files, **manifest.ledger.common[step]}
        items: list[tuple[int, Callable[[], str | None]]] = [
            (_size(self._path(step) / name), partial(self.file, step, name, expected))
            for name, expected in files.items()
        ]
        for unit, (copy, *_) in manifest.ledger.copies.items():
            items.append((copy.num_bytes, partial(self.copy, manifest, unit, copy)))
        before = set(self._findings)
        for check in host_subset(items, host_index, num_hosts):
            check()
        return [[*key, reason] for key, reason in self._findings.items() if key not in before]

    def adopt(self, findings: Iterable[Sequence[Any]]) -> None:
        """Adds the findings that ``check_equal_part`` returned on another host."""
        self._findings |= {(step, name, expected): reason for step, name, expected, reason in findings}

    def _values(self, step: int, shapes: Mapping[str, str], content: str, files: Files) -> str | None:
        key = (step, content, " ".join(shapes))
        if key not in self._findings:
            wrong = wrong_values(self._path(step), shapes, content, files)
            self._findings[key] = wrong and self._damaged(step, wrong)
        return self._findings[key]

    def _path(self, step: int) -> Path:
        return checkpoint_path(self._directory, step)

    def _damaged(self, step: int, reason: str) -> str:
        return f"{self._path(step).name} is damaged: {reason}"


def host_subset(items: Iterable[tuple[int, _Item]], host_index: int, num_hosts: int) -> list[_Item]:
    """Divides (size, item) pairs among the hosts, greedily and largest first, and returns this host's items.

    The result depends only on the arguments, so hosts need not communicate.

    >>> [host_subset([(1, "a"), (5, "b"), (3, "c"), (1, "d")], host, 2) for host in range(2)]
    [['b'], ['c', 'a', 'd']]
    """
    loads, assigned_items = [0] * num_hosts, []
    for size, item in sorted(items, key=lambda item: -item[0]):
        host = loads.index(min(loads))
        loads[host] += size
        if host == host_index:
            assigned_items.append(item)
    return assigned_items


def _size(path: Path) -> int:
    """Returns a file's size; 0 if it is missing."""
    return path.stat().st_size if path.is_file() else 0


def wrong_values(path: Path, shapes: Mapping[str, str], content: str, files: Files, folder: str = ARRAYS) -> str | None:
    """Compares arrays on the disk with the ones that were in memory; the files must already be verified.

    Args:
        path: directory of the checkpoint.
        shapes: dtypes and shapes by name, as they were in memory.
        content: digest of the concatenated values in memory.
        files: digests of the arrays' files, by path relative to ``path``.
        folder: directory of the arrays, relative to ``path``.

    Returns:
        A phrase that says what is wrong, or None if the arrays agree.
    """
    arrays, names = path / folder, " and ".join(shapes)
    try:
        stored = {name: map_array(arrays, name) for name in shapes}
        (only, *rest) = shapes
        # The digest of a single array's values is that of its file. Digests of several files cannot be combined.
        digest = array_digest(stored.values()) if rest else files[str(PurePosixPath(folder) / data_file(arrays, only))]
    except (OSError, ValueError, KeyError) as error:
        return f"{names} cannot be read: {error}"
    for name, shape in shapes.items():
        if shape_text(stored[name]) != shape:
            return f"{name} was {shape} and is stored as {shape_text(stored[name])}"
    return None if digest == content else f"the values of {names} are not those that were saved"


def is_finite(array: np.ndarray) -> bool:
    """Whether all values of an array are finite; works block by block, as a mapped file may exceed memory."""
    flat = array.reshape(-1)
    blocks = range(0, flat.size, _BLOCK) if jnp.issubdtype(array.dtype, jnp.inexact) else ()
    return all(np.isfinite(flat[begin : begin + _BLOCK]).all() for begin in blocks)


def is_model_array(name: str) -> bool:
    """Whether an array belongs to the model and must be finite; arrays of a placement policy may contain infinities.

    >>> is_model_array("master.head"), is_model_array("policy.0")
    (True, False)
    """
    return name.partition(".")[0] != "policy"


def is_persisted(shape: str) -> bool:
    """Whether an array of this dtype and shape has files; Orbax does not write empty arrays.

    >>> is_persisted("float32[4, 8]"), is_persisted("int32[]"), is_persisted("int32[1, 0, 4]")
    (True, True, False)
    """
    return "0" not in shape.partition("[")[2].rstrip("]").split(", ")


def unit_array(unit: Unit, dtype: str) -> str:
    """Returns the name of the stored array that holds an expert's values with this dtype."""
    layer, class_ = unit
    return f"expert.{layer}.{class_}.{dtype}"


def save_arrays(path: Path, tree: Any, metadata: Mapping[str, Any]) -> None:
    """Saves a pytree of arrays. The manifest is written last; a directory without one is an interrupted save.

    Args:
        path: directory to create; an existing one is replaced.
        tree: pytree of arrays, which are named by their paths in the tree.
        metadata: JSON-serializable fields to store with the arrays.

    Raises:
        OSError, ValueError: Orbax could not write a file.
        RunError: the arrays on the disk differ from the ones in memory.
    """
    arrays = by_name(tree)
    # Orbax does not write empty arrays, which have no values to save.
    filled = {name: np.asarray(array) for name, array in arrays.items() if array.size}
    contents = {name: array_digest([array]) for name, array in filled.items()}
    write_arrays(path, filled)
    shapes, files = {name: shape_text(array) for name, array in arrays.items()}, synced_digests(path)
    for name, content in contents.items():
        reason = wrong_values(path, {name: shapes[name]}, content, files, folder="")
        if reason is not None:
            raise RunError(f"{path} was not written correctly: {reason}: try again")
    fields = {"version": _VERSION, "arrays": shapes, "contents": contents, "files": files, "metadata": dict(metadata)}
    write_signed(path, fields)


def load_metadata(path: Path, setting: str) -> dict[str, Any]:
    """Reads the metadata that ``save_arrays`` stored.

    Args:
        path: directory of the arrays.
        setting: the option or setting that names the directory, for error messages.

    Raises:
        SettingError: there are no arrays, they are of another version, or the manifest is damaged.
    """
    return read_signed(path, setting, _VERSION)["metadata"]


def stored_types(path: Path, setting: str) -> dict[str, np.dtype]:
    """Reads the dtype of each stored array, by name; see ``load_metadata`` for the arguments and errors."""
    shapes = read_signed(path, setting, _VERSION)["arrays"]
    return {name: jnp.dtype(text.partition("[")[0]) for name, text in shapes.items()}


def load_arrays(path: Path, abstract: Any, setting: str) -> Any:
    """Checks every file of a directory, then reads the pytree back.

    Args:
        path: directory of the arrays.
        abstract: tree of ``jax.ShapeDtypeStruct``, with the structure in which the arrays were saved.
        setting: the option or setting that names the directory, for error messages.

    Returns:
        The tree of arrays, on the host.

    Raises:
        SettingError: the directory holds other arrays, or a file is missing or damaged; the message names it.
    """
    manifest, leaves = read_signed(path, setting, _VERSION), by_name(abstract)
    check_shapes(path, setting, manifest["arrays"], {name: shape_text(leaf) for name, leaf in leaves.items()})
    for name, expected in manifest["files"].items():
        wrong = difference(path / name, expected)
        if wrong:
            raise SettingError(setting, str(path), f"is damaged: its file {name} {wrong}")
    for name, content in manifest.get("contents", {}).items():  # older exports have none
        reason = wrong_values(path, {name: manifest["arrays"][name]}, content, manifest["files"], folder="")
        if reason is not None:
            raise SettingError(setting, str(path), f"is damaged: {reason}")
    arrays = read_arrays(path, {name: leaf for name, leaf in leaves.items() if leaf.size})
    arrays |= {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items() if not leaf.size}
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in leaves])
