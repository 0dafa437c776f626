"""Keys and values of the positions that a text has so far, so that a new token needs one position's work.

Texts of a batch end in the same column: shorter ones begin with padding, which no position sees.

Legend: L layers, B texts, T new columns, S columns of the cache, K heads of keys and values, C channels, V vocabulary.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from swift.experts import ExpertConfig
from swift.models.gpt import GPT, Weights
from swift.models.reference_model import dropless


class KvCache(NamedTuple):
    """Keys and values, whose columns are filled from the first on."""

    key_LBSKC: jax.Array
    value_LBSKC: jax.Array

    @classmethod
    def empty(cls, gpt: GPT, num_texts: int, num_columns: int, dtype: DTypeLike) -> "KvCache":
        """Makes a cache without any."""
        config = gpt.config
        shape = (config.num_layers, num_texts, num_columns, config.kv_heads, config.channels)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def extend(
    gpt: GPT,
    experts: ExpertConfig,
    weights: Weights,
    cache: KvCache,
    tokens_BT: Int[Array, "B T"],
    first: Int[Array, ""],
    padding_B: Int[Array, " B"],
) -> tuple[Float[Array, "B V"], KvCache]:
    """Adds columns to texts.

    Args:
        gpt: architecture.
        experts: settings of the experts; every token is served by all that it is routed to.
        weights: weights of whole experts.
        cache: keys and values of the columns before.
        tokens_BT: int32, tokens of the new columns.
        first: int32, the first new column.
        padding_B: int32, columns of each text that are padding.

    Returns:
        (logits after the last column, the cache with the new columns).
    """
    num_columns = cache.key_LBSKC.shape[2]
    column_T = first + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    position_BT = jnp.maximum(column_T[None] - padding_B[:, None], 0)
    before_S = jnp.arange(num_columns, dtype=jnp.int32)
    sees_BTS = (before_S[None, None] <= column_T[None, :, None]) & (before_S[None, None] >= padding_B[:, None, None])
    x_BTD, moe, num_moe = gpt.embed(weights, tokens_BT, position_BT), dropless(gpt, experts), 0
    valid_BT = jnp.ones(tokens_BT.shape, bool)
    for number, layer in enumerate(gpt.layers(weights, gpt.config.moe_layers)):
        attention = gpt.groups["attention"].module(layer["attention"])
        query, *new = attention.project(x_BTD, position_BT)
        at = [jnp.asarray(index, jnp.int32) for index in (number, 0, first, 0, 0)]
        cache = KvCache(
            *(
                lax.dynamic_update_slice(kept, added[None].astype(kept.dtype), at)
                for kept, added in zip(cache, new, strict=True)
            )
        )
        x_BTD = x_BTD + attention.mix(query, cache.key_LBSKC[number], cache.value_LBSKC[number], sees_BTS)
        x_BTD, _, load = gpt.feed_forward(layer, x_BTD, valid_BT, partial(moe, num_moe))
        num_moe += load is not None
    return gpt.logits(weights, x_BTD[:, -1:])[:, 0], cache
