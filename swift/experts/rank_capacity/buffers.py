"""Row layout of tokens, in the buffers of the exchange and in the grouped matmul of a rank.

A source rank sends every rank one buffer: the rows for that rank's first slot, then those for the second, and so on;
the rest is empty. The receiver gathers the rows of all buffers by slot. Both sides derive the layout from the counts,
so only rows are exchanged.

Legend: T tokens, K choices, A = T * K pairs, E experts, N ranks, S slots of a rank, M = N * S, Q rows of a buffer,
P rows of the grouped matmul.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from swift.experts.grouped_matmul import Groups
from swift.experts.rank_capacity.token_split import Slots
from swift.experts.slot_capacity import Pairs, inverse_rows


class Gathered(NamedTuple):
    """Positions of a rank's received rows in the grouped matmul."""

    row_of_received_X: jax.Array  # int32, X = N * Q; P where the row is empty
    received_of_row_P: jax.Array  # int32, N * Q where the row is empty
    groups: Groups


def rows_in_buffers(pairs: Pairs, kept_NS: Int[Array, "N S"], slots: Slots, buffer_rows: int) -> Int[Array, " A"]:
    """Finds the row of every pair among the buffers for all ranks, int32[A]; N * Q for dropped pairs and padding.

    Args:
        pairs: (token, choice) pairs of this rank.
        kept_NS: int32, number of pairs that this rank sends to every slot.
        slots: slots of all ranks.
        buffer_rows: rows of a buffer, Q.
    """
    num_ranks = kept_NS.shape[0]
    kept_M = kept_NS.reshape(-1)
    last_M = slots.up_to(kept_M)  # end of the slot's range among the expert's pairs, in token order
    first_M = last_M - kept_M
    row_NS = jnp.cumsum(kept_NS, axis=1, dtype=jnp.int32) - kept_NS
    row_M = (row_NS + buffer_rows * jnp.arange(num_ranks, dtype=jnp.int32)[:, None]).reshape(-1)

    position_A1, class_A1 = pairs.position_A[:, None], pairs.class_A[:, None]
    is_slot_AM = (class_A1 == slots.class_M[None]) & (position_A1 >= first_M[None]) & (position_A1 < last_M[None])
    is_slot_AM = is_slot_AM & pairs.valid_A[:, None]
    none = num_ranks * buffer_rows
    offset_A = jnp.sum(jnp.where(is_slot_AM, (row_M - first_M - none)[None], 0), axis=1, dtype=jnp.int32)
    return jnp.where(jnp.any(is_slot_AM, axis=1), offset_A + pairs.position_A, 0) + none


def gather_by_slot(kept_NS: Int[Array, "N S"], buffer_rows: int, num_rows: int, block: int) -> Gathered:
    """Lays out this rank's received rows by slot, each slot starting at a block.

    Args:
        kept_NS: int32, rows that every source rank sends to this rank's slots.
        buffer_rows: rows of a buffer, Q.
        num_rows: rows of the grouped matmul, P; enough for all rows in blocks.
        block: rows of a block.
    """
    in_slot_S = jnp.sum(kept_NS, axis=0, dtype=jnp.int32)
    size_S = (in_slot_S + (block - 1)) // block * block
    start_S = jnp.cumsum(size_S, dtype=jnp.int32) - size_S
    row_NS = start_S[None] + jnp.cumsum(kept_NS, axis=0, dtype=jnp.int32) - kept_NS

    last_NS = jnp.cumsum(kept_NS, axis=1, dtype=jnp.int32)
    first_N1S, last_N1S = (last_NS - kept_NS)[:, None], last_NS[:, None]
    place_1Q1 = jnp.arange(buffer_rows, dtype=jnp.int32)[None, :, None]
    is_slot_NQS = (place_1Q1 >= first_N1S) & (place_1Q1 < last_N1S)
    row_NQ = jnp.sum(jnp.where(is_slot_NQS, row_NS[:, None] - first_N1S + place_1Q1, 0), axis=2, dtype=jnp.int32)
    row_X = jnp.where(jnp.any(is_slot_NQS, axis=2), row_NQ, num_rows).reshape(-1)
    return Gathered(row_X, inverse_rows(row_X, num_rows), Groups(start_S, size_S))
