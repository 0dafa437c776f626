"""Row layout of (token, choice) pairs, in what ranks send each other and in the grouped matmul of a rank.

A source rank sends every rank the rows for that rank's first slot, then those for the second, and so on. The receiver
puts the rows of all sources in order by slot. Both sides derive the layout from the counts, so only rows are exchanged.

Legend: T tokens, K choices, A = T * K pairs, N ranks, S slots of a rank, M = N * S, P rows of the grouped matmul.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from swift.experts.grouped_matmul.groups import Groups
from swift.experts.rank_capacity.row_exchange import Ends
from swift.experts.rank_capacity.token_split import Slots
from swift.experts.slot_capacity import Pairs


def sent_pairs(pairs: Pairs, kept_NS: Int[Array, "N S"], slots: Slots) -> Ends:
    """Finds the rank that every pair goes to, and its position among the rows for that rank.

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
    """Finds the slot, of those of all ranks, that serves every pair; -1 for a pair that none does.

    Args:
        pairs: (token, choice) pairs of this rank.
        kept_NS: int32, number of pairs that this rank sends to every slot.
        slots: slots of all ranks.
    """
    is_slot_AM, _ = _slots_of_pairs(pairs, kept_NS, slots)
    number_M = jnp.arange(1, slots.class_M.size + 1, dtype=jnp.int32)
    return jnp.sum(jnp.where(is_slot_AM, number_M[None], 0), axis=1, dtype=jnp.int32) - 1


def _slots_of_pairs(pairs: Pairs, kept_NS: jax.Array, slots: Slots) -> tuple[jax.Array, jax.Array]:
    """Whether a slot serves a pair, bool[A, M], and the position of each slot's first pair among its expert's."""
    kept_M = kept_NS.reshape(-1)
    last_M = slots.up_to(kept_M)  # end of the slot's range among the expert's pairs, in token order
    first_M = last_M - kept_M
    position_A1, class_A1 = pairs.position_A[:, None], pairs.class_A[:, None]
    is_slot_AM = (class_A1 == slots.class_M[None]) & (position_A1 >= first_M[None]) & (position_A1 < last_M[None])
    return is_slot_AM & pairs.valid_A[:, None], first_M


def slot_groups(kept_NS: Int[Array, "N S"], block: int) -> Groups:
    """Lays out the slots' rows in the grouped matmul, each slot starting at a block.

    Args:
        kept_NS: int32, pairs that every source rank sends to this rank's slots.
        block: rows of a block.
    """
    in_slot_S = jnp.sum(kept_NS, axis=0, dtype=jnp.int32)
    size_S = (in_slot_S + (block - 1)) // block * block
    return Groups(jnp.cumsum(size_S, dtype=jnp.int32) - size_S, size_S)


def received_pairs(kept_NS: Int[Array, "N S"], groups: Groups, num_rows: int) -> Ends:
    """Finds for each row of the grouped matmul the rank that sends it, and its position among that rank's rows.

    Args:
        kept_NS: int32, rows that every source rank sends to this rank's slots.
        groups: rows of each slot.
        num_rows: rows of the grouped matmul, P; enough for all rows in blocks.
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
