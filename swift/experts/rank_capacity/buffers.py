"""Row layout of tokens, in what ranks send each other and in the grouped matmul of a rank.

A source rank sends every rank the rows for that rank's first slot, then those for the second, and so on. The receiver
puts the rows of all sources in order by slot. Both sides derive the layout from the counts, so only rows are exchanged.

Legend: T tokens, K choices, A = T * K pairs, N ranks, S slots of a rank, M = N * S, P rows of the grouped matmul.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from swift.experts.grouped_matmul import Groups
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
    kept_M = kept_NS.reshape(-1)
    last_M = slots.up_to(kept_M)  # end of the slot's range among the expert's pairs, in token order
    first_M = last_M - kept_M
    row_NS = jnp.cumsum(kept_NS, axis=1, dtype=jnp.int32) - kept_NS
    row_M = (row_NS + num_pairs * jnp.arange(num_ranks, dtype=jnp.int32)[:, None]).reshape(-1)

    position_A1, class_A1 = pairs.position_A[:, None], pairs.class_A[:, None]
    is_slot_AM = (class_A1 == slots.class_M[None]) & (position_A1 >= first_M[None]) & (position_A1 < last_M[None])
    is_slot_AM = is_slot_AM & pairs.valid_A[:, None]
    offset_A = jnp.sum(jnp.where(is_slot_AM, (row_M - first_M)[None], 0), axis=1, dtype=jnp.int32)
    row_A = offset_A + pairs.position_A
    is_sent_A = jnp.any(is_slot_AM, axis=1)
    return Ends(jnp.where(is_sent_A, row_A // num_pairs, 0), jnp.where(is_sent_A, row_A % num_pairs, -1))


def received_rows(kept_NS: Int[Array, "N S"], num_rows: int, block: int) -> tuple[Ends, Groups]:
    """Lays out this rank's received rows by slot, each slot starting at a block.

    Args:
        kept_NS: int32, rows that every source rank sends to this rank's slots.
        num_rows: rows of the grouped matmul, P; enough for all rows in blocks.
        block: rows of a block.

    Returns:
        (for each row of the matmul the rank that sends it, and its position among that rank's rows; the rows of each
        slot).
    """
    num_ranks = kept_NS.shape[0]
    in_slot_S = jnp.sum(kept_NS, axis=0, dtype=jnp.int32)
    size_S = (in_slot_S + (block - 1)) // block * block
    start_S = jnp.cumsum(size_S, dtype=jnp.int32) - size_S
    first_NS = start_S[None] + jnp.cumsum(kept_NS, axis=0, dtype=jnp.int32) - kept_NS
    position_NS = jnp.cumsum(kept_NS, axis=1, dtype=jnp.int32) - kept_NS

    row_P11 = jnp.arange(num_rows, dtype=jnp.int32)[:, None, None]
    is_from_PNS = (row_P11 >= first_NS[None]) & (row_P11 < (first_NS + kept_NS)[None])
    rank_N1 = jnp.arange(num_ranks, dtype=jnp.int32)[:, None]
    peer_P, offset_P = (
        jnp.sum(jnp.where(is_from_PNS, values_NS[None], 0), axis=(1, 2), dtype=jnp.int32)
        for values_NS in (jnp.broadcast_to(rank_N1, kept_NS.shape), position_NS - first_NS)
    )
    position_P = jnp.where(jnp.any(is_from_PNS, axis=(1, 2)), offset_P + row_P11[:, 0, 0], -1)
    return Ends(peer_P, position_P), Groups(start_S, size_S)
