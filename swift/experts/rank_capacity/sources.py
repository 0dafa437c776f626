"""Sources of a slot's tokens: how many of them come from each rank.

A source's tokens of an expert are divided among the slots in proportion to what each slot gets of the expert, so that
what one rank sends to another is as even as the routing allows. Sums are exact in both directions: over the slots of
the expert, and over the sources. Proportions are rounded down first; the rest, less than a token for each slot, is
dealt out in rounds, a part of each source's rest at a time.

Legend: N ranks as sources, E experts, M slots of all ranks in the order of their experts, R rounds.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from swift.experts.rank_capacity.balanced_flow import Holders
from swift.experts.rank_capacity.fixed_point import ONE, fraction_of, times

_ROUNDS = 4


def by_source(
    counts_NE: Int[Array, "N E"], tokens_NS: Int[Array, "N S"], holders: Holders, most: int = ONE - 1
) -> Int[Array, "N M"]:
    """Divides the tokens of every slot among their sources.

    Args:
        counts_NE: int32, (token, choice) pairs of every source for each expert; their sum is below 2^30.
        tokens_NS: int32, pairs of each slot; those of an expert's slots sum to its pairs.
        holders: the slots.
        most: upper bound of the pairs of all sources, below 2^30.

    Returns:
        int32[N, M]: pairs of every source for every slot, the slots in order of their ranks.
    """
    order = holders.slot_M
    class_M, tokens_M = holders.class_NS.reshape(-1)[order], tokens_NS.reshape(-1)[order]
    counts_NM = counts_NE[:, class_M]
    of_class_M = jnp.sum(counts_NM, axis=0, dtype=jnp.int32)
    part_M = fraction_of(tokens_M, jnp.maximum(of_class_M, 1), most)
    share_M = jnp.where(tokens_M == of_class_M, ONE, part_M)
    floor_NM = times(counts_NM, share_M[None]).whole

    end_M = _up_to(tokens_M - jnp.sum(floor_NM, axis=0, dtype=jnp.int32), holders)
    start_M = jnp.where(jnp.arange(end_M.size, dtype=jnp.int32) == holders.first_M, 0, jnp.roll(end_M, 1))
    left_NM = counts_NM - _of_class(floor_NM, holders)
    edges = [left_NM * part // _ROUNDS for part in range(_ROUNDS + 1)]
    parts_RNM = jnp.stack([high - low for low, high in pairwise(edges)])
    flat_XM = parts_RNM.reshape(-1, class_M.size)
    last_XM = jnp.cumsum(flat_XM, axis=0, dtype=jnp.int32)
    dealt_XM = jnp.minimum(last_XM, end_M[None]) - jnp.maximum(last_XM - flat_XM, start_M[None])
    dealt_NM = jnp.sum(jnp.maximum(dealt_XM, 0).reshape(parts_RNM.shape), axis=0, dtype=jnp.int32)
    return (floor_NM + dealt_NM)[:, holders.position_M]


def _up_to(values_M: jax.Array, holders: Holders) -> jax.Array:
    """Sums over the slots of the same expert, for every slot up to and including itself."""
    sums_M = jnp.cumsum(values_M, dtype=jnp.int32)
    return sums_M - (sums_M - values_M)[holders.first_M]


def _of_class(values_NM: jax.Array, holders: Holders) -> jax.Array:
    """Sums over all slots of the same expert, for every source and slot."""
    sums_NM = jnp.cumsum(values_NM, axis=1, dtype=jnp.int32)
    return sums_NM[:, holders.last_M] - (sums_NM - values_NM)[:, holders.first_M]
