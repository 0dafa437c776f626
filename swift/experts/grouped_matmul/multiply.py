"""The grouped matmul, its gradients, and the way of computing it on each platform.

Rows come in blocks of a fixed size, and each block belongs to one slot. A slot's rows start at the edge of a block, and
zeros fill its last block. The number of rows per slot is data: one program serves every distribution of the rows, with
no floating-point work beyond the rows themselves and the padding of the blocks.

On CPUs slots are processed by loops, on GPUs by kernels, since XLA multiplies every row by every slot's weights there.
On other platforms it is ``lax.ragged_dot``. docs/capacity.md has the measurements.

Legend: P rows, S slots of a rank, X and Y dims.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from swift.experts.grouped_matmul.groups import Groups
from swift.experts.grouped_matmul.loops import multiply_in_loops, weight_gradient_in_loops
from swift.experts.grouped_matmul.tiles import have_tiles, multiply_in_tiles, weight_gradient_in_tiles
from swift.mesh.per_rank import known_platform

_CONTRACT_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


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

    ways = {"cpu": partial(multiply_in_loops, block=block, is_transposed=is_transposed)}
    if _may_be_on_gpu() and have_tiles(x_PX.dtype, weights):
        ways["cuda"] = partial(multiply_in_tiles, is_transposed=is_transposed)
    return lax.platform_dependent(x_PX, weights, groups, **ways, default=ragged)


def _weight_gradient(x_PX: jax.Array, dy_PY: jax.Array, groups: Groups, block: int) -> jax.Array:
    """Computes the gradient of the weights in the type of the rows, of a sum that is at least float32."""

    def rounded(way: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda x_PX, dy_PY, groups: way(x_PX, dy_PY, groups).astype(x_PX.dtype)

    ways = {"cpu": rounded(partial(weight_gradient_in_loops, block=block))}
    if _may_be_on_gpu() and have_tiles(x_PX.dtype, x_PX, dy_PY):
        ways["cuda"] = weight_gradient_in_tiles
    return lax.platform_dependent(x_PX, dy_PY, groups, **ways, default=rounded(weight_gradient_ragged))


def _may_be_on_gpu() -> bool:
    """Whether a program may run on GPUs: to trace kernels for others takes long."""
    return known_platform() != "cpu"


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
