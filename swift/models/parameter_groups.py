"""Parameter groups: the parameters of all modules of one kind, packed into flat vectors that the optimizer can slice.

A group is all modules of one kind, such as the attentions or the experts. Its parameters are one array
``[rows, experts, size]``: one row per layer, one entry per expert (one for dense modules), ``size`` numbers per module.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swift.models.initial_values import Draw, DrawList


class _Template(NamedTuple):
    """Structure of a module without its parameter values."""

    graphdef: Any
    treedef: Any
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Group:
    """All modules of one kind.

    Attributes:
        name: name of the kind, such as ``attention``.
        num_layers: number of layers that have such a module.
        num_classes: number of experts, E; 1 for dense modules.
        create: function that makes one module from random keys.
        is_expert: True if the group's modules are placed in slots.
    """

    name: str
    num_layers: int
    num_classes: int
    create: Callable[[nnx.Rngs], nnx.Module]
    is_expert: bool = False

    @cached_property
    def _template(self) -> "_Template":
        graphdef, state = nnx.split(nnx.eval_shape(lambda: self.create(nnx.Rngs(0))))
        leaves, treedef = jax.tree.flatten(state)
        return _Template(graphdef, treedef, tuple(leaf.shape for leaf in leaves))

    @property
    def sizes(self) -> list[int]:
        """Number of values of each parameter of a module."""
        return [math.prod(shape) for shape in self._template.shapes]

    @property
    def size(self) -> int:
        """Parameters of one module, W."""
        return sum(self.sizes)

    def in_matrix(self, position_w: jax.Array) -> jax.Array:
        """Whether the parameter at each position of a module's vector is of a matrix, bool[w]."""
        ends = np.cumsum([math.prod(shape) for shape in self._template.shapes])
        is_matrix_i = np.array([len(shape) > 1 for shape in self._template.shapes] + [False])  # then the padding
        return jnp.asarray(is_matrix_i)[jnp.searchsorted(jnp.asarray(ends), position_w, side="right")]

    @property
    def matrix_size(self) -> int:
        """Parameters of one module that are in matrices."""
        return sum(math.prod(shape) for shape in self._template.shapes if len(shape) > 1)

    @cached_property
    def initial_values(self) -> tuple[Draw | np.ndarray, ...]:
        """Initial value of each parameter of a module: draws of normal numbers, or a constant."""
        draws = DrawList()
        with jax.ensure_compile_time_eval():  # this may be first asked for while a program is traced
            leaves = self._template.treedef.flatten_up_to(nnx.state(self.create(draws)))  # type: ignore[arg-type]
            return tuple(draws.found(leaf) for leaf in leaves)

    def pack(self, state: Any) -> jax.Array:
        """Packs a module's state, with leaves ``[..., *shape]``, into ``[..., size]``."""
        leaves = self._template.treedef.flatten_up_to(state)
        lead = leaves[0].ndim - len(self._template.shapes[0])
        return jnp.concatenate([jnp.reshape(leaf, (*leaf.shape[:lead], -1)) for leaf in leaves], axis=-1)

    def unpack(self, vectors: jax.Array) -> Any:
        """Unpacks ``[..., size or more]`` into a module's state with leaves ``[..., *shape]``, dropping padding."""
        leaves, start = [], 0
        for shape in self._template.shapes:
            end = start + math.prod(shape)
            leaves.append(vectors[..., start:end].reshape(*vectors.shape[:-1], *shape))
            start = end
        return jax.tree.unflatten(self._template.treedef, leaves)

    def module(self, state: Any) -> Any:
        """Makes a module from its state."""
        return nnx.merge(self._template.graphdef, state)
