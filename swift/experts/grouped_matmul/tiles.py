"""The grouped matmul on GPUs: kernels in which each program multiplies a tile of rows of one slot.

XLA:GPU makes one dense matmul of a ``ragged_dot``: every row with the weights of every slot, where those of other slots
meet zeros. This is S times the operations, and a copy of the rows for each slot (jax 0.10.2 and 0.11.2). The kernels
here are for the Triton backend of Pallas, which knows NVIDIA's GPUs since Ampere, and will be removed from a later JAX;
by then XLA should have one of its own, https://github.com/openxla/xla/pull/46000.

Legend: P rows, S slots of a rank, G = S + 1 groups of rows, the last those after all slots', X and Y dims, I tiles.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from swift.experts.grouped_matmul.groups import Groups

_SMALLEST_SIDE, _HEIGHT, _WIDTH = 16, 128, 128
"""Sides of a tile: tensor cores multiply no smaller one, and many GPUs' shared memory does not hold a larger one."""
_DEPTH_BYTES = 128
"""Bytes of a tile's row that a program loads at a time; for a gradient of weights, as many rows as that has numbers."""
_DTYPES = ("bfloat16", "float16", "float32")
_OPTIONS = triton.CompilerParams(num_warps=8, num_stages=3)
"""Three stages of 32 KiB, for the factors of a step, fit into the shared memory of every GPU since Ampere."""


def have_tiles(dtype: DTypeLike, *factors: jax.Array) -> bool:
    """Whether the kernels can multiply factors of this type, whose last dims are cut into tiles."""
    dims = [dim for factor in factors for dim in factor.shape[1:]]
    return jnp.dtype(dtype).name in _DTYPES and all(_side(dim, _WIDTH) >= _SMALLEST_SIDE for dim in dims)


def multiply_in_tiles(
    x_PX: Float[Array, "P X"],
    weights: Float[Array, "S _ _"],
    groups: Groups,
    *,
    is_transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "P Y"]:
    """Computes ``grouped_matmul``.

    Args:
        x_PX: see ``grouped_matmul``.
        weights: weights of each slot ``[S, X, Y]``, or ``[S, Y, X]``.
        groups: see ``grouped_matmul``.
        is_transposed: whether weights are ``[S, Y, X]``.
        interpret: runs the kernel on any device.
    """
    (num_rows, depth), num_columns = x_PX.shape, weights.shape[1 if is_transposed else 2]
    num_slots, height = len(weights), _height(num_rows, len(weights))
    width, step = _side(num_columns, _WIDTH), _side(depth, _depth(x_PX.dtype))

    def kernel(
        slot_I: jax.Ref, start_I: jax.Ref, end_I: jax.Ref, x_PX: jax.Ref, weights: jax.Ref, y_PY: jax.Ref
    ) -> None:
        tile, slot = pl.program_id(1), slot_I[pl.program_id(1)]
        start, columns = start_I[tile], pl.ds(pl.program_id(0) * width, width)
        rows, mask = pl.ds(start, height), (start + _numbers(height) < end_I[tile])[:, None]

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            inner = pl.ds(i * step, step)
            x = triton.load(x_PX.at[rows, inner], mask=mask, other=0.0)
            w = weights[slot, columns, inner].T if is_transposed else weights[slot, inner, columns]
            return total + jnp.dot(x, w, preferred_element_type=jnp.float32)

        # Rows after those of the last slot are zeros, and have no weights.
        num_steps = (slot < num_slots).astype(jnp.int32) * (depth // step)
        total = lax.fori_loop(0, num_steps, add, jnp.zeros((height, width), jnp.float32))
        triton.store(y_PY.at[rows, columns], total.astype(y_PY.dtype), mask=mask)

    tiles = _tiles(groups, num_rows, height)
    # Programs that run at the same time share a tile's rows and a slot's weights: columns first.
    grid = (num_columns // width, len(tiles.slot_I))
    return _call(kernel, grid, (num_rows, num_columns), x_PX.dtype, interpret, *tiles, x_PX, weights)


def weight_gradient_in_tiles(
    x_PX: Float[Array, "P X"], dy_PY: Float[Array, "P Y"], groups: Groups, *, interpret: bool = False
) -> Float[Array, "S X Y"]:
    """Computes the gradient ``[S, X, Y]`` of the weights, a sum in float32; see ``multiply_in_tiles``."""
    dims, num_slots = (x_PX.shape[1], dy_PY.shape[1]), len(groups.size_S)
    height, width = _side(dims[0], _HEIGHT), _side(dims[1], _WIDTH)
    step = min(_height(x_PX.shape[0], num_slots), _depth(x_PX.dtype))

    def kernel(start_S: jax.Ref, size_S: jax.Ref, x_PX: jax.Ref, dy_PY: jax.Ref, dw_SXY: jax.Ref) -> None:
        columns, rows = pl.ds(pl.program_id(0) * width, width), pl.ds(pl.program_id(1) * height, height)
        slot = pl.program_id(2)
        start, size = start_S[slot], size_S[slot]

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            inner, mask = pl.ds(start + i * step, step), (i * step + _numbers(step) < size)[:, None]
            x, dy = (triton.load(ref, mask=mask, other=0.0) for ref in (x_PX.at[inner, rows], dy_PY.at[inner, columns]))
            return total + jnp.dot(x.T, dy, preferred_element_type=jnp.float32)

        total = lax.fori_loop(
            0, lax.div(size + (step - 1), jnp.int32(step)), add, jnp.zeros((height, width), jnp.float32)
        )
        dw_SXY[slot, rows, columns] = total.astype(dw_SXY.dtype)

    grid = (dims[1] // width, dims[0] // height, num_slots)
    return _call(kernel, grid, (num_slots, *dims), x_PX.dtype, interpret, *groups, x_PX, dy_PY)


class _Tiles(NamedTuple):
    """Rows that each tile has, of one slot each; the rest is of slot S, whose rows are those after the last slot's."""

    slot_I: jax.Array
    start_I: jax.Array
    end_I: jax.Array  # of the slot: the last tile of a slot has fewer rows


def _tiles(groups: Groups, num_rows: int, height: int) -> _Tiles:
    """Cuts the rows of each slot into tiles: as many as suffice however the rows are spread over the slots."""
    end_S = groups.start_S + groups.size_S
    start_G, end_G = jnp.append(groups.start_S, end_S[-1]), jnp.append(end_S, num_rows)
    through_G = jnp.cumsum(-(-(end_G - start_G) // height), dtype=jnp.int32)
    tile_I = _numbers(num_rows // height + len(start_G))
    slot_I = jnp.sum(tile_I[:, None] >= through_G[None], axis=1, dtype=jnp.int32)
    before_I = jnp.where(slot_I > 0, through_G[slot_I - 1], 0)
    # A tile that is not needed begins after the last row.
    start_I = jnp.where(slot_I < len(start_G), start_G[slot_I] + (tile_I - before_I) * height, num_rows)
    return _Tiles(slot_I, start_I, end_G[slot_I])


def _numbers(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)


def _height(num_rows: int, num_slots: int) -> int:
    """Rows of a tile: the largest power of two up to those of a slot in the mean, within the limits."""
    mean = max(num_rows // num_slots, 1)
    return min(max(1 << (mean.bit_length() - 1), _SMALLEST_SIDE), _HEIGHT)


def _depth(dtype: DTypeLike) -> int:
    return _DEPTH_BYTES // jnp.dtype(dtype).itemsize


def _side(dim: int, most: int) -> int:
    """The largest power of two that divides ``dim``, up to ``most``."""
    return min(dim & -dim, most)


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    interpret: bool,
    *arrays: jax.Array,
) -> jax.Array:
    """Runs a kernel over a grid. What it makes differs over the same mesh axes as the arrays together."""

    def like(*arrays: jax.Array) -> jax.Array:
        return jnp.zeros(shape, dtype) + sum(array.ravel()[0].astype(dtype) for array in arrays)

    made = jax.eval_shape(like, *arrays)
    return pl.pallas_call(kernel, made, grid=grid, compiler_params=_OPTIONS, interpret=interpret)(*arrays)
