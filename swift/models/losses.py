"""Token loss under a head, without all logits in memory at once.

The forward pass scores a chunk of tokens and immediately computes the chunk's loss and, under differentiation, the
gradients with respect to its tokens and the head; the backward pass only scales these. Thus there are three matmuls, as
with all logits in memory, and none is repeated.

Legend: R tokens, C chunks, D model dim, V vocabulary.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from swift.models.modules import at_least_float32

LOGITS_AT_ONCE = 2**25
"""Maximum number of logits of a chunk: 128 MiB in float32."""
LEAST_AT_ONCE = 512
"""Minimum tokens of a chunk under a whole head: with fewer, reading the head and accumulating its gradient takes longer
than the matmuls of the chunk."""


def tokens_per_block(num_tokens: int, vocab_size: int, least: int = 1) -> int:
    """Chooses the chunk size in tokens: all tokens if their logits fit, otherwise a power of two.

    A power of two divides most numbers of tokens, so that no work is spent on padding, and suits the tiles of a TPU,
    unlike 7 chunks of 667 tokens.

    Args:
        num_tokens: number of tokens.
        vocab_size: number of logits per token.
        least: minimum number of tokens of a chunk, even if their logits exceed ``LOGITS_AT_ONCE``.
    """
    most = max(least, LOGITS_AT_ONCE // vocab_size)
    return num_tokens if num_tokens <= most else 1 << (most.bit_length() - 1)


def in_chunks(array_R: Shaped[Array, "R ..."], size: int) -> Shaped[Array, "C _ ..."]:
    """Divides a token array into chunks of ``size``, the last one padded with zeros."""
    num_chunks = -(-len(array_R) // size)
    padded = jnp.pad(array_R, [(0, num_chunks * size - len(array_R)), *[(0, 0)] * (array_R.ndim - 1)])
    return padded.reshape(num_chunks, size, *array_R.shape[1:])


def sum_of_losses(
    x_RD: Float[Array, "R D"],
    kernel_DV: Float[Array, "D V"],
    labels_R: Int[Array, " R"],
    valid_R: Bool[Array, " R"],
    weight_R: Float[Array, " R"] | None = None,
) -> Float[Array, ""]:
    """Sums the valid tokens' cross-entropies, in nats and times their weights, one chunk at a time.

    Args:
        x_RD: normed residual stream.
        kernel_DV: matrix of the head.
        labels_R: int32, tokens to predict.
        valid_R: False for padding.
        weight_R: weight of each token's loss; None if all are 1.
    """
    size = tokens_per_block(len(x_RD), kernel_DV.shape[1], LEAST_AT_ONCE)
    tokens = labels_R, valid_R, weight_R
    return _sum(in_chunks(x_RD, size), kernel_DV, *jax.tree.map(partial(in_chunks, size=size), tokens))


def weighted(values_R: Shaped[Array, "R ..."], weight_R: Float[Array, " R"] | None) -> Shaped[Array, "R ..."]:
    """Multiplies each token's values by its weight; no weights leave them as they are."""
    if weight_R is None:
        return values_R
    return values_R * weight_R.astype(values_R.dtype).reshape(-1, *[1] * (values_R.ndim - 1))


def _losses(x_RD: Any, kernel_DV: Any, labels_R: Any, valid_R: Any, weight_R: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (sum of a chunk's losses, its tokens' log-probabilities ``[R, V]``)."""
    logits_RV = jnp.einsum("rd,dv->rv", x_RD, kernel_DV, preferred_element_type=at_least_float32(x_RD.dtype))
    log_probs_RV = jax.nn.log_softmax(logits_RV)
    chosen_R = jnp.take_along_axis(log_probs_RV, labels_R[:, None], axis=-1)[:, 0]
    return -jnp.sum(weighted(jnp.where(valid_R, chosen_R, jnp.zeros_like(chosen_R)), weight_R)), log_probs_RV


@jax.custom_vjp
def _sum(
    x_CRD: jax.Array, kernel_DV: jax.Array, labels_CR: jax.Array, valid_CR: jax.Array, weight_CR: jax.Array | None
) -> jax.Array:
    def step(total: jax.Array, chunk: Any) -> tuple[jax.Array, None]:
        x_RD, *tokens = chunk
        return total + _losses(x_RD, kernel_DV, *tokens)[0], None

    none = jnp.zeros((), at_least_float32(x_CRD.dtype))
    return lax.scan(step, none, (x_CRD, labels_CR, valid_CR, weight_CR))[0]


def _sum_forward(
    x_CRD: jax.Array, kernel_DV: jax.Array, labels_CR: jax.Array, valid_CR: jax.Array, weight_CR: jax.Array | None
) -> tuple[jax.Array, tuple]:
    wide = at_least_float32(x_CRD.dtype)

    def step(totals: Any, chunk: Any) -> tuple[Any, jax.Array]:
        (total, d_kernel_DV), (x_RD, labels_R, valid_R, weight_R) = totals, chunk
        loss, log_probs_RV = _losses(x_RD, kernel_DV, labels_R, valid_R, weight_R)
        is_label_RV = labels_R[:, None] == jnp.arange(kernel_DV.shape[1], dtype=labels_R.dtype)[None]
        d_logits_RV = jnp.where(valid_R[:, None], jnp.exp(log_probs_RV) - is_label_RV.astype(wide), 0)
        narrow_RV = weighted(d_logits_RV, weight_R).astype(x_RD.dtype)
        d_x_RD = jnp.einsum("rv,dv->rd", narrow_RV, kernel_DV, preferred_element_type=wide)
        more_DV = jnp.einsum("rd,rv->dv", x_RD, narrow_RV, preferred_element_type=wide)
        return (total + loss, d_kernel_DV + more_DV), d_x_RD.astype(x_RD.dtype)

    none = jnp.zeros((), wide), jnp.zeros(kernel_DV.shape, wide)
    (total, d_kernel_DV), d_x_CRD = lax.scan(step, none, (x_CRD, labels_CR, valid_CR, weight_CR))
    return total, (d_x_CRD, d_kernel_DV.astype(kernel_DV.dtype))


def _sum_backward(gradients: tuple, d_total: jax.Array) -> tuple[jax.Array, jax.Array, None, None, None]:
    d_x_CRD, d_kernel_DV = (gradient * d_total.astype(gradient.dtype) for gradient in gradients)
    return d_x_CRD, d_kernel_DV, None, None, None


_sum.defvjp(_sum_forward, _sum_backward)
