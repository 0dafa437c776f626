"""Exchange of rows between ranks that have different numbers of them for each other, in rounds of even buffers.

Every row has a position among those that its rank sends to another, which the receiver knows, too. The first round
sends the first rows of all pairs of ranks, in buffers large enough for most; what is left follows in rounds of small
buffers, as many as the pair needs that has most. All ranks know that number from the counts.

Legend: X rows here, Y rows there, N ranks, Q rows of a buffer, D dim.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from swift.experts.config import Buffers
from swift.experts.slot_capacity import inverse_rows


class Ends(NamedTuple):
    """The other end of each of a rank's rows."""

    peer_X: jax.Array  # int32, rank that it is sent to, or comes from
    position_X: jax.Array  # int32, its position among the rows of the two ranks; negative for an empty row


def further_rounds(buffers: Buffers, most: Int[Array, ""]) -> Int[Array, ""]:
    """Rounds after the first one, int32, where no rank sends more than ``most`` rows to another."""
    if buffers.further is None:
        return most * 0
    return jnp.maximum(most - buffers.first + buffers.further - 1, 0) // buffers.further


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def exchange_rows(
    rows_XD: Float[Array, "X D"],
    mine: Ends,
    theirs: Ends,
    rounds: Int[Array, ""],
    buffers: Buffers,
    num_ranks: int,
    axis: str,
) -> Float[Array, "Y D"]:
    """Sends every row to its other end, and returns the rows that arrive here; empty ones are zeros.

    Args:
        rows_XD: rows of this rank.
        mine: where each of them goes.
        theirs: where each of the rows that arrive comes from.
        rounds: int32, rounds after the first; the same on all ranks.
        buffers: rows of a round.
        num_ranks: number of ranks, N.
        axis: name of the mesh axis of the ranks.
    """

    def one_round(first: Int[Array, ""] | int, size: int, there_YD: jax.Array) -> jax.Array:
        at_X, at_Y = (_in_buffers(ends, first, size, num_ranks) for ends in (mine, theirs))
        sent_QD = rows_XD.at[inverse_rows(at_X, num_ranks * size)].get(mode="fill", fill_value=0)
        sent_NQD = sent_QD.reshape(num_ranks, size, -1)
        received_NQD = lax.all_to_all(sent_NQD, axis, split_axis=0, concat_axis=0)
        arrived_YD = received_NQD.reshape(num_ranks * size, -1).at[at_Y].get(mode="fill", fill_value=0)
        return there_YD + arrived_YD

    none_YD = jnp.zeros((theirs.peer_X.size, rows_XD.shape[1]), rows_XD.dtype)
    there_YD = one_round(0, buffers.first, none_YD)
    if buffers.further is None:
        return there_YD
    size = buffers.further
    return lax.fori_loop(0, rounds, lambda i, there: one_round(buffers.first + i * size, size, there), there_YD)


def _forward(
    rows_XD: jax.Array, mine: Ends, theirs: Ends, rounds: jax.Array, buffers: Buffers, num_ranks: int, axis: str
) -> tuple[jax.Array, tuple[Ends, Ends, jax.Array]]:
    return exchange_rows(rows_XD, mine, theirs, rounds, buffers, num_ranks, axis), (mine, theirs, rounds)


def _backward(
    buffers: Buffers, num_ranks: int, axis: str, residuals: tuple[Ends, Ends, jax.Array], d_YD: jax.Array
) -> tuple[jax.Array, None, None, None]:
    mine, theirs, rounds = residuals
    return exchange_rows(d_YD, theirs, mine, rounds, buffers, num_ranks, axis), None, None, None


exchange_rows.defvjp(_forward, _backward)


def _in_buffers(ends: Ends, first: Int[Array, ""] | int, size: int, num_ranks: int) -> Int[Array, " X"]:
    """Row of each row in a round's buffers, which begin at position ``first``; N * Q if in another round, or empty."""
    position_X = ends.position_X - first
    is_in_X = (ends.position_X >= 0) & (position_X >= 0) & (position_X < size)
    return jnp.where(is_in_X, ends.peer_X * size + position_X, num_ranks * size)
