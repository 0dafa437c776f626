"""Routing: chooses each token's experts, computes their gates, and balances the load of the experts.

Legend: T tokens, E experts, K choices of a token.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from swift.largest import largest


@dataclass(frozen=True)
class Gating:
    """Rule by which a router's logits become gates.

    Attributes:
        top_k: experts that each token is sent to, K.
        scores: ``softmax`` over the experts, or each expert's own ``sigmoid``.
        normalized: whether the gates of a token are divided by their sum; None for only if ``top_k`` is above 1.
        scale: factor by which gates are multiplied.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool | None = None
    scale: float = 1.0

    @property
    def is_normalized(self) -> bool:
        """Whether the gates of a token sum to ``scale``."""
        return self.top_k > 1 if self.normalized is None else self.normalized


class Routing(NamedTuple):
    """Experts and gates of a rank's tokens, before any token is dropped."""

    choices_TK: jax.Array  # int32, experts in descending order of their logits, or of their biased scores
    gates_TK: jax.Array  # weights of the experts' outputs, at least float32
    probs_TE: jax.Array  # scores normalized to a sum of 1, at least float32


def route(logits_TE: Float[Array, "T E"], gating: Gating, bias_E: Float[Array, " E"] | None = None) -> Routing:
    """Routes every token to the K experts with the largest logits, or with the largest biased scores.

    By default the gate of a single choice is the expert's probability (Switch); the gates of several choices are
    normalized to sum to 1 (GShard).

    Args:
        logits_TE: output of the router.
        gating: rule that turns logits into gates.
        bias_E: bias added to the scores when experts are chosen, but not to the gates (arXiv 2408.15664); None for no
            bias.
    """
    logits_TE = logits_TE.astype(jnp.promote_types(logits_TE.dtype, jnp.float32))
    is_softmax, top_k = gating.scores == "softmax", gating.top_k
    scores_TE = jax.nn.softmax(logits_TE, axis=-1) if is_softmax else jax.nn.sigmoid(logits_TE)
    # Without a bias, experts are ranked by logits, because scores may underflow to zero and tie.
    ranked_TE = logits_TE if bias_E is None else scores_TE + bias_E.astype(scores_TE.dtype)[None]
    _, choices_TK = largest(lax.stop_gradient(ranked_TE), top_k)
    gates_TK = jnp.take_along_axis(scores_TE, choices_TK, axis=-1)
    if gating.is_normalized and is_softmax:
        gates_TK = gates_TK / jnp.sum(gates_TK, axis=-1, keepdims=True)
    elif gating.is_normalized:
        gates_TK = _shares(jnp.take_along_axis(logits_TE, choices_TK, axis=-1))
    if gating.scale != 1:
        gates_TK = gates_TK * gating.scale
    probs_TE = scores_TE if is_softmax else _shares(logits_TE)
    return Routing(choices_TK, gates_TK, probs_TE)


def _shares(logits: jax.Array) -> jax.Array:
    """Normalizes the logits' sigmoids to sum to 1, in the log domain because all of them may underflow to zero."""
    return jax.nn.softmax(jax.nn.log_sigmoid(logits), axis=-1)


def count_choices(choices_TK: Int[Array, "T K"], counted_TK: Bool[Array, "T K"], num_classes: int) -> Int[Array, " E"]:
    """Counts the (token, choice) pairs of each expert, int32[E], among the pairs selected by ``counted_TK``."""
    is_class_TKE = choices_TK[..., None] == jnp.arange(num_classes, dtype=choices_TK.dtype)[None, None]
    return jnp.sum(is_class_TKE & counted_TK[..., None], axis=(0, 1), dtype=jnp.int32)


def renormalize_gates(gates_TK: Float[Array, "T K"], kept_TK: Bool[Array, "T K"]) -> Float[Array, "T K"]:
    """Divides the gates of a token's kept choices by their sum, as DeepSpeed does; a single choice keeps its gate."""
    if gates_TK.shape[1] == 1:
        return gates_TK
    kept_gates_TK = jnp.where(kept_TK, gates_TK, jnp.zeros_like(gates_TK))
    sum_T1 = jnp.sum(kept_gates_TK, axis=1, keepdims=True)
    return kept_gates_TK / jnp.maximum(sum_T1, jnp.finfo(gates_TK.dtype).eps)


def first_choice_loss(routing: Routing, valid_T: Bool[Array, " T"], num_ranks: int) -> Float[Array, ""]:
    """Computes this rank's term in DeepSpeed's auxiliary loss, which is the mean of a first-choice loss over ranks.

    A rank's loss is E * sum_e (share of its tokens whose first choice is e) * (mean probability of e).

    Args:
        routing: routing of this rank's tokens.
        valid_T: False for padding.
        num_ranks: number of ranks, N.
    """
    probs_TE = routing.probs_TE
    num_classes, tokens = probs_TE.shape[1], jnp.maximum(jnp.sum(valid_T, dtype=jnp.int32), 1).astype(probs_TE.dtype)
    first_E = count_choices(routing.choices_TK[:, :1], valid_T[:, None], num_classes).astype(probs_TE.dtype)
    sum_probs_E = jnp.sum(jnp.where(valid_T[:, None], probs_TE, jnp.zeros_like(probs_TE)), axis=0)
    return num_classes * jnp.sum(first_E * sum_probs_E) / tokens**2 / num_ranks


def balance_loss(
    probs_TE: Float[Array, "T E"],
    valid_T: Bool[Array, " T"],
    popularity_E: Int[Array, " E"],
    num_tokens: jax.Array,
    top_k: int,
) -> Float[Array, ""]:
    """Computes this rank's term of the load-balancing loss.

    The loss is E * sum_e (share of choices of e) * (mean probability of e).

    Popularity is a count and has no gradient. The ranks' terms therefore sum to the loss, and their gradients to its
    gradient, without a collective that would have to be differentiated.

    Args:
        probs_TE: router probabilities of this rank's tokens.
        valid_T: False for padding.
        popularity_E: int32, choices of each expert over all expert ranks.
        num_tokens: int32, tokens over all expert ranks.
        top_k: number of experts per token.
    """
    tokens = jnp.maximum(num_tokens, 1).astype(probs_TE.dtype)
    share_E = popularity_E.astype(probs_TE.dtype) / (tokens * top_k)
    sum_probs_E = jnp.sum(jnp.where(valid_T[:, None], probs_TE, jnp.zeros_like(probs_TE)), axis=0)
    return probs_TE.shape[1] * jnp.sum(share_E * sum_probs_E) / tokens


def z_loss(logits_TE: Float[Array, "T E"], valid_T: Bool[Array, " T"], num_tokens: jax.Array) -> Float[Array, ""]:
    """Computes this rank's term in the z-loss, the mean squared logsumexp of the logits (ST-MoE, arXiv 2202.08906).

    Args:
        logits_TE: output of the router for this rank's tokens.
        valid_T: False for padding.
        num_tokens: int32, tokens over all expert ranks.
    """
    wide_TE = logits_TE.astype(jnp.promote_types(logits_TE.dtype, jnp.float32))
    squares_T = jnp.square(jax.nn.logsumexp(wide_TE, axis=-1))
    total = jnp.sum(jnp.where(valid_T, squares_T, jnp.zeros_like(squares_T)))
    return total / jnp.maximum(num_tokens, 1).astype(total.dtype)


def balancing_step(popularity_LE: Int[Array, "L E"], rate: float, dtype: DTypeLike) -> Float[Array, "L E"]:
    """Computes the change of the router biases after an iteration: +rate for experts below the mean load, -rate above.

    Only the sign of the difference from the mean matters, not its size (arXiv 2408.15664, algorithm 1).

    Args:
        popularity_LE: int32, choices of each expert in the iteration.
        rate: absolute value of the change.
        dtype: dtype of the biases.
    """
    counts_LE = popularity_LE.astype(dtype)
    return rate * jnp.sign(jnp.mean(counts_LE, axis=-1, keepdims=True) - counts_LE)
