"""Grouped matmul: rows sorted by slot, each multiplied by the weights of its own slot.

Rows come in blocks of a fixed size, and each block belongs to one slot. A slot's rows start at the edge of a block, and
zeros fill its last block. The number of rows per slot is data: one program serves every distribution of the rows, with
no floating-point work beyond the rows themselves and the padding of the blocks.

On CPU, each slot is processed by loops, in large steps first and then in smaller ones, without copying the weights:
XLA's ``ragged_dot`` on CPU multiplies every row by every slot's weights, and a batched matmul copies weights for every
block. On other platforms it is ``lax.ragged_dot``. docs/capacity.md has the measurements.

Legend: P rows, S slots of a rank, X and Y dims.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

_LARGEST_BLOCK, _LARGEST_STEP = 128, 256
_CONTRACT_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


class Groups(NamedTuple):
    """Row ranges of the slots, in order and without gaps."""

    start_S: jax.Array  # int32, a multiple of the block
    size_S: jax.Array  # int32, a multiple of the block


def block_rows(num_rows: int, num_slots: int) -> int:
    """Chooses the rows of a block: the largest power of two up to 128 whose padding adds at most 1 row in 32.

    >>> block_rows(2048, 4), block_rows(256, 4), block_rows(8, 4)
    (16, 2, 1)
    """
    block = 1
    while 2 * block <= _LARGEST_BLOCK and num_slots * (2 * block - 1) * 32 <= num_rows:
        block *= 2
    return block


def padded_rows(num_rows: int, num_slots: int) -> int:
    """Number of rows P that suffices for ``num_rows`` rows in blocks, however they are spread over the slots."""
    block = block_rows(num_rows, num_slots)
    return (num_rows + num_slots * (block - 1)) // block * block


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    x_PX: Float[Array, "P X"], weights_SXY: Float[Array, "S X Y"], groups: Groups, block: int
) -> Float[Array, "P Y"]:
    """Multiplies every row by the weights of its slot.

    Args:
        x_PX: rows sorted by slot; padding rows, within blocks and after the last slot, are zeros.
        weights_SXY: weights of each slot.
        groups: row range of each slot.
        block: rows of a block.

    Returns:
        y_PY; zero wherever x is. The gradient must be zero there, too.
    """
    return _multiply(x_PX, weights_SXY, groups, block)


def _forward(x_PX: jax.Array, weights_SXY: jax.Array, groups: Groups, block: int) -> tuple[jax.Array, tuple]:
    return _multiply(x_PX, weights_SXY, groups, block), (x_PX, weights_SXY, groups)


def _backward(block: int, residuals: tuple, dy_PY: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_PX, weights_SXY, groups = residuals
    dx_PX = _multiply(dy_PY, weights_SXY, groups, block, is_transposed=True)
    return dx_PX, _weight_gradient(x_PX, dy_PY, groups, block).astype(weights_SXY.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def _multiply(
    x_PX: jax.Array, weights: jax.Array, groups: Groups, block: int, *, is_transposed: bool = False
) -> jax.Array:
    """Multiplies rows by weights ``[S, X, Y]``, or ``[S, Y, X]`` if these are transposed."""

    def ragged(x_PX: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
        return multiply_ragged(x_PX, weights.swapaxes(1, 2) if is_transposed else weights, groups)

    in_loops = partial(multiply_in_loops, block=block, is_transposed=is_transposed)
    return lax.platform_dependent(x_PX, weights, groups, cpu=in_loops, default=ragged)


def _weight_gradient(x_PX: jax.Array, dy_PY: jax.Array, groups: Groups, block: int) -> jax.Array:
    return lax.platform_dependent(
        x_PX, dy_PY, groups, cpu=partial(weight_gradient_in_loops, block=block), default=weight_gradient_ragged
    )


def multiply_ragged(
    x_PX: Float[Array, "P X"], weights_SXY: Float[Array, "S X Y"], groups: Groups
) -> Float[Array, "P Y"]:
    """Computes ``grouped_matmul`` by ``lax.ragged_dot``."""
    return lax.ragged_dot(x_PX, weights_SXY, groups.size_S)


def weight_gradient_ragged(
    x_PX: Float[Array, "P X"], dy_PY: Float[Array, "P Y"], groups: Groups
) -> Float[Array, "S X Y"]:
    """Computes the gradient ``[S, X, Y]`` of the weights by ``lax.ragged_dot_general``, in at least float32."""
    wide = jnp.promote_types(x_PX.dtype, jnp.float32)
    return lax.ragged_dot_general(x_PX, dy_PY, groups.size_S, _CONTRACT_ROWS, preferred_element_type=wide)


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
    """Computes the gradient ``[S, X, Y]`` of the weights by loops over slots and rows, in at least float32."""
    if x_PX.shape[1] > dy_PY.shape[1]:  # transposes the narrower of the two, once: transposing in each step is slower
        return weight_gradient_in_loops(dy_PY, x_PX, groups, block).swapaxes(1, 2)
    wide, x_XP = jnp.promote_types(x_PX.dtype, jnp.float32), x_PX.T

    def slot(s: jax.Array, total_SXY: jax.Array) -> jax.Array:
        def step(at: jax.Array, size: int, sum_XY: jax.Array) -> jax.Array:
            x, dy = lax.dynamic_slice_in_dim(x_XP, at, size, axis=1), lax.dynamic_slice_in_dim(dy_PY, at, size)
            return sum_XY + jnp.matmul(x, dy, preferred_element_type=wide)

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
