"""Layers of stacked arrays, and slots of buffers, read and written at indices that are data: XLA updates in place."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

Index: TypeAlias = Any
"""An index of a slot or of a layer: an int or int32[]."""


def layer_of(stack: Any, layer: Index) -> Any:
    """The values in one layer of a tree of arrays ``[layers, ...]``."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer, keepdims=False), stack)


def add_to_layer(totals: Any, layer: Index, values: Any) -> Any:
    """Adds values to one layer of a tree of arrays ``[layers, ...]``, in the totals' dtype."""

    def added(total: jax.Array, value: jax.Array) -> jax.Array:
        before = lax.dynamic_index_in_dim(total, layer, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, before + value.astype(total.dtype), layer, 0)

    return jax.tree.map(added, totals, values)


def put(buffers: Any, slot: Index, values: Any) -> Any:
    """Writes values to one slot of a tree of buffers ``[slots, ...]``."""
    return jax.tree.map(lambda buffer, value: lax.dynamic_update_index_in_dim(buffer, value, slot, 0), buffers, values)


def put_layer(buffers: Sequence[jax.Array], slot: Index, layer: Index, values: Sequence[jax.Array]) -> tuple:
    """Writes values to one layer of one slot of buffers ``[slots, layers, ...]``."""
    return tuple(
        lax.dynamic_update_slice(buffer, value[None, None], _start(slot, layer, buffer))
        for buffer, value in zip(buffers, values, strict=True)
    )


def take_layer(buffers: Sequence[jax.Array], slot: Index, layer: Index) -> tuple:
    """The values in one layer of one slot of buffers ``[slots, layers, ...]``."""
    return tuple(
        lax.dynamic_slice(buffer, _start(slot, layer, buffer), (1, 1, *buffer.shape[2:]))[0, 0] for buffer in buffers
    )


def _start(slot: Index, layer: Index, buffer: jax.Array) -> list[jax.Array]:
    return [jnp.asarray(index, jnp.int32) for index in (slot, layer, *(0,) * (buffer.ndim - 2))]
