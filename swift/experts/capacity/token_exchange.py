"""Row exchange between ranks, where every pair may exchange a different number of rows.

Every row has a position among the rows that its rank sends to the same peer, and the receiver knows this position, too.
All ranks know from the counts how many rows each rank sends to each other rank.

On TPU and GPU, rows are sorted by peer, and ``lax.ragged_all_to_all`` moves only real rows. It is not available on
XLA:CPU (https://github.com/jax-ml/jax/issues/34755) or under ``vmap`` over ranks. There, rows are sent in rounds of
equal buffers: the first round moves the first rows of every pair of ranks, in buffers large enough for most pairs; the
rest follow in rounds of smaller buffers, as many as the pair with the most rows needs. With a single rank, nothing is
sent.

Legend: X rows sent by this rank, Y rows received, N ranks, Q rows of a buffer, D dim.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from swift.experts.capacity.slot import inverse_rows
from swift.experts.config import Buffers
from swift.mesh.per_rank import known_platform


class Ends(NamedTuple):
    """Peer rank for each row, and the row's position among all rows exchanged with that peer."""

    peer_X: jax.Array  # int32, rank that the row is sent to or received from
    position_X: jax.Array  # int32, position among all rows from the sender to the receiver; negative for an empty row


def exchange_rows(
    rows_XD: Float[Array, "X D"],
    sent: Ends,
    received: Ends,
    counts_NN: Int[Array, "N N"],
    buffers: Buffers,
    axis: str,
) -> Float[Array, "Y D"]:
    """Sends every row to its peer, and returns the rows that arrive here; empty rows are zeros.

    Args:
        rows_XD: rows of this rank.
        sent: destination of each of these rows.
        received: origin of each row that arrives.
        counts_NN: int32, number of rows from every rank to every rank; the same on all ranks.
        buffers: rows of a buffer in each round, if rows are sent in rounds.
        axis: name of the mesh axis of the ranks.
    """
    return _exchange(rows_XD, sent, received, counts_NN, None if is_ragged(axis) else buffers, axis)


def is_ragged(axis: str) -> bool:
    """Whether ``lax.ragged_all_to_all`` is available: under ``shard_map``, on devices other than CPUs."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes and known_platform() not in (None, "cpu")


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _exchange(
    rows_XD: jax.Array, sent: Ends, received: Ends, counts_NN: jax.Array, buffers: Buffers | None, axis: str
) -> jax.Array:
    """Moves the rows within a single rank, in rounds of ``buffers``, or all at once if ``buffers`` is None."""
    if len(counts_NN) == 1:
        return _within_rank(rows_XD, sent, received)
    if buffers is None:
        return _at_once(rows_XD, sent, received, counts_NN, axis)
    return _in_rounds(rows_XD, sent, received, counts_NN, buffers, axis)


def _forward(
    rows_XD: jax.Array, sent: Ends, received: Ends, counts_NN: jax.Array, buffers: Buffers | None, axis: str
) -> tuple[jax.Array, tuple[Ends, Ends, jax.Array]]:
    return _exchange(rows_XD, sent, received, counts_NN, buffers, axis), (sent, received, counts_NN)


def _backward(
    buffers: Buffers | None, axis: str, residuals: tuple[Ends, Ends, jax.Array], d_YD: jax.Array
) -> tuple[jax.Array, None, None, None]:
    sent, received, counts_NN = residuals
    # The exchange permutes rows, so its transpose is the exchange in the other direction.
    return _exchange(d_YD, received, sent, counts_NN.T, buffers, axis), None, None, None


_exchange.defvjp(_forward, _backward)


def _within_rank(rows_XD: jax.Array, sent: Ends, received: Ends) -> jax.Array:
    """Permutes a single rank's rows: XLA:GPU's ``ragged_all_to_all`` would copy at 1 % of the memory rate."""
    num_rows, none_1 = sent.peer_X.size, jnp.zeros(1, jnp.int32)
    order_X = inverse_rows(_in_order(sent, none_1, num_rows), num_rows)
    from_Y = order_X.at[_in_order(received, none_1, num_rows)].get(mode="fill", fill_value=num_rows)
    return rows_XD.at[from_Y].get(mode="fill", fill_value=0)


def _at_once(rows_XD: jax.Array, sent: Ends, received: Ends, counts_NN: jax.Array, axis: str) -> jax.Array:
    """Moves all rows with one ``ragged_all_to_all``, sorted by peer on both sides."""
    rank, num_sent, num_received = lax.axis_index(axis), sent.peer_X.size, received.peer_X.size
    sent_N, arriving_N = counts_NN[rank], counts_NN[:, rank]
    starts_NN = jnp.cumsum(counts_NN, axis=0, dtype=jnp.int32) - counts_NN  # first row of each sender, at each receiver
    leaves_N = jnp.cumsum(sent_N, dtype=jnp.int32) - sent_N

    order_X = inverse_rows(_in_order(sent, leaves_N, num_sent), num_sent)
    packed_XD = rows_XD.at[order_X].get(mode="fill", fill_value=0)
    # ``shard_map`` with ``check_vma=True`` requires these zeros to vary over the same axes as the rows that replace
    # them.
    none_YD = jnp.full((num_received, rows_XD.shape[1]), (leaves_N[0] * 0).astype(rows_XD.dtype))
    received_YD = lax.ragged_all_to_all(
        packed_XD, none_YD, leaves_N, sent_N, starts_NN[rank], arriving_N, axis_name=axis
    )
    return received_YD.at[_in_order(received, starts_NN[:, rank], num_received)].get(mode="fill", fill_value=0)


def _in_order(ends: Ends, start_N: Int[Array, " N"], num_rows: int) -> Int[Array, " X"]:
    """Index of each row in an array sorted by peer, where a peer's rows start at ``start_N``; ``num_rows`` if empty."""
    return jnp.where(ends.position_X >= 0, start_N[ends.peer_X] + ends.position_X, num_rows)


def _in_rounds(
    rows_XD: jax.Array, sent: Ends, received: Ends, counts_NN: jax.Array, buffers: Buffers, axis: str
) -> jax.Array:
    """Moves rows in rounds of equal buffers: first every rank pair's first rows, then a few more per round."""
    num_ranks = counts_NN.shape[0]

    def one_round(first: Int[Array, ""] | int, size: int, total_YD: jax.Array) -> jax.Array:
        at_X, at_Y = (_in_buffers(ends, first, size, num_ranks) for ends in (sent, received))
        sent_QD = rows_XD.at[inverse_rows(at_X, num_ranks * size)].get(mode="fill", fill_value=0)
        sent_NQD = sent_QD.reshape(num_ranks, size, -1)
        received_NQD = lax.all_to_all(sent_NQD, axis, split_axis=0, concat_axis=0)
        arrived_YD = received_NQD.reshape(num_ranks * size, -1).at[at_Y].get(mode="fill", fill_value=0)
        return total_YD + arrived_YD

    none_YD = jnp.zeros((received.peer_X.size, rows_XD.shape[1]), rows_XD.dtype)
    received_YD = one_round(0, buffers.first, none_YD)
    if buffers.further is None:
        return received_YD
    size = buffers.further
    rounds = jnp.maximum(jnp.max(counts_NN) - buffers.first + size - 1, 0) // size
    return lax.fori_loop(0, rounds, lambda i, x_YD: one_round(buffers.first + i * size, size, x_YD), received_YD)


def _in_buffers(ends: Ends, first: Int[Array, ""] | int, size: int, num_ranks: int) -> Int[Array, " X"]:
    """Index of each row in the buffers for the round that starts at position ``first``; N * Q if empty or not in it."""
    position_X = ends.position_X - first
    is_in_X = (ends.position_X >= 0) & (position_X >= 0) & (position_X < size)
    return jnp.where(is_in_X, ends.peer_X * size + position_X, num_ranks * size)
