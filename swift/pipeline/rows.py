"""Rows and slots of stacked arrays, read and written at indices that are data: XLA updates them in place."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

Index: TypeAlias = Any
"""An index of a slot or of a row: an int or int32[]."""


def row_of(rows: Any, row: Index) -> Any:
    """The values in one row of a tree of arrays ``[rows, ...]``."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, row, keepdims=False), rows)


def add_to_row(totals: Any, row: Index, values: Any) -> Any:
    """Adds values to one row of a tree of arrays ``[rows, ...]``, in the totals' dtype."""

    def added(total: jax.Array, value: jax.Array) -> jax.Array:
        before = lax.dynamic_index_in_dim(total, row, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, before + value.astype(total.dtype), row, 0)

    return jax.tree.map(added, totals, values)


def put(buffers: Any, slot: Index, values: Any) -> Any:
    """Writes values to one slot of a tree of buffers ``[slots, ...]``."""
    return jax.tree.map(lambda buffer, value: lax.dynamic_update_index_in_dim(buffer, value, slot, 0), buffers, values)


def put_row(buffers: Sequence[jax.Array], slot: Index, row: Index, values: Sequence[jax.Array]) -> tuple:
    """Writes values to one row of one slot of buffers ``[slots, rows, ...]``."""
    return tuple(
        lax.dynamic_update_slice(buffer, value[None, None], _start(slot, row, buffer))
        for buffer, value in zip(buffers, values, strict=True)
    )


def take_row(buffers: Sequence[jax.Array], slot: Index, row: Index) -> tuple:
    """The values in one row of one slot of buffers ``[slots, rows, ...]``."""
    return tuple(
        lax.dynamic_slice(buffer, _start(slot, row, buffer), (1, 1, *buffer.shape[2:]))[0, 0] for buffer in buffers
    )


def _start(slot: Index, row: Index, buffer: jax.Array) -> list[jax.Array]:
    return [jnp.asarray(index, jnp.int32) for index in (slot, row, *(0,) * (buffer.ndim - 2))]
