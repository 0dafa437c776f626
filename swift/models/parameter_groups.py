"""Parameter groups: the parameters of all modules of one kind, packed into flat vectors that the optimizer can slice.

A group is all modules of one kind, such as the attentions or the experts. Its parameters are one array
``[layers, experts, size]``: every layer that has such a module, every expert (one for dense modules), and ``size``
numbers for each.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swift.models.initial_values import Draw, draw_all, list_draws
from swift.models.row_copies import join_by_rows, split_by_rows


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
        """Whether the parameter at each position of a module's vector is of a matrix, bool[w].

        Args:
            position_w: positions; int32 that has wrapped around is taken for what it was, up to 2^32.
        """
        ends = np.cumsum([math.prod(shape) for shape in self._template.shapes])
        is_matrix_i = np.array([len(shape) > 1 for shape in self._template.shapes] + [False])  # then the padding
        nth_w = jnp.searchsorted(jnp.asarray(ends.astype(np.uint32)), position_w.astype(jnp.uint32), side="right")
        return jnp.asarray(is_matrix_i)[nth_w]

    def span(self, name: str) -> tuple[int, int]:
        """The first position of a parameter in a module's vector, and the one after its last."""
        names = jax.tree_util.tree_leaves_with_path(self._template.treedef.unflatten(range(len(self.sizes))))
        index = next(index for path, index in names if jax.tree_util.DictKey(name) in path)
        start = sum(self.sizes[:index])
        return start, start + self.sizes[index]

    @property
    def matrix_size(self) -> int:
        """Parameters of one module that are in matrices."""
        return sum(math.prod(shape) for shape in self._template.shapes if len(shape) > 1)

    @property
    def stack_shape(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the parameters of all modules, ``[layers, experts, size]``; no value is made."""
        vector = jax.eval_shape(self.draw, root_key(0))
        return jax.ShapeDtypeStruct((self.num_layers, self.num_classes, *vector.shape), vector.dtype)

    @cached_property
    def initial_values(self) -> tuple[Draw | np.ndarray, ...] | None:
        """Initial value of each parameter of a module: draws of normal numbers, or a constant; None: see ``draw``."""
        with jax.ensure_compile_time_eval():  # this may be first asked for while a program is traced
            return list_draws(lambda rngs: self._template.treedef.flatten_up_to(nnx.state(self.create(rngs))))

    def draw(self, key: jax.Array) -> jax.Array:
        """Draws the parameters of a module by its own initializers."""
        return self.pack(nnx.state(self.create(nnx.Rngs(key))))

    def pack(self, state: Any) -> jax.Array:
        """Packs a module's state, with leaves ``[..., *shape]``, into ``[..., size]``."""
        leaves = self._template.treedef.flatten_up_to(state)
        lead = leaves[0].ndim - len(self._template.shapes[0])
        return jnp.concatenate([jnp.reshape(leaf, (*leaf.shape[:lead], -1)) for leaf in leaves], axis=-1)

    def unpack(self, vectors: jax.Array | np.ndarray) -> Any:
        """Unpacks ``[..., size or more]`` into a module's state with leaves ``[..., *shape]``, dropping padding."""
        leaves, start = [], 0
        for shape in self._template.shapes:
            end = start + math.prod(shape)
            leaves.append(vectors[..., start:end].reshape(*vectors.shape[:-1], *shape))
            start = end
        return jax.tree.unflatten(self._template.treedef, leaves)

    def pack_stack(self, state: Any) -> jax.Array:
        """Packs as ``pack`` does; on TPUs a few rows at a time, where their positions fit 32 bits."""
        if self.size >= 1 << 31:
            return self.pack(state)
        return jax.lax.platform_dependent(state, tpu=self._pack_by_rows, default=self.pack)

    def unpack_stack(self, vectors: jax.Array) -> Any:
        """Unpacks as ``unpack`` does; on TPUs a few rows at a time, where their positions fit 32 bits."""
        if self.size >= 1 << 31:
            return self.unpack(vectors)
        return jax.lax.platform_dependent(vectors, tpu=self._unpack_by_rows, default=self.unpack)

    def _pack_by_rows(self, state: Any) -> jax.Array:
        return join_by_rows(self._template.treedef.flatten_up_to(state), self._template.shapes)

    def _unpack_by_rows(self, vectors: jax.Array) -> Any:
        return jax.tree.unflatten(self._template.treedef, split_by_rows(vectors, self._template.shapes))

    def module(self, state: Any) -> Any:
        """Makes a module from its state."""
        return nnx.merge(self._template.graphdef, state)


def draw_parameters(groups: Mapping[str, Group], key: jax.Array) -> dict[str, jax.Array]:
    """Draws the initial parameters of all groups, float32 ``[layers, experts, size]`` for each.

    Args:
        groups: groups of parameters by name.
        key: a key of ``root_key``.
    """
    with jax.threefry_partitionable(True):  # whatever JAX's default is: a seed stands for the same parameters
        return _drawn(groups, key)


def root_key(seed: int) -> jax.Array:
    """Makes the random key of a seed, always Threefry's, whose numbers ``draw_all`` computes itself."""
    return jax.random.key(seed, impl="threefry2x32")


def _drawn(groups: Mapping[str, Group], key: jax.Array) -> dict[str, jax.Array]:
    keys_G = jax.random.split(key, len(groups))
    keys = {
        name: jax.random.split(group_key, (group.num_layers, group.num_classes))
        for (name, group), group_key in zip(groups.items(), keys_G, strict=True)
    }
    draws = {
        (name, leaf): (value, keys[name])
        for name, group in groups.items()
        for leaf, value in enumerate(group.initial_values or ())
        if isinstance(value, Draw)
    }
    numbers = _numbers(groups, draws)

    def begun(name: str, group: Group) -> jax.Array:
        if group.initial_values is None:
            return jax.vmap(jax.vmap(group.draw))(keys[name])
        shape = (group.num_layers, group.num_classes)
        leaves = [
            numbers[name, leaf] if isinstance(value, Draw) else jnp.broadcast_to(value, (*shape, value.size))
            for leaf, value in enumerate(group.initial_values)
        ]
        return jnp.concatenate(leaves, axis=-1)

    return {name: begun(name, group) for name, group in groups.items()}


def _numbers(
    groups: Mapping[str, Group], draws: Mapping[tuple[str, int], tuple[Draw, jax.Array]]
) -> dict[tuple[str, int], jax.Array]:
    """Computes draws with the keys ``[layers, experts]`` of their modules; those of a dtype together."""
    keys = jnp.concatenate([keys_LE.reshape(-1) for _, keys_LE in draws.values()])
    numbers_K = np.concatenate([np.full(keys_LE.size, draw.number) for draw, keys_LE in draws.values()])
    folded = jax.vmap(jax.random.fold_in)(keys, numbers_K.astype(np.uint32))
    ends = np.cumsum([keys_LE.size for _, keys_LE in draws.values()])
    own = {
        at: folded[end - keys_LE.size : end].reshape(keys_LE.shape)
        for (at, (_, keys_LE)), end in zip(draws.items(), ends, strict=True)
    }
    drawn: dict[tuple[str, int], jax.Array] = {}
    for dtype in sorted({draw.dtype for draw, _ in draws.values()}):
        of_dtype = [at for at, (draw, _) in draws.items() if draw.dtype == dtype]
        sizes = [groups[name].sizes[leaf] for name, leaf in of_dtype]
        stds = [draws[at][0].std for at in of_dtype]
        drawn |= zip(of_dtype, draw_all([own[at] for at in of_dtype], sizes, stds, dtype), strict=True)
    return drawn
