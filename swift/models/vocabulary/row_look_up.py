"""A table in shares: each rank has some of its rows, and asks the others for those that its tokens need.

Tokens are used as unevenly as experts (Zipf). So a token that occurs several times is asked for once (RecD's inverse
indices), and the rows of the most frequent tokens have a copy on every rank (RecShard's placement by popularity), which
is made once for many micro-batches, and whose gradients are summed once.

Ranks take turns: row r is on rank ``r % N``. So each has as many frequent rows as the others, where rows are in order
of popularity; and nearly so in a tokenizer's order. Requests and rows travel in rounds of small buffers, as many as the
pair of ranks needs that has most: whatever the tokens are, none is left out.

Legend: N ranks, V rows of the table, v = V / N those of a rank, H rows with copies, h = H / N, T tokens of a rank,
X requests of a rank, Q requests of a buffer from one rank to another, Z = N * Q places of the buffers, D width.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from swift.mesh import EXPERT_AXIS
from swift.models.modules import at_least_float32, look_up
from swift.models.row_sums import sum_rows

NONE = -1
"""Stands for no request."""

ROUNDS = 32
"""Rounds in which requests for all tokens fit if none repeats and ranks have equally many; text takes a quarter."""

COLUMNS_AT_ONCE = 256
"""Columns of the gradients that are summed at once, a multiple of a TPU's 128 lanes."""


def requests_at_once(num_tokens: int, num_ranks: int) -> int:
    """Requests of a rank to another in a round, Q, where each has ``num_tokens`` tokens."""
    return -(-num_tokens // (ROUNDS * num_ranks))


def rounds_if_different(num_tokens: int, num_rows: int, num_ranks: int) -> int:
    """Rounds of a look-up if all tokens of a rank are different, and each rank has equally many of their rows."""
    different = min(-(-num_tokens // num_ranks), -(-num_rows // num_ranks))
    return -(-different // requests_at_once(num_tokens, num_ranks))


def look_up_in_shares(
    own_vD: Float[Array, "v D"], tokens_BT: Int[Array, "B T"], num_ranks: int
) -> Float[Array, "B T D"]:
    """Looks up the row of each token, where row r is on rank ``r % N``; differentiable.

    Its gradient is that of the sum over all ranks' tokens.

    Args:
        own_vD: this rank's rows.
        tokens_BT: int32, tokens of this rank; all ranks have equally many.
        num_ranks: N.
    """
    size = requests_at_once(tokens_BT.size, num_ranks)
    return fetch_rows(own_vD, tokens_BT.reshape(-1), size, num_ranks).reshape(*tokens_BT.shape, -1)


def gradient_in_shares(
    d_x_BTD: Float[Array, "B T D"], tokens_BT: Int[Array, "B T"], num_rows: int, num_ranks: int, wire_dtype: DTypeLike
) -> Float[Array, "v D"]:
    """Computes the gradient of ``look_up_in_shares`` alone, in at least float32: no row is sent.

    Args:
        d_x_BTD: gradients of the rows of this rank's tokens.
        tokens_BT: int32, tokens of this rank; all ranks have equally many.
        num_rows: rows of this rank, v.
        num_ranks: N.
        wire_dtype: dtype of gradients on the wire.
    """
    size, num_tokens = requests_at_once(tokens_BT.size, num_ranks), tokens_BT.size
    d_rows_TD = d_x_BTD.reshape(num_tokens, -1)
    return _sum_on_owners(d_rows_TD, tokens_BT.reshape(num_tokens), num_rows, size, num_ranks, wire_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def hot_rows(own_vD: Float[Array, "v D"], num_hot: int, num_ranks: int) -> Float[Array, "H D"]:
    """Copies the rows of the H most frequent tokens to every rank.

    Its gradient is summed on their owners, in at least float32 and in the order of the ranks.

    Args:
        own_vD: this rank's rows.
        num_hot: H, a multiple of the ranks.
        num_ranks: N.
    """
    if not num_hot:
        return own_vD[:0]
    by_owner_NhD = lax.all_gather(own_vD[: num_hot // num_ranks], EXPERT_AXIS)
    return by_owner_NhD.swapaxes(0, 1).reshape(num_hot, -1)


def _hot_forward(own_vD: jax.Array, num_hot: int, num_ranks: int) -> tuple[jax.Array, jax.Array]:
    return hot_rows(own_vD, num_hot, num_ranks), own_vD[:, :0]  # says how many rows there are


def _hot_backward(num_hot: int, num_ranks: int, own_v0: jax.Array, d_hot_HD: jax.Array) -> tuple[jax.Array]:
    d_own_vD = jnp.zeros((len(own_v0), d_hot_HD.shape[1]), d_hot_HD.dtype)
    if not num_hot:
        return (d_own_vD,)
    by_owner_NhD = d_hot_HD.reshape(num_hot // num_ranks, num_ranks, -1).swapaxes(0, 1)
    came_NhD = lax.all_to_all(by_owner_NhD, EXPERT_AXIS, split_axis=0, concat_axis=0)
    total_hD = jnp.sum(came_NhD, axis=0, dtype=at_least_float32(d_hot_HD.dtype))
    return (d_own_vD.at[: len(total_hD)].set(total_hD.astype(d_hot_HD.dtype)),)


hot_rows.defvjp(_hot_forward, _hot_backward)


def look_up_rows(
    own_vD: Float[Array, "v D"],
    hot_HD: Float[Array, "H D"],
    row_T: Int[Array, " T"],
    buffer_size: int,
    num_ranks: int,
) -> Float[Array, "T D"]:
    """Looks up a row for each token; differentiable.

    Args:
        own_vD: this rank's rows.
        hot_HD: the first H rows of the table, see ``hot_rows``.
        row_T: int32, the row of each token.
        buffer_size: Q.
        num_ranks: N.
    """
    num_hot = len(hot_HD)
    cold_TD = fetch_rows(own_vD, jnp.where(row_T < num_hot, NONE, row_T), buffer_size, num_ranks)
    if not num_hot:
        return cold_TD
    hot_TD = look_up(hot_HD, jnp.minimum(row_T, num_hot - 1)[None])[0]
    return jnp.where((row_T < num_hot)[:, None], hot_TD, cold_TD)


def distinct(row_T: Int[Array, " T"]) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Finds each different row once, ascending and filled with ``NONE``, and where each token's row is among them."""
    found_T, index_T = jnp.unique(row_T, return_inverse=True, size=len(row_T), fill_value=NONE)
    return found_T, index_T.astype(jnp.int32)


class _Requests(NamedTuple):
    """The requests of a rank, by owner."""

    owner_X: jax.Array  # int32
    row_X: jax.Array  # int32, row on the owner
    position_X: jax.Array  # int32, among those to the same owner; negative for none
    rounds: jax.Array  # int32, the same on all ranks

    @classmethod
    def of(cls, wanted_X: jax.Array, buffer_size: int, num_ranks: int) -> "_Requests":
        is_wanted_X, owner_X = wanted_X != NONE, wanted_X % num_ranks
        ranks_1N = jnp.arange(num_ranks, dtype=jnp.int32)[None]
        is_to_XN = (owner_X[:, None] == ranks_1N) & is_wanted_X[:, None]
        count_XN = jnp.cumsum(is_to_XN, axis=0, dtype=jnp.int32)
        position_X = jnp.sum(jnp.where(is_to_XN, count_XN, 0), axis=1, dtype=jnp.int32) - 1
        most = lax.pmax(jnp.max(count_XN[-1]), EXPERT_AXIS)
        return cls(owner_X, wanted_X // num_ranks, position_X, (most + buffer_size - 1) // buffer_size)

    def in_places(self, turn: jax.Array, buffer_size: int, num_ranks: int) -> jax.Array:
        """The request in each place ``[Z]`` of a round's buffers; beyond them, each once, where there is none."""
        position_X, num_places = self.position_X - turn * buffer_size, num_ranks * buffer_size
        is_now_X = (self.position_X >= 0) & (position_X >= 0) & (position_X < buffer_size)
        place_X = jnp.where(is_now_X, self.owner_X * buffer_size + position_X, num_places)
        index_X = jnp.arange(len(place_X), dtype=jnp.int32)
        beyond_Z = len(place_X) + jnp.arange(num_places, dtype=jnp.int32)
        return beyond_Z.at[place_X].set(index_X, mode="drop")

    def asked(self, request_Z: jax.Array, num_ranks: int) -> jax.Array:
        """The rows ``[Z]`` that all ranks ask this one for in a round; ``NONE`` where they ask for fewer."""
        return _exchanged(self.row_X.at[request_Z].get(mode="fill", fill_value=NONE), num_ranks)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fetch_rows(
    own_vD: Float[Array, "v D"], row_T: Int[Array, " T"], buffer_size: int, num_ranks: int
) -> Float[Array, "T D"]:
    """Fetches the row of each token from its owner, each different one once; zeros where there is none.

    Its gradient sums those of a row's tokens on their rank, sends the sum to the owner in the gradients' dtype, and
    sums there those of all ranks: in at least float32, and always in the same order.

    Args:
        own_vD: this rank's rows.
        row_T: int32, the row of each token, or ``NONE``.
        buffer_size: Q.
        num_ranks: N.
    """
    wanted_X, index_T = distinct(row_T)
    requests = _Requests.of(wanted_X, buffer_size, num_ranks)

    def one_round(turn: jax.Array, rows_XD: jax.Array) -> jax.Array:
        request_Z = requests.in_places(turn, buffer_size, num_ranks)
        asked_Z = requests.asked(request_Z, num_ranks)
        found_ZD = jnp.where((asked_Z != NONE)[:, None], own_vD[jnp.maximum(asked_Z, 0)], 0)
        return rows_XD.at[request_Z].set(_exchanged(found_ZD, num_ranks), mode="drop", unique_indices=True)

    none_XD = jnp.zeros((len(wanted_X), own_vD.shape[1]), own_vD.dtype)
    return lax.fori_loop(0, requests.rounds, one_round, none_XD)[index_T]


def _fetch_forward(
    own_vD: jax.Array, row_T: jax.Array, buffer_size: int, num_ranks: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # A column says how many rows there are, and their dtype.
    return fetch_rows(own_vD, row_T, buffer_size, num_ranks), (own_vD[:, :1], row_T)


def _fetch_backward(
    buffer_size: int, num_ranks: int, kept: tuple[jax.Array, jax.Array], d_rows_TD: jax.Array
) -> tuple[jax.Array, None]:
    own_v1, row_T = kept
    total_vD = _sum_on_owners(d_rows_TD, row_T, len(own_v1), buffer_size, num_ranks, d_rows_TD.dtype)
    return total_vD.astype(own_v1.dtype), None


fetch_rows.defvjp(_fetch_forward, _fetch_backward)


def _sum_on_owners(
    d_rows_TD: jax.Array, row_T: jax.Array, num_rows: int, buffer_size: int, num_ranks: int, wire_dtype: DTypeLike
) -> jax.Array:
    """Sums the gradients of this rank's rows ``[v, D]`` over the tokens of all ranks, in at least float32."""
    wanted_X, index_T = distinct(row_T)
    requests = _Requests.of(wanted_X, buffer_size, num_ranks)
    sums_XD = _sum_tokens(d_rows_TD, index_T, wire_dtype)

    def one_round(turn: jax.Array, total_vD: jax.Array) -> jax.Array:
        request_Z = requests.in_places(turn, buffer_size, num_ranks)
        asked_Z = requests.asked(request_Z, num_ranks)
        sent_ZD = sums_XD.at[request_Z].get(mode="fill", fill_value=0)
        return _added(total_vD, _exchanged(sent_ZD, num_ranks), asked_Z, num_ranks)

    none_vD = jnp.zeros((num_rows, d_rows_TD.shape[1]), at_least_float32(d_rows_TD.dtype))
    return lax.fori_loop(0, requests.rounds, one_round, none_vD)


def _sum_tokens(d_rows_TD: jax.Array, index_T: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Sums the gradients of each different row's tokens ``[X, D]``, X = T; at least in float32, and then rounded."""
    num_columns = d_rows_TD.shape[1]
    # Some columns at a time: the sums on the way to those of all would be larger than the gradients.
    size = COLUMNS_AT_ONCE if num_columns % COLUMNS_AT_ONCE == 0 else num_columns
    wide = at_least_float32(d_rows_TD.dtype)

    def of_columns(turn: jax.Array, sums_XD: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(d_rows_TD, turn * size, size, axis=1)
        sums = sum_rows(part, index_T, len(index_T), wide).astype(dtype)
        return lax.dynamic_update_slice_in_dim(sums_XD, sums, turn * size, axis=1)

    return lax.fori_loop(0, num_columns // size, of_columns, jnp.zeros(d_rows_TD.shape, dtype))


def _added(total_vD: jax.Array, came_ZD: jax.Array, asked_Z: jax.Array, num_ranks: int) -> jax.Array:
    """Adds gradients to those of the rows that were asked for, rank by rank: of one rank's, a row has one at most."""
    beyond_Z = len(total_vD) + jnp.arange(len(asked_Z), dtype=jnp.int32)
    row_NQ = jnp.where(asked_Z == NONE, beyond_Z, asked_Z).reshape(num_ranks, -1)
    came_NQD = came_ZD.reshape(*row_NQ.shape, -1)

    def of_rank(rank: jax.Array, total_vD: jax.Array) -> jax.Array:
        more_QD = came_NQD[rank].astype(total_vD.dtype)
        return total_vD.at[row_NQ[rank]].add(more_QD, mode="drop", unique_indices=True)

    return lax.fori_loop(0, num_ranks, of_rank, total_vD)


def _exchanged(buffers: jax.Array, num_ranks: int) -> jax.Array:
    """The buffers that the ranks have for this one ``[Z, ...]``, of those that this one has for them."""
    by_rank = buffers.reshape(num_ranks, -1, *buffers.shape[1:])
    return lax.all_to_all(by_rank, EXPERT_AXIS, split_axis=0, concat_axis=0).reshape(buffers.shape)
