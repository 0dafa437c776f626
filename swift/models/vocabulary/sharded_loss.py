"""Token loss under a sharded head: each rank scores all ranks' tokens, for its part of the vocabulary.

A chunk of every rank's tokens is gathered and scored. The ranks' scores are combined through three numbers per token:
the largest logit, the sum of the exponentials and the label's logit. The gradients of the columns are then complete,
and the tokens' gradients are summed on the ranks that own the tokens. As in ``losses``, gradients are computed together
with the loss, in three matmuls: processing all tokens with a rank's columns takes as many FLOPs as processing the
rank's own tokens with the whole head.

Legend: N ranks, r tokens of this rank in a chunk, R = N * r tokens of all ranks, C chunks, D model dim, V vocabulary, v
columns of a rank.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from swift.mesh.per_rank import EXPERT_AXIS
from swift.models import losses
from swift.models.modules import at_least_float32


def sharded_loss_sum(
    x_rD: Float[Array, "r D"],
    kernel_Dv: Float[Array, "D v"],
    labels_r: Int[Array, " r"],
    valid_r: Bool[Array, " r"],
    vocab_size: int,
    weight_r: Float[Array, " r"] | None = None,
) -> Float[Array, ""]:
    """Sums the cross-entropies of this rank's valid tokens, in nats and times their weights.

    All ranks must have equally many tokens.

    The gradient with respect to the columns is that of the sum over all ranks' tokens. The cotangent must be the same
    on all ranks.

    Args:
        x_rD: normed residual stream of this rank's tokens.
        kernel_Dv: columns of this rank, starting at column ``v * rank``; columns beyond the vocabulary are padding.
        labels_r: int32, tokens to predict.
        valid_r: False for padding.
        vocab_size: number of columns of the whole head, V.
        weight_r: weight of each token's loss; None if all are 1.
    """
    size = losses.tokens_per_block(len(x_rD), vocab_size)
    x_CrD, *tokens_Cr = jax.tree.map(partial(losses.in_chunks, size=size), (x_rD, labels_r, valid_r, weight_r))
    tokens_CR = jax.tree.map(lambda array: lax.all_gather(array, EXPERT_AXIS, axis=1, tiled=True), tokens_Cr)
    return _sum(vocab_size, x_CrD, kernel_Dv, *tokens_CR)


class _Scores(NamedTuple):
    """Scores of all ranks' tokens in a chunk under this rank's columns; log_sum_R and label_R cover all columns."""

    x_RD: jax.Array
    logits_Rv: jax.Array
    is_label_Rv: jax.Array
    log_sum_R: jax.Array  # logarithm of the sum of exponentials
    label_R: jax.Array  # logit of the label

    @classmethod
    def of(cls, vocab_size: int, x_rD: jax.Array, kernel_Dv: jax.Array, labels_R: jax.Array) -> "_Scores":
        x_RD = lax.all_gather(x_rD, EXPERT_AXIS, axis=0, tiled=True)
        logits_Rv = jnp.einsum("rd,dv->rv", x_RD, kernel_Dv, preferred_element_type=at_least_float32(x_RD.dtype))
        share = kernel_Dv.shape[1]
        column_1v = (lax.axis_index(EXPERT_AXIS) * share + jnp.arange(share, dtype=jnp.int32))[None]
        logits_Rv = jnp.where(column_1v < vocab_size, logits_Rv, -jnp.inf)
        is_label_Rv = labels_R[:, None] == column_1v
        largest_R = lax.pmax(jnp.max(logits_Rv, axis=1), EXPERT_AXIS)
        own_2R = jnp.stack(
            [
                jnp.sum(jnp.exp(logits_Rv - largest_R[:, None]), axis=1),
                jnp.sum(jnp.where(is_label_Rv, logits_Rv, jnp.zeros_like(logits_Rv)), axis=1),
            ]
        )
        sum_R, label_R = lax.psum(own_2R, EXPERT_AXIS)
        return cls(x_RD, logits_Rv, is_label_Rv, largest_R + jnp.log(sum_R), label_R)

    def loss(self, valid_R: jax.Array, weight_R: jax.Array | None, num_own: int) -> jax.Array:
        """Sums the losses of this rank's own tokens."""
        losses_R = jnp.where(valid_R, self.log_sum_R - self.label_R, jnp.zeros_like(self.label_R))
        losses_R = losses.weighted(losses_R, weight_R)
        return jnp.sum(lax.dynamic_slice_in_dim(losses_R, lax.axis_index(EXPERT_AXIS) * num_own, num_own))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(
    vocab_size: int,
    x_CrD: jax.Array,
    kernel_Dv: jax.Array,
    labels_CR: jax.Array,
    valid_CR: jax.Array,
    weight_CR: jax.Array | None,
) -> jax.Array:
    def step(total: jax.Array, chunk: Any) -> tuple[jax.Array, None]:
        x_rD, labels_R, valid_R, weight_R = chunk
        return total + _Scores.of(vocab_size, x_rD, kernel_Dv, labels_R).loss(valid_R, weight_R, len(x_rD)), None

    none = jnp.zeros((), at_least_float32(x_CrD.dtype))
    return lax.scan(step, none, (x_CrD, labels_CR, valid_CR, weight_CR))[0]


def _sum_forward(
    vocab_size: int,
    x_CrD: jax.Array,
    kernel_Dv: jax.Array,
    labels_CR: jax.Array,
    valid_CR: jax.Array,
    weight_CR: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    wide = at_least_float32(x_CrD.dtype)

    def step(totals: Any, chunk: Any) -> tuple[Any, jax.Array]:
        (total, d_kernel_Dv), (x_rD, labels_R, valid_R, weight_R) = totals, chunk
        scores = _Scores.of(vocab_size, x_rD, kernel_Dv, labels_R)
        probabilities_Rv = jnp.exp(scores.logits_Rv - scores.log_sum_R[:, None])
        d_logits_Rv = jnp.where(valid_R[:, None], probabilities_Rv - scores.is_label_Rv.astype(wide), 0)
        narrow_Rv = losses.weighted(d_logits_Rv, weight_R).astype(x_rD.dtype)
        parts_RD = jnp.einsum("rv,dv->rd", narrow_Rv, kernel_Dv, preferred_element_type=wide)
        more_Dv = jnp.einsum("rd,rv->dv", scores.x_RD, narrow_Rv, preferred_element_type=wide)
        d_x_rD = _to_owners(parts_RD.astype(x_rD.dtype), len(x_rD), wide).astype(x_rD.dtype)
        return (total + scores.loss(valid_R, weight_R, len(x_rD)), d_kernel_Dv + more_Dv), d_x_rD

    none = jnp.zeros((), wide), jnp.zeros(kernel_Dv.shape, wide)
    (total, d_kernel_Dv), d_x_CrD = lax.scan(step, none, (x_CrD, labels_CR, valid_CR, weight_CR))
    return total, (d_x_CrD, d_kernel_Dv.astype(kernel_Dv.dtype))


def _to_owners(parts_RD: jax.Array, num_own: int, wide: DTypeLike) -> jax.Array:
    """Sums each token's gradients on the rank that owns it.

    Unlike a reduce-scatter, the sum can have a wider dtype than the numbers on the wire.
    """
    parts_NrD = parts_RD.reshape(-1, num_own, parts_RD.shape[1])
    received_NrD = lax.all_to_all(parts_NrD, EXPERT_AXIS, split_axis=0, concat_axis=0)
    return jnp.sum(received_NrD.astype(wide), axis=0)


def _sum_backward(
    vocab_size: int, gradients: tuple, d_total: jax.Array
) -> tuple[jax.Array, jax.Array, None, None, None]:
    del vocab_size
    d_x_CrD, d_kernel_Dv = (gradient * d_total.astype(gradient.dtype) for gradient in gradients)
    return d_x_CrD, d_kernel_Dv, None, None, None


_sum.defvjp(_sum_forward, _sum_backward)
