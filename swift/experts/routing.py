"""Routing: which classes a token goes to, with what weight, and the loss that keeps the classes balanced.

Legend: T tokens, E classes, K choices of a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Routing(NamedTuple):
    """Where the tokens of a rank want to go."""

    choices_TK: jax.Array  # int32, classes, the likeliest first
    gates_TK: jax.Array  # weights of the experts' outputs, at least float32
    probs_TE: jax.Array  # the router's softmax, at least float32


def route(logits_TE: jax.Array, top_k: int) -> Routing:
    """Sends every token to its ``top_k`` likeliest classes.

    With one choice its gate is the class's probability (Switch); with several, their probabilities divided by their
    sum (GShard).
    """
    logits_TE = logits_TE.astype(jnp.promote_types(logits_TE.dtype, jnp.float32))
    probs_TE = jax.nn.softmax(logits_TE, axis=-1)
    # The logits tell which class is likelier also where probabilities underflow to zero and would all be level.
    _, choices_TK = lax.top_k(lax.stop_gradient(logits_TE), top_k)
    gates_TK = jnp.take_along_axis(probs_TE, choices_TK, axis=-1)
    if top_k > 1:
        gates_TK = gates_TK / jnp.sum(gates_TK, axis=-1, keepdims=True)
    return Routing(choices_TK, gates_TK, probs_TE)


def count_choices(choices_TK: jax.Array, counted_TK: jax.Array, num_classes: int) -> jax.Array:
    """How many of the ``counted`` (token, choice) pairs go to each class, int32[E]."""
    is_class_TKE = choices_TK[..., None] == jnp.arange(num_classes, dtype=choices_TK.dtype)[None, None]
    return jnp.sum(is_class_TKE & counted_TK[..., None], axis=(0, 1), dtype=jnp.int32)


def balance_loss(
    probs_TE: jax.Array, valid_T: jax.Array, popularity_E: jax.Array, num_tokens: jax.Array, top_k: int
) -> jax.Array:
    """This rank's part of the auxiliary loss E * sum over e of (share of choices e) * (mean probability of e).

    The popularity is a count and has no gradient, so the parts of all ranks add up to the loss, and so do their
    gradients, without a collective to differentiate.

    Args:
        probs_TE: probabilities of this rank's tokens.
        valid_T: False for padding.
        popularity_E: choices of each class over all expert ranks.
        num_tokens: tokens over all expert ranks.
        top_k: choices of a token.
    """
    tokens = jnp.maximum(num_tokens, 1).astype(probs_TE.dtype)
    share_E = popularity_E.astype(probs_TE.dtype) / (tokens * top_k)
    sum_probs_E = jnp.sum(jnp.where(valid_T[:, None], probs_TE, jnp.zeros_like(probs_TE)), axis=0)
    return probs_TE.shape[1] * jnp.sum(share_E * sum_probs_E) / tokens
