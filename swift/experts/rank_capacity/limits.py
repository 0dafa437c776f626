"""Capacity by rank: which tokens are served where the slots of a rank share its rows.

The rule: the tokens of every expert and source rank are split over the slots that hold the expert, by a balanced flow
(``balanced_flow``, ``sources``) or, with ``ExpertConfig.spare_rounds``, in rounds (``token_split``). With rounds, a
source that has more for a rank than the buffer between the two holds cuts every slot of that rank in proportion:
*buffer full*. Where a rank receives more than its rows, every source and slot loses in proportion: *rank full*. A
source thus keeps a certain number of an expert's tokens, the first in token order, then choice order. The rule is local
and per micro-batch, like capacity by slot, and all ranks know the outcome from the counts alone, before a token moves.

Legend: N ranks as sources, D the same ranks as destinations, S slots of a rank, E experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from swift.experts.config import ExpertConfig
from swift.experts.rank_capacity.balanced_flow import Holders, balance, relieve
from swift.experts.rank_capacity.fixed_point import BITS, ONE, fraction_of, times
from swift.experts.rank_capacity.sources import by_source
from swift.experts.rank_capacity.token_split import Rooms, Slots, split_tokens


class Served(NamedTuple):
    """Counts of the (token, choice) pairs of every source rank that are served, and of those that are dropped."""

    kept_NDS: jax.Array  # int32, by slot
    dropped_NE: jax.Array  # int32, by expert
    overflowed_NE: jax.Array  # int32, dropped because a buffer was full


def serve(
    config: ExpertConfig, counts_NE: Int[Array, "N E"], placement_NS: Int[Array, "N S"], local_tokens: int
) -> Served:
    """Splits the tokens of all sources over the slots and drops those that do not fit.

    Args:
        config: settings of the experts, with capacity by rank.
        counts_NE: int32, pairs of every source rank for each expert.
        placement_NS: int32, the expert in every slot, in any order.
        local_tokens: tokens of a source rank.
    """
    num_ranks, num_slots = placement_NS.shape
    rooms = Rooms(config.rows_per_rank(local_tokens, num_ranks), config.rows_per_buffer(local_tokens, num_ranks))
    slots, most_pairs = Slots.of(placement_NS, config.num_classes), local_tokens * config.top_k

    if config.spare_rounds is None:
        holders = Holders.of(placement_NS)
        tokens_NS = relieve(balance(jnp.sum(counts_NE, axis=0, dtype=jnp.int32), holders), rooms.rank, holders)
        split_NM = by_source(counts_NE, tokens_NS, holders, num_ranks * most_pairs)
        sent_NDS = split_NM.reshape(num_ranks, num_ranks, num_slots)
        most_sent = most_pairs
    else:
        wanted_NM = split_tokens(counts_NE, placement_NS, slots, rooms, most_pairs, config.spare_rounds)
        sent_NDS = in_proportion(wanted_NM.reshape(num_ranks, num_ranks, num_slots), rooms.buffer, most_pairs)
        most_sent = min(rooms.buffer, most_pairs)
    by_rank = sent_NDS.swapaxes(0, 1).reshape(num_ranks, -1)
    kept = in_proportion(by_rank, rooms.rank, num_ranks * most_sent)
    kept_NDS = kept.reshape(num_ranks, num_ranks, num_slots).swapaxes(0, 1)

    def by_class(pairs_NDS: jax.Array) -> jax.Array:
        return jax.vmap(slots.by_class)(pairs_NDS.reshape(num_ranks, -1))

    sent_NE = by_class(sent_NDS)
    return Served(kept_NDS, counts_NE - by_class(kept_NDS), counts_NE - sent_NE)


def in_proportion(wanted_XY: Int[Array, "... Y"], room: int, most: int) -> Int[Array, "... Y"]:
    """Scales down every ``[..., Y]`` whose sum exceeds ``room``, in proportion; leaves the others unchanged.

    The result of scaling down sums to ``room`` exactly.

    Args:
        wanted_XY: int32, nonnegative counts.
        room: largest sum allowed.
        most: upper bound of all sums, below 2^30.
    """
    if most <= room:
        return wanted_XY
    assert most < 1 << BITS, "the sums have to stay below 2^30"
    up_to_XY = jnp.cumsum(wanted_XY, axis=-1, dtype=jnp.int32)
    sum_X1 = up_to_XY[..., -1:]
    # Rounded up: rounding down would lose the last one, and the excess is too small to add one to a sum below 2^30.
    part_X1 = fraction_of(jnp.full_like(sum_X1, room), jnp.maximum(sum_X1, room + 1), most) + 1
    kept_XY = times(up_to_XY, jnp.where(sum_X1 > room, part_X1, ONE)).whole
    return jnp.diff(kept_XY, axis=-1, prepend=jnp.zeros_like(kept_XY[..., :1]))
