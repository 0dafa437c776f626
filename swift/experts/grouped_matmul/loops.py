"""The grouped matmul on CPUs: loops over the slots and over the rows of each.

Each slot is processed in large steps first and then in smaller ones, without copying the weights: XLA's ``ragged_dot``
on CPU multiplies every row by every slot's weights, and a batched matmul copies weights for every block.
docs/capacity.md has the measurements.

Legend: P rows, S slots of a rank, X and Y dims.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from swift.experts.grouped_matmul.groups import Groups

_LARGEST_STEP = 256


def multiply_in_loops(
    x_PX: Float[Array, "P X"],
    weights: Float[Array, "S _ _"],
    groups: Groups,
    block: int,
    *,
    is_transposed: bool = False,
) -> Float[Array, "P Y"]:
    """Computes ``grouped_matmul`` by loops over the slots and over the rows of each.

    Args:
        x_PX: see ``grouped_matmul``.
        weights: weights of each slot ``[S, X, Y]``, or ``[S, Y, X]``.
        groups: see ``grouped_matmul``.
        block: rows of a block.
        is_transposed: whether weights are ``[S, Y, X]``. They are multiplied as they lie: XLA:CPU is as fast, and a
            transposed copy of all weights is not.
    """
    contracted, num_columns = ((1,), (1 if is_transposed else 0,)), weights.shape[1 if is_transposed else 2]

    def slot(s: jax.Array, y_PY: jax.Array) -> jax.Array:
        own = lax.dynamic_index_in_dim(weights, s, keepdims=False)

        def step(at: jax.Array, size: int, y_PY: jax.Array) -> jax.Array:
            rows = lax.dynamic_slice_in_dim(x_PX, at, size)
            return lax.dynamic_update_slice_in_dim(y_PY, lax.dot_general(rows, own, (contracted, ((), ()))), at, 0)

        return _in_steps(groups.start_S[s], groups.size_S[s], _steps(block, x_PX.shape[0]), step, y_PY)

    return lax.fori_loop(0, len(weights), slot, _zeros((x_PX.shape[0], num_columns), x_PX.dtype, groups))


def weight_gradient_in_loops(
    x_PX: Float[Array, "P X"], dy_PY: Float[Array, "P Y"], groups: Groups, block: int
) -> Float[Array, "S X Y"]:
    """Computes the gradient ``[S, X, Y]`` of the weights by loops over slots and rows, in at least float32.

    Rows are multiplied as they lie: a transposed copy of all of them takes up to a third of the time.
    """
    wide, contracted = jnp.promote_types(x_PX.dtype, jnp.float32), ((0,), (0,))

    def slot(s: jax.Array, total_SXY: jax.Array) -> jax.Array:
        def step(at: jax.Array, size: int, sum_XY: jax.Array) -> jax.Array:
            x, dy = (lax.dynamic_slice_in_dim(rows, at, size) for rows in (x_PX, dy_PY))
            return sum_XY + lax.dot_general(x, dy, (contracted, ((), ())), preferred_element_type=wide)

        none_XY, steps = _zeros(total_SXY.shape[1:], wide, groups), _steps(block, x_PX.shape[0])
        sum_XY = _in_steps(groups.start_S[s], groups.size_S[s], steps, step, none_XY)
        return lax.dynamic_update_index_in_dim(total_SXY, sum_XY, s, 0)

    num_slots = groups.size_S.shape[0]
    return lax.fori_loop(0, num_slots, slot, _zeros((num_slots, x_PX.shape[1], dy_PY.shape[1]), wide, groups))


def _zeros(shape: tuple[int, ...], dtype: DTypeLike, groups: Groups) -> jax.Array:
    """Zeros that differ from rank to rank, to ``shard_map`` with ``check_vma=True``, as what is added to them does."""
    return jnp.full(shape, (groups.size_S[0] * 0).astype(dtype))


def _steps(block: int, num_rows: int) -> list[int]:
    """Sizes of the steps, the largest first; each is four times the next, and the last is one block."""
    steps = [block]
    while 4 * steps[0] <= min(_LARGEST_STEP, num_rows):
        steps.insert(0, 4 * steps[0])
    return steps


def _in_steps(
    start: jax.Array,
    num_rows: jax.Array,
    steps: list[int],
    body: Callable[[jax.Array, int, jax.Array], jax.Array],
    value: jax.Array,
) -> jax.Array:
    """Runs ``body(first row, number of rows, value)`` over all rows, in the largest steps that fit."""
    for size in steps:
        count = num_rows // size
        value = lax.fori_loop(0, count, lambda i, value, at=start, size=size: body(at + i * size, size, value), value)
        start, num_rows = start + count * size, num_rows - count * size
    return value
