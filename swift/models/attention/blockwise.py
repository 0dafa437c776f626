"""Attention a block of scores at a time, whose memory grows with the number of positions (arXiv 2205.14135).

Positions are cut into blocks, and one loop runs over the pairs of a block of queries and a block of keys that it sees.
The softmax is renormalized from block to block; the backward pass computes the scores again, from what the forward
pass kept of each row: the logarithm of its sum. Pairs that nobody sees are in no loop, so that half of the plain
form's work is saved.

Legend: N blocks, B sequences, K heads of keys and values, G query heads for each of them, T positions of a block of
queries, S of keys, C channels.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from swift.models.attention.plain import causal_attention, sees_before
from swift.models.modules import at_least_float32

BLOCK = 512
"""Positions of a block."""
SMALLEST_TILE, TILE_SCORES = 64, 2**18
"""Least positions of a tile, and most scores of one over all sequences and heads: 1 MiB in float32."""


def blockwise_attention(
    query_BTHC: Float[Array, "B T H C"],
    key_BTKC: Float[Array, "B T K C"],
    value_BTKC: Float[Array, "B T K C"],
    document_BT: Int[Array, "B T"] | None = None,
    block: int | None = None,
) -> Float[Array, "B T H C"]:
    """Mixes the values that each position sees: itself and those before it.

    A sequence of one block is mixed by ``causal_attention``.

    Args:
        query_BTHC: queries.
        key_BTKC: keys.
        value_BTKC: values.
        document_BT: int32, number of the document of each position, which sees no other; None: all are of one.
        block: positions of a block; None: ``BLOCK``.
    """
    num_sequences, length, num_heads, channels = query_BTHC.shape
    block = BLOCK if block is None else block
    if length <= block:
        sees = None if document_BT is None else sees_before(document_BT)
        return causal_attention(query_BTHC, key_BTKC, value_BTKC, sees)
    kv_heads, num_blocks = key_BTKC.shape[2], -(-length // block)

    def blocks(of: jax.Array) -> jax.Array:
        """Cuts ``[B, T, ...]`` into ``[N, B, T, ...]``; keys of the padding are after all queries."""
        padded = jnp.pad(of, [(0, 0), (0, num_blocks * block - length), *[(0, 0)] * (of.ndim - 2)])
        return jnp.moveaxis(padded.reshape(num_sequences, num_blocks, block, *of.shape[2:]), 1, 0)

    query = blocks(query_BTHC).reshape(num_blocks, num_sequences, block, kv_heads, -1, channels)
    inputs = _Inputs(
        query.transpose(0, 1, 3, 4, 2, 5),
        blocks(key_BTKC).transpose(0, 1, 3, 2, 4),
        blocks(value_BTKC).transpose(0, 1, 3, 2, 4),
    )
    document = None if document_BT is None else blocks(document_BT)
    mixed = _mix(inputs, document).transpose(1, 0, 4, 2, 3, 5)
    return mixed.reshape(num_sequences, num_blocks * block, num_heads, channels)[:, :length]


def tiled_attention(
    query_BTHC: Float[Array, "B T H C"],
    key_BTKC: Float[Array, "B T K C"],
    value_BTKC: Float[Array, "B T K C"],
    document_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H C"]:
    """Mixes as ``blockwise_attention`` does, in blocks whose scores stay in a CPU's caches.

    With many sequences and heads, blocks of 512 positions, or all scores at once, go through memory several times.
    """
    num_sequences, length, num_heads, _ = query_BTHC.shape
    tile = BLOCK
    while tile > SMALLEST_TILE and num_sequences * num_heads * tile**2 > TILE_SCORES:
        tile //= 2
    num_tiles = -(-length // tile)
    if num_tiles * (num_tiles + 1) // 2 * tile**2 >= length**2:  # padding is more than what nobody sees
        tile = length
    return blockwise_attention(query_BTHC, key_BTKC, value_BTKC, document_BT, tile)


class _Inputs(NamedTuple):
    query_NBKGTC: jax.Array
    key_NBKSC: jax.Array
    value_NBKSC: jax.Array


def _pairs(num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """The pairs (block of queries, block of keys), a block itself before those that it sees beside itself."""
    pairs = [(here, there) for here in range(num_blocks) for there in range(here, -1, -1)]
    return np.array([here for here, _ in pairs], np.int32), np.array([there for _, there in pairs], np.int32)


def _take(arrays: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), arrays)


def _put(arrays: Any, index: jax.Array, rows: Any) -> Any:
    return jax.tree.map(lambda leaf, row: lax.dynamic_update_index_in_dim(leaf, row, index, 0), arrays, rows)


def _scores(inputs: _Inputs, document: jax.Array | None, here: jax.Array, there: jax.Array) -> jax.Array:
    """Scores [B, K, G, T, S] of a pair of blocks, the least number where a position is not seen."""
    query, key = _take(inputs.query_NBKGTC, here), _take(inputs.key_NBKSC, there)
    wide, (length, channels) = at_least_float32(query.dtype), query.shape[-2:]
    scores = jnp.einsum("bkgtc,bksc->bkgts", query, key, preferred_element_type=wide) * channels**-0.5
    position = jnp.arange(length, dtype=jnp.int32)
    sees: Bool[Array, "#B 1 1 T S"] = ((here * length + position)[:, None] >= (there * length + position)[None, :])[
        None, None, None
    ]
    if document is not None:
        of_query, of_key = _take(document, here), _take(document, there)
        sees = sees & (of_query[:, :, None] == of_key[:, None, :])[:, None, None]
    return jnp.where(sees, scores, jnp.finfo(wide).min)


@jax.custom_vjp
def _mix(inputs: _Inputs, document: jax.Array | None) -> jax.Array:
    """Mixes values: [N, B, K, G, T, C], in the dtype of the values."""
    return _mix_forward(inputs, document)[0]


def _mix_forward(inputs: _Inputs, document: jax.Array | None) -> tuple[jax.Array, tuple]:
    query, wide = inputs.query_NBKGTC, at_least_float32(inputs.query_NBKGTC.dtype)
    lowest = jnp.full(query.shape[:-1], jnp.finfo(wide).min, wide)
    start = jnp.zeros(query.shape, wide), lowest, jnp.zeros_like(lowest)

    def step(totals: Any, pair: Any) -> tuple[Any, None]:
        here, there = pair
        mixed, highest, total = _take(totals, here)
        scores, value = _scores(inputs, document, here, there), _take(inputs.value_NBKSC, there)
        top = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights, fade = jnp.exp(scores - top[..., None]), jnp.exp(highest - top)
        more = jnp.einsum("bkgts,bksc->bkgtc", weights.astype(value.dtype), value, preferred_element_type=wide)
        rows = mixed * fade[..., None] + more, top, total * fade + jnp.sum(weights, axis=-1)
        return _put(totals, here, rows), None

    (mixed, highest, total), _ = lax.scan(step, start, _pairs(len(query)))
    mixed = (mixed / total[..., None]).astype(query.dtype)
    return mixed, (inputs, document, mixed, highest + jnp.log(total))


def _mix_backward(kept: tuple, d_mixed: jax.Array) -> tuple[_Inputs, None]:
    inputs, document, mixed, log_total = kept
    wide, channels = log_total.dtype, mixed.shape[-1]
    # What the softmax's own gradient subtracts: the mean of the cotangents of a row's weights.
    mean = jnp.sum(mixed.astype(wide) * d_mixed.astype(wide), axis=-1)
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide), inputs)

    def step(totals: Any, pair: Any) -> tuple[Any, None]:
        here, there = pair
        query, dy = _take((inputs.query_NBKGTC, d_mixed), here)
        key, value = _take((inputs.key_NBKSC, inputs.value_NBKSC), there)
        weights = jnp.exp(_scores(inputs, document, here, there) - _take(log_total, here)[..., None])
        d_weights = jnp.einsum("bkgtc,bksc->bkgts", dy, value, preferred_element_type=wide)
        d_scores = weights * (d_weights - _take(mean, here)[..., None]) * channels**-0.5
        narrow = d_scores.astype(query.dtype)
        d_query = jnp.einsum("bkgts,bksc->bkgtc", narrow, key, preferred_element_type=wide)
        d_key = jnp.einsum("bkgts,bkgtc->bksc", narrow, query, preferred_element_type=wide)
        d_value = jnp.einsum("bkgts,bkgtc->bksc", weights.astype(dy.dtype), dy, preferred_element_type=wide)
        blocks = _Inputs(here, there, there)
        before = [_take(total, at) for total, at in zip(totals, blocks, strict=True)]
        added = [old + more for old, more in zip(before, (d_query, d_key, d_value), strict=True)]
        return _Inputs(*(_put(*of) for of in zip(totals, blocks, added, strict=True))), None

    totals, _ = lax.scan(step, start, _pairs(len(d_mixed)))
    return jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), totals, inputs), None


_mix.defvjp(_mix_forward, _mix_backward)
