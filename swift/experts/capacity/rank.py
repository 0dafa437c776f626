"""Capacity by rank: which tokens are served if the slots of a rank share its rows, and in which rows.

Rule: the tokens of every expert and source rank are split over the slots that hold the expert, either by a balanced
flow (``balanced_flow``, then ``by_source``) or, with ``RankCapacity.spare_rounds``, in rounds (``split_tokens``). With
rounds, if a source has more tokens for a rank than fit into the buffer between the two, its tokens for every slot of
that rank are cut in proportion: *buffer full*. If a rank would receive more tokens than it has rows, the tokens of
every source and slot are cut in proportion: *rank full*. Of each expert's tokens, a source thus keeps a certain number:
the first ones in token order, then choice order. The rule is local to a micro-batch, like capacity by slot, and all
ranks compute the outcome from the counts alone, before any token is sent.

Rows: a source rank sends every rank the rows for that rank's first slot, then the rows for its second slot, and so on.
The receiver sorts the rows of all sources by slot. Both sides derive the layout from the counts, so nothing but the
rows is exchanged.

Legend: T tokens, K choices, A = T * K pairs, N ranks as sources, D the same ranks as destinations, S slots of a rank,
M = N * S, E experts, P rows of the grouped matmul.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from swift.experts.capacity.balanced_flow import ReplicaMap, balance, shift_overflow
from swift.experts.capacity.slot import Pairs
from swift.experts.capacity.token_exchange import Ends
from swift.experts.capacity.token_split import (
    BITS,
    ONE,
    RowLimits,
    Slots,
    by_source,
    divide_exactly,
    split_tokens,
    times,
)
from swift.experts.config import ExpertConfig, RankCapacity
from swift.experts.grouped_matmul import Groups


class TokenCounts(NamedTuple):
    """Numbers of (token, choice) pairs that are served and dropped, by source rank."""

    kept_NDS: jax.Array  # int32, by slot
    dropped_NE: jax.Array  # int32, by expert
    overflowed_NE: jax.Array  # int32, dropped because a buffer was full


def admit_tokens(
    config: ExpertConfig, counts_NE: Int[Array, "N E"], placement_NS: Int[Array, "N S"], local_tokens: int
) -> TokenCounts:
    """Splits the tokens of all sources over the slots, and drops those for which a buffer or rank has no row.

    Args:
        config: settings of the experts, with capacity by rank.
        counts_NE: int32, (token, choice) pairs of every source rank for each expert.
        placement_NS: int32, the expert in every slot, in any order.
        local_tokens: number of tokens of a source rank.
    """
    (num_ranks, num_slots), capacity = placement_NS.shape, config.capacity
    assert isinstance(capacity, RankCapacity)
    shape = config, local_tokens, num_ranks
    rooms = RowLimits(capacity.rows_per_rank(*shape), capacity.rows_per_buffer(*shape))
    slots, most_pairs = Slots.of(placement_NS, config.num_classes), config.most_pairs(local_tokens)

    if capacity.spare_rounds is None:
        holders = ReplicaMap.of(placement_NS)
        tokens_NS = shift_overflow(balance(jnp.sum(counts_NE, axis=0, dtype=jnp.int32), holders), rooms.rank, holders)
        split_NM = by_source(counts_NE, tokens_NS, holders, num_ranks * most_pairs)
        sent_NDS = split_NM.reshape(num_ranks, num_ranks, num_slots)
        most_sent = most_pairs
    else:
        wanted_NM = split_tokens(counts_NE, placement_NS, slots, rooms, most_pairs, capacity.spare_rounds)
        sent_NDS = in_proportion(wanted_NM.reshape(num_ranks, num_ranks, num_slots), rooms.buffer, most_pairs)
        most_sent = min(rooms.buffer, most_pairs)
    by_rank = sent_NDS.swapaxes(0, 1).reshape(num_ranks, -1)
    admitted = in_proportion(by_rank, rooms.rank, num_ranks * most_sent)
    kept_NDS = admitted.reshape(num_ranks, num_ranks, num_slots).swapaxes(0, 1)

    def by_class(pairs_NDS: jax.Array) -> jax.Array:
        return jax.vmap(slots.by_class)(pairs_NDS.reshape(num_ranks, -1))

    sent_NE = by_class(sent_NDS)
    return TokenCounts(kept_NDS, counts_NE - by_class(kept_NDS), counts_NE - sent_NE)


def in_proportion(wanted_XY: Int[Array, "... Y"], room: int, most: int) -> Int[Array, "... Y"]:
    """Scales down the counts of every row whose sum exceeds ``room``, so that they sum to exactly ``room``.

    All counts of a row are scaled in proportion. Other rows stay unchanged.

    Args:
        wanted_XY: int32, nonnegative counts; the last dim is summed.
        room: maximum sum of a row.
        most: upper bound of the sums in ``wanted_XY``, below 2^30.
    """
    if most <= room:
        return wanted_XY
    assert most < 1 << BITS, "the sums have to stay below 2^30"
    up_to_XY = jnp.cumsum(wanted_XY, axis=-1, dtype=jnp.int32)
    sum_X1 = up_to_XY[..., -1:]
    # Rounded up, because rounding down would lose the last row; the excess is too small to add a row to a sum below
    # 2^30.
    part_X1 = divide_exactly(jnp.full_like(sum_X1, room), jnp.maximum(sum_X1, room + 1), most) + 1
    kept_XY = times(up_to_XY, jnp.where(sum_X1 > room, part_X1, ONE)).whole
    return jnp.diff(kept_XY, axis=-1, prepend=jnp.zeros_like(kept_XY[..., :1]))


def sent_pairs(pairs: Pairs, kept_NS: Int[Array, "N S"], slots: Slots) -> Ends:
    """Computes each pair's destination rank, and its position among the rows for that rank.

    Args:
        pairs: (token, choice) pairs of this rank.
        kept_NS: int32, number of pairs that this rank sends to every slot.
        slots: slots of all ranks.
    """
    num_ranks, num_pairs = kept_NS.shape[0], pairs.class_A.size
    is_slot_AM, first_M = _slots_of_pairs(pairs, kept_NS, slots)
    row_NS = jnp.cumsum(kept_NS, axis=1, dtype=jnp.int32) - kept_NS
    row_M = (row_NS + num_pairs * jnp.arange(num_ranks, dtype=jnp.int32)[:, None]).reshape(-1)
    offset_A = jnp.sum(jnp.where(is_slot_AM, (row_M - first_M)[None], 0), axis=1, dtype=jnp.int32)
    row_A = offset_A + pairs.position_A
    is_sent_A = jnp.any(is_slot_AM, axis=1)
    return Ends(jnp.where(is_sent_A, row_A // num_pairs, 0), jnp.where(is_sent_A, row_A % num_pairs, -1))


def slots_of_pairs(pairs: Pairs, kept_NS: Int[Array, "N S"], slots: Slots) -> Int[Array, " A"]:
    """Computes the slot that serves each pair, numbered over all ranks; -1 for a dropped pair.

    Args:
        pairs: (token, choice) pairs of this rank.
        kept_NS: int32, number of pairs that this rank sends to every slot.
        slots: slots of all ranks.
    """
    is_slot_AM, _ = _slots_of_pairs(pairs, kept_NS, slots)
    number_M = jnp.arange(1, slots.class_M.size + 1, dtype=jnp.int32)
    return jnp.sum(jnp.where(is_slot_AM, number_M[None], 0), axis=1, dtype=jnp.int32) - 1


def _slots_of_pairs(pairs: Pairs, kept_NS: jax.Array, slots: Slots) -> tuple[jax.Array, jax.Array]:
    """Returns (whether a slot serves a pair, bool[A, M]; position of a slot's first pair among its expert's pairs)."""
    kept_M = kept_NS.reshape(-1)
    last_M = slots.up_to(kept_M)  # end of the slot's range among the expert's pairs, in token order
    first_M = last_M - kept_M
    position_A1, class_A1 = pairs.position_A[:, None], pairs.class_A[:, None]
    is_slot_AM = (class_A1 == slots.class_M[None]) & (position_A1 >= first_M[None]) & (position_A1 < last_M[None])
    return is_slot_AM & pairs.valid_A[:, None], first_M


def slot_groups(kept_NS: Int[Array, "N S"], block: int) -> Groups:
    """Lays out the slots' rows for the grouped matmul; each slot starts at the beginning of a block.

    Args:
        kept_NS: int32, pairs that every source rank sends to this rank's slots.
        block: rows of a block.
    """
    in_slot_S = jnp.sum(kept_NS, axis=0, dtype=jnp.int32)
    size_S = (in_slot_S + (block - 1)) // block * block
    return Groups(jnp.cumsum(size_S, dtype=jnp.int32) - size_S, size_S)


def received_pairs(kept_NS: Int[Array, "N S"], groups: Groups, num_rows: int) -> Ends:
    """Computes the sender of each row in the grouped matmul, and the row's position among that sender's rows.

    Args:
        kept_NS: int32, rows that every source rank sends to this rank's slots.
        groups: row range of each slot.
        num_rows: number of rows of the grouped matmul, P, at least the end of the last slot's range.
    """
    num_ranks = kept_NS.shape[0]
    first_NS = groups.start_S[None] + jnp.cumsum(kept_NS, axis=0, dtype=jnp.int32) - kept_NS
    position_NS = jnp.cumsum(kept_NS, axis=1, dtype=jnp.int32) - kept_NS

    row_P11 = jnp.arange(num_rows, dtype=jnp.int32)[:, None, None]
    is_from_PNS = (row_P11 >= first_NS[None]) & (row_P11 < (first_NS + kept_NS)[None])
    rank_N1 = jnp.arange(num_ranks, dtype=jnp.int32)[:, None]
    peer_P, offset_P = (
        jnp.sum(jnp.where(is_from_PNS, values_NS[None], 0), axis=(1, 2), dtype=jnp.int32)
        for values_NS in (jnp.broadcast_to(rank_N1, kept_NS.shape), position_NS - first_NS)
    )
    position_P = jnp.where(jnp.any(is_from_PNS, axis=(1, 2)), offset_P + row_P11[:, 0, 0], -1)
    return Ends(peer_P, position_P)
