"""Our parameters by name, and the part of one that a tensor of the hub is."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx

from swift.models import GPT, Weights
from swift.models.hugging_face import TensorPlace

ParameterName: TypeAlias = tuple[str, int, str]
"""A parameter: its group, its row, and its name in the module, such as ``qkv.kernel``."""


def parameter_shapes(gpt: GPT) -> dict[ParameterName, tuple[int, ...]]:
    """Shape of each parameter; experts have a leading dim of experts."""
    weights = jax.eval_shape(lambda: gpt.unpack(gpt.init(jax.random.key(0))))
    return {name: leaf.shape for name, leaf in parameters(weights)}


def parameters(weights: Weights) -> Iterator[tuple[ParameterName, Any]]:
    """Lists the parameters of a model, or their shapes."""
    for group, rows in weights.items():
        for row, state in enumerate(rows):
            for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state)):
                yield (group, row, ".".join(key.key for key in path)), leaf


def nested(arrays: Mapping[ParameterName, np.ndarray]) -> dict[str, Any]:
    """The parameters as a tree by group, row and the parts of their names, as a model directory has them."""
    tree: dict[str, Any] = {}
    for (group, row, leaf), array in arrays.items():
        *path, last = leaf.split(".")
        node = tree.setdefault(group, {}).setdefault(row, {})
        for part in path:
            node = node.setdefault(part, {})
        node[last] = array
    return tree


def part_of(array: np.ndarray, place: TensorPlace) -> np.ndarray:
    """A view of the part of a parameter that a tensor is, in the tensor's shape."""
    own = array if place.expert is None else array[place.expert]
    if not place.is_matrix:
        return own
    return own[:, place.first : place.first + place.shape[0]].T
