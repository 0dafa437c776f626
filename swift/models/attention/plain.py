"""Attention as its definition says, with all scores in memory.

Legend: B sequences, T positions of queries, S of keys, H heads, K heads of keys and values, G = H / K query heads for
each of them, C channels of a head.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from swift.models.modules import at_least_float32


def causal_attention(
    query_BTHC: Float[Array, "B T H C"],
    key_BSKC: Float[Array, "B S K C"],
    value_BSKC: Float[Array, "B S K C"],
    sees_BTS: Bool[Array, "#B T S"] | None = None,
) -> Float[Array, "B T H C"]:
    """Mixes the values that each position sees; head h of the queries reads head h // G of keys and values.

    ``jax.nn.dot_product_attention`` computes the same, but its softmax is in float32 even for float64 inputs, and the
    parallel model is tested against the reference model in float64.

    Args:
        query_BTHC: queries.
        key_BSKC: keys.
        value_BSKC: values.
        sees_BTS: whether a position sees another; None: itself and those before it.
    """
    num_sequences, length, heads, channels = query_BTHC.shape
    groups = heads // key_BSKC.shape[2]
    wide, scale = at_least_float32(query_BTHC.dtype), channels**-0.5
    if sees_BTS is None:
        sees_BTS = _before(length)[None]
    if groups == 1:
        scores = jnp.einsum("bthc,bshc->bhts", query_BTHC, key_BSKC, preferred_element_type=wide) * scale
        probs = jax.nn.softmax(jnp.where(sees_BTS[:, None], scores, jnp.finfo(wide).min), axis=-1)
        return jnp.einsum("bhts,bshc->bthc", probs.astype(value_BSKC.dtype), value_BSKC)
    query = query_BTHC.reshape(num_sequences, length, -1, groups, channels)
    scores = jnp.einsum("btkgc,bskc->bkgts", query, key_BSKC, preferred_element_type=wide) * scale
    probs = jax.nn.softmax(jnp.where(sees_BTS[:, None, None], scores, jnp.finfo(wide).min), axis=-1)
    mixed = jnp.einsum("bkgts,bskc->btkgc", probs.astype(value_BSKC.dtype), value_BSKC)
    return mixed.reshape(query_BTHC.shape)


def sees_before(document_BT: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Whether a position sees another: itself, and those before it of the same document."""
    return _before(document_BT.shape[1])[None] & (document_BT[:, :, None] == document_BT[:, None, :])


def _before(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))
