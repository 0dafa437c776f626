"""Named arrays on disk, through Orbax, beside a manifest that every file is checked against before it is read.

Orbax and TensorStore read a damaged file with pages of complaints from their threads, so they are never given one.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from swift.errors import SettingError
from swift.files import replace_file

_MANIFEST = "manifest.json"
_VERSION = 1


def save_arrays(path: Path, tree: Any, metadata: Mapping[str, Any]) -> None:
    """Saves a pytree of arrays; what is there without a manifest, written last, was interrupted and does not count.

    Args:
        path: the directory to make; one that is there is replaced.
        tree: the arrays; their places in the tree are their names.
        metadata: kept beside them; JSON.
    """
    arrays = _by_name(tree)
    # Orbax takes no empty array, such as the placement of a model without experts; there is nothing to save of one.
    ocp.save(path.absolute(), {name: array for name, array in arrays.items() if array.size}, overwrite=True)
    files = {
        file.relative_to(path).as_posix(): _file_digest(file) for file in sorted(path.rglob("*")) if file.is_file()
    }
    shapes = {name: _shape(array) for name, array in arrays.items()}
    text = json.dumps({"version": _VERSION, "arrays": shapes, "files": files, "metadata": dict(metadata)}).encode()
    replace_file(path / _MANIFEST, _digest(text).encode() + b"\n" + text)


def is_complete(path: Path) -> bool:
    """Whether a directory holds arrays that were saved to the end."""
    return (path / _MANIFEST).is_file()


def remove_arrays(path: Path) -> None:
    """Removes what ``save_arrays`` made; its manifest first, so that a half-removed directory does not count."""
    (path / _MANIFEST).unlink()
    shutil.rmtree(path)


def load_metadata(path: Path, setting: str) -> dict[str, Any]:
    """What was kept beside the arrays.

    Args:
        path: the directory.
        setting: what the user calls it, for errors.

    Raises:
        SettingError: it holds no arrays of ours, or of another version, or the manifest is damaged.
    """
    return _read_manifest(path, setting)["metadata"]


def load_arrays(path: Path, abstract: Any, setting: str) -> Any:
    """Checks every file and reads the arrays back.

    Args:
        path: the directory.
        abstract: the tree of ``jax.ShapeDtypeStruct`` with shardings.
        setting: what the user calls it, for errors.

    Returns:
        The tree.

    Raises:
        SettingError: the directory holds other arrays, or a file is missing or damaged; the line names it.
    """
    manifest, wanted = _read_manifest(path, setting), _by_name(abstract)
    shapes = {name: _shape(leaf) for name, leaf in wanted.items()}
    for name in sorted({*shapes, *manifest["arrays"]}):
        theirs, mine = manifest["arrays"].get(name, "nothing"), shapes.get(name, "nothing")
        if theirs != mine:
            raise SettingError(setting, str(path), f"is of another model: it has {theirs} for {name}, here {mine}")
    for name, digest in manifest["files"].items():
        if not (path / name).is_file():
            raise SettingError(setting, str(path), f"is damaged: its file {name} is missing")
        if _file_digest(path / name) != digest:
            raise SettingError(setting, str(path), f"is damaged: its file {name} is not as it was saved")
    arrays = ocp.load(path.absolute(), {name: leaf for name, leaf in wanted.items() if leaf.size})
    empty = {name: leaf for name, leaf in wanted.items() if not leaf.size}
    arrays |= {name: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) for name, leaf in empty.items()}
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])


def _read_manifest(path: Path, setting: str) -> dict[str, Any]:
    if not is_complete(path):
        raise SettingError(setting, str(path), f"holds no checkpoint: there is no {_MANIFEST} in it")
    digest, _, text = (path / _MANIFEST).read_bytes().partition(b"\n")
    if digest != _digest(text).encode():
        raise SettingError(setting, str(path), f"is damaged: its file {_MANIFEST} is not as it was saved")
    manifest = json.loads(text)
    if manifest["version"] != _VERSION:
        allowed = f"is of version {manifest['version']} of this format, and this Swift reads version {_VERSION}"
        raise SettingError(setting, str(path), allowed)
    return manifest


def _by_name(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _shape(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
