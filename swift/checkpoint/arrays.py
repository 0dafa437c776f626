"""Named arrays on disk, through Orbax, each with a hash that is checked when it is read back."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from swift.errors import SettingError

_VERSION = 1


def save_arrays(path: Path, tree: Any, metadata: Mapping[str, Any]) -> None:
    """Saves a pytree of arrays under a temporary name that is renamed when all is written.

    Args:
        path: the directory to make; one that is there is replaced.
        tree: the arrays; their places in the tree are their names.
        metadata: kept beside them; JSON.
    """
    arrays = _by_name(tree)
    hashes = {name: _hash(array) for name, array in arrays.items()}
    custom = {"version": _VERSION, "hashes": hashes, "metadata": dict(metadata)}
    ocp.save(path.absolute(), arrays, custom_metadata=custom, overwrite=True)


def load_metadata(path: Path, setting: str) -> dict[str, Any]:
    """What was kept beside the arrays.

    Args:
        path: the directory.
        setting: what the user calls it, for errors.

    Raises:
        SettingError: it holds no arrays of ours, or of another version.
    """
    return _load_custom(path, setting)["metadata"]


def load_arrays(path: Path, abstract: Any, setting: str) -> Any:
    """Reads the arrays back and checks every one.

    Args:
        path: the directory.
        abstract: the tree of ``jax.ShapeDtypeStruct``, with shardings where the arrays are to be spread.
        setting: what the user calls it, for errors.

    Returns:
        The tree.

    Raises:
        SettingError: the directory holds other arrays, or one is missing or damaged; the line names it.
    """
    hashes, wanted = _load_custom(path, setting)["hashes"], _by_name(abstract)
    if set(wanted) != set(hashes):
        differing = sorted(set(wanted) ^ set(hashes))[0]
        raise SettingError(setting, str(path), f"is of another model: only one of the two has {differing}")
    try:
        arrays = ocp.load(path.absolute(), wanted)
    except Exception as error:  # Orbax and TensorStore raise many kinds for files that are damaged
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SettingError(setting, str(path), f"cannot be read: {reason[:200]}") from error
    for name, array in arrays.items():
        if _hash(array) != hashes[name]:
            raise SettingError(setting, str(path), f"{name} is damaged: its hash differs from the one saved")
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])


def _load_custom(path: Path, setting: str) -> dict[str, Any]:
    try:
        custom = ocp.metadata(path.absolute()).custom_metadata
    except Exception as error:  # see load_arrays
        raise SettingError(setting, str(path), "holds no checkpoint, or one whose metadata are damaged") from error
    if not isinstance(custom, dict) or custom.get("version") != _VERSION:
        raise SettingError(setting, str(path), f"holds no checkpoint of version {_VERSION} of this format")
    return custom


def _by_name(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _hash(array: Any) -> str:
    octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(octets.data, digest_size=16).hexdigest()
