"""Deduplicated rows: a token is sent to a rank only once, no matter how many of its experts are there.

A rank that computes several of a token's experts receives the token once; rows arrive in token order. The rank copies
the token to the rows of its slots, and returns the weighted sum of their outputs. With top-8 and 4 ranks, for example,
a token is sent at most 4 times instead of 8, as in DeepEP. The counts alone do not determine which slots serve a token,
so every token's slots and gates, a few bytes, are all-gathered.

The rows of a slot are in the same order as without deduplication: by source, then by token.

Legend: T tokens, K choices, N ranks, Z = N * T, S slots of a rank, M = N * S, X = T * N rows sent, Y rows received,
P rows of the grouped matmul, D model dim.
"""

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from swift.experts.capacity.slot import inverse_rows, take_rows
from swift.experts.capacity.token_exchange import Ends
from swift.experts.grouped_matmul import Groups


class SlotRows(NamedTuple):
    """Rows of the grouped matmul to which each received row is copied, and the inverse."""

    row_YK: jax.Array  # int32, P if a choice is served elsewhere, or not at all
    copy_P: jax.Array  # int32, index into the Y * K copies of received rows; Y * K for an empty row


class TokenRows(NamedTuple):
    """Rows that this rank sends and receives, and the slots of the received rows."""

    sent: Ends  # destinations of the rows from ``repeat_tokens``, [X]
    received: Ends  # senders of the received rows, [Y]
    counts_NN: jax.Array  # int32, number of tokens from every rank to every rank
    slot_rows: SlotRows
    gates_YK: jax.Array  # gates of the received tokens, including choices that other ranks serve

    @classmethod
    def of(
        cls,
        slot_TK: Int[Array, "T K"],
        gates_TK: Float[Array, "T K"],
        groups: Groups,
        *,
        num_ranks: int,
        num_received: int,
        num_rows: int,
        axis: str,
    ) -> "TokenRows":
        """Computes the rows of all tokens.

        Args:
            slot_TK: int32, slot out of M that serves each pair of this rank's tokens; -1 for a dropped pair.
            gates_TK: weights of the pairs.
            groups: row ranges of this rank's slots in the grouped matmul; large enough for their pairs.
            num_ranks: number of expert ranks, N.
            num_received: number of rows for received tokens, Y; large enough for all of them.
            num_rows: number of rows of the grouped matmul, P.
            axis: name of the mesh axis of the ranks.
        """
        num_tokens, top_k = slot_TK.shape
        num_slots, rank = groups.start_S.size, lax.axis_index(axis)
        slot_ZK, gates_ZK = (leaf.reshape(-1, top_k) for leaf in lax.all_gather((slot_TK, gates_TK), axis))
        goes_ZN = _any_choice(_rank_of(slot_ZK, num_slots), num_ranks)
        goes_NTN = goes_ZN.reshape(num_ranks, num_tokens, num_ranks)
        counts_NN = jnp.sum(goes_NTN, axis=1, dtype=jnp.int32)

        comes_Z = goes_ZN[:, rank]
        row_Z = jnp.where(comes_Z, jnp.cumsum(comes_Z, dtype=jnp.int32) - 1, num_received)
        token_Y = inverse_rows(row_Z, num_received)  # token numbers over all ranks, by rank; N * T for an empty row
        slot_YK = slot_ZK.at[token_Y].get(mode="fill", fill_value=-1)
        local_YK = jnp.where(_rank_of(slot_YK, num_slots) == rank, slot_YK % num_slots, -1)
        return cls(
            _sent(goes_NTN[rank]),
            _received(token_Y, counts_NN[:, rank], num_tokens),
            counts_NN,
            _slot_rows(local_YK, groups, num_rows),
            take_rows(gates_ZK, token_Y, row_Z),
        )


def repeat_tokens(x_TD: Float[Array, "T D"], num_ranks: int) -> Float[Array, "X D"]:
    """Repeats every token once for each rank, ``[T, D]`` -> ``[X, D]``; ``sent`` selects the rows to send."""
    return jnp.repeat(x_TD, num_ranks, axis=0)


def sum_tokens(rows_XD: Float[Array, "X D"], num_ranks: int) -> Float[Array, "T D"]:
    """Sums a token's partial outputs from all ranks that it was sent to, ``[X, D]`` -> ``[T, D]``."""
    return jnp.sum(rows_XD.reshape(-1, num_ranks, rows_XD.shape[1]), axis=1)


def _rank_of(slot_X: jax.Array, num_slots: int) -> jax.Array:
    """Returns the rank of every slot, or -1 for no slot (-1)."""
    return slot_X // num_slots  # rounds down, so -1 stays -1


def _any_choice(number_XK: Int[Array, "X K"], size: int) -> Bool[Array, "X size"]:
    """Returns, for each row, whether each number below ``size`` is among its choices."""
    return jnp.any(number_XK[:, :, None] == jnp.arange(size, dtype=jnp.int32)[None, None], axis=1)


def _sent(goes_TN: Bool[Array, "T N"]) -> Ends:
    """Computes the destinations of this rank's rows; each destination receives rows in token order."""
    peer_TN = jnp.broadcast_to(jnp.arange(goes_TN.shape[1], dtype=jnp.int32)[None], goes_TN.shape)
    position_TN = jnp.cumsum(goes_TN, axis=0, dtype=jnp.int32) - 1
    return Ends(peer_TN.reshape(-1), jnp.where(goes_TN, position_TN, -1).reshape(-1))


def _received(token_Y: Int[Array, " Y"], counts_N: Int[Array, " N"], num_tokens: int) -> Ends:
    """Computes the senders of the received rows, which are sorted by sender, then token."""
    is_there_Y = token_Y < counts_N.size * num_tokens
    peer_Y = jnp.where(is_there_Y, token_Y // num_tokens, 0)
    start_N = jnp.cumsum(counts_N, dtype=jnp.int32) - counts_N
    position_Y = jnp.arange(token_Y.size, dtype=jnp.int32) - start_N[peer_Y]
    return Ends(peer_Y, jnp.where(is_there_Y, position_Y, -1))


def _slot_rows(slot_YK: Int[Array, "Y K"], groups: Groups, num_rows: int) -> SlotRows:
    """Assigns the slots' rows of the grouped matmul, given each choice's slot, or -1 for a slot on another rank.

    A token has at most one choice in a slot.
    """
    num_slots = groups.start_S.size
    is_in_YS = _any_choice(slot_YK, num_slots)
    row_YS = groups.start_S[None] + jnp.cumsum(is_in_YS, axis=0, dtype=jnp.int32) - 1
    row_YK = jnp.take_along_axis(row_YS, jnp.maximum(slot_YK, 0), axis=1)
    row_YK = jnp.where(slot_YK >= 0, row_YK, num_rows)
    return SlotRows(row_YK, inverse_rows(row_YK.reshape(-1), num_rows))


@jax.custom_vjp
def copy_to_slots(rows_YD: Float[Array, "Y D"], slot_rows: SlotRows) -> Float[Array, "P D"]:
    """Copies every received row to the rows of its slots; empty rows are zeros."""
    return _copied(rows_YD, slot_rows)


def _copy_forward(rows_YD: jax.Array, slot_rows: SlotRows) -> tuple[jax.Array, SlotRows]:
    return copy_to_slots(rows_YD, slot_rows), slot_rows


def _copy_backward(slot_rows: SlotRows, d_PD: jax.Array) -> tuple[jax.Array, None]:
    return _weighted_sum(d_PD, jnp.ones(slot_rows.row_YK.shape, d_PD.dtype), slot_rows), None


copy_to_slots.defvjp(_copy_forward, _copy_backward)


@jax.custom_vjp
def sum_over_slots(
    done_PD: Float[Array, "P D"], gates_YK: Float[Array, "Y K"], slot_rows: SlotRows
) -> Float[Array, "Y D"]:
    """Sums the outputs of every received row's slots, weighted by the gates."""
    return _weighted_sum(done_PD, gates_YK, slot_rows)


def _sum_forward(done_PD: jax.Array, gates_YK: jax.Array, slot_rows: SlotRows) -> tuple[jax.Array, tuple]:
    return sum_over_slots(done_PD, gates_YK, slot_rows), (done_PD, gates_YK, slot_rows)


def _sum_backward(residuals: tuple, d_YD: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    done_PD, gates_YK, slot_rows = residuals
    gate_P = gates_YK.reshape(-1).at[slot_rows.copy_P].get(mode="fill", fill_value=0)
    d_done_PD = gate_P[:, None].astype(d_YD.dtype) * _copied(d_YD, slot_rows)
    wide = jnp.promote_types(d_YD.dtype, jnp.float32)
    d_gates = [jnp.sum(_rows(done_PD, row_Y).astype(wide) * d_YD.astype(wide), axis=1) for row_Y in slot_rows.row_YK.T]
    return d_done_PD, jnp.stack(d_gates, axis=1).astype(gates_YK.dtype), None


sum_over_slots.defvjp(_sum_forward, _sum_backward)


def _copied(rows_YD: jax.Array, slot_rows: SlotRows) -> jax.Array:
    return _rows(rows_YD, slot_rows.copy_P // slot_rows.row_YK.shape[1])


def _weighted_sum(rows_PD: jax.Array, weights_YK: jax.Array, slot_rows: SlotRows) -> jax.Array:
    """Sums over the choices in at least float32, one at a time: all at once would need memory for Y * K rows."""
    wide = jnp.promote_types(rows_PD.dtype, jnp.float32)
    weights_KY1 = weights_YK.T[..., None].astype(rows_PD.dtype).astype(wide)
    choices = zip(slot_rows.row_YK.T, weights_KY1, strict=True)
    parts = (_rows(rows_PD, row_Y).astype(wide) * weight_Y1 for row_Y, weight_Y1 in choices)
    return reduce(jnp.add, parts).astype(rows_PD.dtype)


def _rows(rows_XD: jax.Array, index_Y: jax.Array) -> jax.Array:
    return rows_XD.at[index_Y].get(mode="fill", fill_value=0)
