"""Grouped matmul and its gradients, with an implementation for each platform.

Rows are stored in blocks of a fixed size, and each block belongs to one slot. A slot's rows start at the beginning of a
block, and its last block is padded with zeros. The number of rows per slot is data: one program handles every
distribution of the rows, with no floating-point work except for the rows themselves and the padding of the blocks.

On CPUs, loops process each slot in steps of decreasing size, without copying the weights. There XLA's ``ragged_dot``
would multiply every row by every slot's weights, and a batched matmul would copy weights for every block. On GPUs, XLA
turns ``ragged_dot`` into one dense matmul in which rows of other slots are replaced by zeros: S times the operations,
and a copy of the rows for each slot (jax 0.10.2 and 0.11.2). Swift uses its own kernels instead, in which each program
multiplies a tile of rows of one slot. They need the Triton backend of Pallas, which supports NVIDIA GPUs since Ampere
and will be removed from a later JAX; by then XLA should have a kernel of its own,
https://github.com/openxla/xla/pull/46000. Other platforms use ``lax.ragged_dot``. docs/capacity.md has the
measurements.

Legend: P rows, S slots of a rank, G = S + 1 groups of rows (the last group is the rows after all slots), X and Y dims
of a slot's weights, I tiles.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from swift.mesh.per_rank import known_platform

_LARGEST_BLOCK, _LARGEST_STEP = 128, 256
"""Maximum rows of a block and of a loop step."""
_SMALLEST_SIDE, _HEIGHT, _WIDTH = 16, 128, 128
"""Minimum side of a tile, set by tensor cores; maximum height and width, set by the shared memory of many GPUs."""
_DEPTH_BYTES = 128
"""Bytes that a program loads per step from each row of a tile; the gradient kernel takes as many rows per step as these
bytes hold numbers."""
_DTYPES = ("bfloat16", "float16", "float32")
_OPTIONS = triton.CompilerParams(num_warps=8, num_stages=3)
"""The factors of a step take 32 KiB; three stages of them fit into the shared memory of every GPU since Ampere."""

_CONTRACT_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


class Groups(NamedTuple):
    """Row range of each slot; the ranges are in slot order, without gaps."""

    start_S: jax.Array  # int32, first row, a multiple of the block size
    size_S: jax.Array  # int32, number of rows, a multiple of the block size


def block_rows(num_rows: int, num_slots: int) -> int:
    """Chooses the rows per block: the largest power of two up to 128 for which padding adds at most 1 row in 32.

    >>> block_rows(2048, 4), block_rows(256, 4), block_rows(8, 4)
    (16, 2, 1)
    """
    block = 1
    while 2 * block <= _LARGEST_BLOCK and num_slots * (2 * block - 1) * 32 <= num_rows:
        block *= 2
    return block


def padded_rows(num_rows: int, num_slots: int) -> int:
    """Returns a number of rows P that suffices for ``num_rows`` rows in blocks, for any distribution over the slots."""
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
        y_PY, with zeros in the padding rows. The gradient of y must be zero in these rows, too.
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
    """Multiplies rows by weights ``[S, X, Y]``, or by ``[S, Y, X]`` with ``is_transposed``."""

    def ragged(x_PX: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
        return multiply_ragged(x_PX, weights.swapaxes(1, 2) if is_transposed else weights, groups)

    ways = {"cpu": partial(multiply_in_loops, block=block, is_transposed=is_transposed)}
    if _may_be_on_gpu() and have_tiles(x_PX.dtype, weights):
        ways["cuda"] = partial(multiply_in_tiles, is_transposed=is_transposed)
    return lax.platform_dependent(x_PX, weights, groups, **ways, default=ragged)


def _weight_gradient(x_PX: jax.Array, dy_PY: jax.Array, groups: Groups, block: int) -> jax.Array:
    """Computes the weight gradient, summed in at least float32 and then rounded to the rows' dtype."""

    def rounded(way: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda x_PX, dy_PY, groups: way(x_PX, dy_PY, groups).astype(x_PX.dtype)

    ways = {"cpu": rounded(partial(weight_gradient_in_loops, block=block))}
    if _may_be_on_gpu() and have_tiles(x_PX.dtype, x_PX, dy_PY):
        ways["cuda"] = weight_gradient_in_tiles
    return lax.platform_dependent(x_PX, dy_PY, groups, **ways, default=rounded(weight_gradient_ragged))


def _may_be_on_gpu() -> bool:
    """Whether the program may run on GPUs; if not, the kernels are not traced, which saves time."""
    return known_platform() != "cpu"


def multiply_ragged(
    x_PX: Float[Array, "P X"], weights_SXY: Float[Array, "S X Y"], groups: Groups
) -> Float[Array, "P Y"]:
    """Computes ``grouped_matmul`` with ``lax.ragged_dot``."""
    return lax.ragged_dot(x_PX, weights_SXY, groups.size_S)


def weight_gradient_ragged(
    x_PX: Float[Array, "P X"], dy_PY: Float[Array, "P Y"], groups: Groups
) -> Float[Array, "S X Y"]:
    """Computes the gradient ``[S, X, Y]`` of the weights with ``lax.ragged_dot_general``, in at least float32."""
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
    """Computes ``grouped_matmul`` by loops over the slots and over the rows of each slot.

    Args:
        x_PX: see ``grouped_matmul``.
        weights: weights of each slot ``[S, X, Y]``, or ``[S, Y, X]``.
        groups: see ``grouped_matmul``.
        block: rows of a block.
        is_transposed: whether weights are ``[S, Y, X]``. They are multiplied without a transposed copy, which would
            take time and which XLA:CPU does not need to be fast.
    """
    contracted, num_columns = ((1,), (1 if is_transposed else 0,)), weights.shape[1 if is_transposed else 2]

    def slot(s: jax.Array, y_PY: jax.Array) -> jax.Array:
        slot_weights = lax.dynamic_index_in_dim(weights, s, keepdims=False)

        def step(at: jax.Array, size: int, y_PY: jax.Array) -> jax.Array:
            rows = lax.dynamic_slice_in_dim(x_PX, at, size)
            product = lax.dot_general(rows, slot_weights, (contracted, ((), ())))
            return lax.dynamic_update_slice_in_dim(y_PY, product, at, 0)

        return _in_steps(groups.start_S[s], groups.size_S[s], _steps(block, x_PX.shape[0]), step, y_PY)

    return lax.fori_loop(0, len(weights), slot, _zeros((x_PX.shape[0], num_columns), x_PX.dtype, groups))


def weight_gradient_in_loops(
    x_PX: Float[Array, "P X"], dy_PY: Float[Array, "P Y"], groups: Groups, block: int
) -> Float[Array, "S X Y"]:
    """Computes the gradient ``[S, X, Y]`` of the weights by loops over slots and rows, in at least float32.

    Rows are multiplied without a transposed copy, which would take up to a third of the time.
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
    """Returns zeros that vary by rank for ``shard_map`` with ``check_vma=True``, like the values added to them."""
    return jnp.full(shape, (groups.size_S[0] * 0).astype(dtype))


def _steps(block: int, num_rows: int) -> list[int]:
    """Returns the step sizes in rows, in descending order; each is four times the next, and the last is one block."""
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
    """Runs ``body(first row, number of rows, value)`` over all rows, always in the largest step that fits."""
    for size in steps:
        count = num_rows // size
        value = lax.fori_loop(0, count, lambda i, value, at=start, size=size: body(at + i * size, size, value), value)
        start, num_rows = start + count * size, num_rows - count * size
    return value


def have_tiles(dtype: DTypeLike, *factors: jax.Array) -> bool:
    """Whether the kernels support the dtype, and can cut all dims of the factors but the first into tiles."""
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
    """Computes ``grouped_matmul`` with a Pallas kernel for NVIDIA GPUs.

    Args:
        x_PX: see ``grouped_matmul``.
        weights: weights of each slot ``[S, X, Y]``, or ``[S, Y, X]``.
        groups: see ``grouped_matmul``.
        is_transposed: whether weights are ``[S, Y, X]``.
        interpret: whether to interpret the kernel, on any device.
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

        # Rows after the last slot's rows have no weights; their result is zero.
        num_steps = (slot < num_slots).astype(jnp.int32) * (depth // step)
        total = lax.fori_loop(0, num_steps, add, jnp.zeros((height, width), jnp.float32))
        triton.store(y_PY.at[rows, columns], total.astype(y_PY.dtype), mask=mask)

    tiles = _tiles(groups, num_rows, height)
    # Columns are the first grid dim, so that programs running concurrently share a tile's rows and a slot's weights.
    grid = (num_columns // width, len(tiles.slot_I))
    return _call(kernel, grid, (num_rows, num_columns), x_PX.dtype, interpret, *tiles, x_PX, weights)


def weight_gradient_in_tiles(
    x_PX: Float[Array, "P X"], dy_PY: Float[Array, "P Y"], groups: Groups, *, interpret: bool = False
) -> Float[Array, "S X Y"]:
    """Computes the gradient ``[S, X, Y]`` of the weights, summed in float32; see ``multiply_in_tiles``."""
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
    """Row range and slot of each tile; the pseudo-slot S has the rows after the last slot's rows."""

    slot_I: jax.Array
    start_I: jax.Array
    end_I: jax.Array  # end of the slot's rows, at which its last tile is cut off


def _tiles(groups: Groups, num_rows: int, height: int) -> _Tiles:
    """Cuts each slot's rows into tiles; there are enough tiles for any distribution of rows over the slots."""
    end_S = groups.start_S + groups.size_S
    start_G, end_G = jnp.append(groups.start_S, end_S[-1]), jnp.append(end_S, num_rows)
    through_G = jnp.cumsum(-(-(end_G - start_G) // height), dtype=jnp.int32)
    tile_I = _numbers(num_rows // height + len(start_G))
    slot_I = jnp.sum(tile_I[:, None] >= through_G[None], axis=1, dtype=jnp.int32)
    before_I = jnp.where(slot_I > 0, through_G[slot_I - 1], 0)
    # A surplus tile starts after the last row.
    start_I = jnp.where(slot_I < len(start_G), start_G[slot_I] + (tile_I - before_I) * height, num_rows)
    return _Tiles(slot_I, start_I, end_G[slot_I])


def _numbers(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)


def _height(num_rows: int, num_slots: int) -> int:
    """Returns the rows per tile: the largest power of two up to the mean rows per slot, within the limits."""
    mean = max(num_rows // num_slots, 1)
    return min(max(1 << (mean.bit_length() - 1), _SMALLEST_SIDE), _HEIGHT)


def _depth(dtype: DTypeLike) -> int:
    return _DEPTH_BYTES // jnp.dtype(dtype).itemsize


def _side(dim: int, most: int) -> int:
    """Returns the largest power of two that divides ``dim``, up to ``most``."""
    return min(dim & -dim, most)


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    interpret: bool,
    *arrays: jax.Array,
) -> jax.Array:
    """Runs a kernel over a grid; its result varies over every mesh axis over which some input varies."""

    def like(*arrays: jax.Array) -> jax.Array:
        return jnp.zeros(shape, dtype) + sum(array.ravel()[0].astype(dtype) for array in arrays)

    out_shape = jax.eval_shape(like, *arrays)
    return pl.pallas_call(kernel, out_shape, grid=grid, compiler_params=_OPTIONS, interpret=interpret)(*arrays)
