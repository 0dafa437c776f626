"""A tree of arrays on disk, with a manifest that every file is checked against before it is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swift.checkpoint.partial.expert_units import by_name, shape_text
from swift.checkpoint.storage.digests import array_digest, difference, synced_digests
from swift.checkpoint.storage.manifest import check_shapes, read_signed, write_signed
from swift.checkpoint.storage.orbax_files import read_arrays, write_arrays
from swift.checkpoint.storage.verification import wrong_values
from swift.errors import RunError, SettingError

_VERSION = 1


def save_arrays(path: Path, tree: Any, metadata: Mapping[str, Any]) -> None:
    """Saves a pytree of arrays. The manifest is written last: a directory without one was interrupted.

    Args:
        path: directory to make; an existing one is replaced.
        tree: arrays; their paths in the tree are their names.
        metadata: JSON stored with them.

    Raises:
        OSError, ValueError: Orbax could not write a file.
        RunError: the arrays on the disk are not those in memory.
    """
    arrays = by_name(tree)
    # Orbax does not take empty arrays, which have nothing to save.
    filled = {name: np.asarray(array) for name, array in arrays.items() if array.size}
    contents = {name: array_digest([array]) for name, array in filled.items()}
    write_arrays(path, filled)
    shapes, files = {name: shape_text(array) for name, array in arrays.items()}, synced_digests(path)
    for name, content in contents.items():
        why = wrong_values(path, {name: shapes[name]}, content, files, folder="")
        if why is not None:
            raise RunError(f"{path} was not written correctly: {why}: try again")
    fields = {"version": _VERSION, "arrays": shapes, "contents": contents, "files": files, "metadata": dict(metadata)}
    write_signed(path, fields)


def load_metadata(path: Path, setting: str) -> dict[str, Any]:
    """The metadata stored with the arrays.

    Args:
        path: directory of the arrays.
        setting: the user's name for it, for errors.

    Raises:
        SettingError: there are no arrays, they are of another version, or the manifest is damaged.
    """
    return read_signed(path, setting, _VERSION)["metadata"]


def stored_types(path: Path, setting: str) -> dict[str, np.dtype]:
    """The type of each array by name.

    Raises:
        SettingError: as ``load_metadata``.
    """
    shapes = read_signed(path, setting, _VERSION)["arrays"]
    return {name: jnp.dtype(text.partition("[")[0]) for name, text in shapes.items()}


def load_arrays(path: Path, abstract: Any, setting: str) -> Any:
    """Checks every file and reads the arrays back.

    Args:
        path: directory of the arrays.
        abstract: tree of ``jax.ShapeDtypeStruct``.
        setting: the user's name for the directory, for errors.

    Returns:
        The tree of arrays, on the host.

    Raises:
        SettingError: the directory holds other arrays, or a file is missing or damaged; the line names it.
    """
    manifest, wanted = read_signed(path, setting, _VERSION), by_name(abstract)
    check_shapes(path, setting, manifest["arrays"], {name: shape_text(leaf) for name, leaf in wanted.items()})
    for name, expected in manifest["files"].items():
        wrong = difference(path / name, expected)
        if wrong:
            raise SettingError(setting, str(path), f"is damaged: its file {name} {wrong}")
    for name, content in manifest.get("contents", {}).items():  # older exports have none
        why = wrong_values(path, {name: manifest["arrays"][name]}, content, manifest["files"], folder="")
        if why is not None:
            raise SettingError(setting, str(path), f"is damaged: {why}")
    arrays = read_arrays(path, {name: leaf for name, leaf in wanted.items() if leaf.size})
    arrays |= {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in wanted.items() if not leaf.size}
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])
