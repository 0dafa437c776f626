"""A table in shares: each rank has some of its rows, and asks the others for those that its tokens need.

Tokens are used as unevenly as experts (Zipf). So a token that occurs several times is asked for once (RecD's inverse
indices), and the rows of the most frequent tokens have a copy on every rank (RecShard's placement by popularity), which
is made once for many micro-batches, and whose gradients are summed once.

Rows are in order of popularity, and ranks take turns: row p is on rank ``p % N``. So each has as many frequent rows as
the others. Requests and rows travel in rounds of small buffers, as many as the pair of ranks needs that has most.

Legend: N ranks, V rows of the table, v = V / N those of a rank, H rows with copies, h = H / N, T tokens of a rank,
X requests of a rank, Q requests of a buffer from one rank to another, D width.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from swift.mesh import EXPERT_AXIS
from swift.models.modules import at_least_float32, look_up
from swift.models.row_sums import sum_rows

NONE = -1
"""Stands for no request."""


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
    own_vD: Float[Array, "v D"], hot_HD: Float[Array, "H D"], row_T: Int[Array, " T"], buffer_size: int, num_ranks: int
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
    distinct_T, index_T = distinct(jnp.where(row_T < num_hot, NONE, row_T))
    cold_TD = look_up(fetch_rows(own_vD, distinct_T, buffer_size, num_ranks), index_T[None])[0]
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

    def places(self, turn: jax.Array, buffer_size: int, num_ranks: int) -> jax.Array:
        """Place of each request in the buffers of a round; beyond them if it is in another round, or none."""
        position_X = self.position_X - turn * buffer_size
        is_now_X = (self.position_X >= 0) & (position_X >= 0) & (position_X < buffer_size)
        return jnp.where(is_now_X, self.owner_X * buffer_size + position_X, num_ranks * buffer_size)

    def asked(self, place_X: jax.Array, buffer_size: int, num_ranks: int) -> jax.Array:
        """The rows ``[N * Q]`` that all ranks ask this one for in a round; ``NONE`` where they ask for fewer."""
        none = jnp.full(num_ranks * buffer_size, NONE, jnp.int32)
        return _exchanged(none.at[place_X].set(self.row_X, mode="drop"), num_ranks)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fetch_rows(
    own_vD: Float[Array, "v D"], wanted_X: Int[Array, " X"], buffer_size: int, num_ranks: int
) -> Float[Array, "X D"]:
    """Fetches rows from their owners; zeros where there is no request.

    Its gradient sends each row's back, and sums those of a row in at least float32, always in the same order.

    Args:
        own_vD: this rank's rows.
        wanted_X: int32, the row of each request, or ``NONE``.
        buffer_size: Q.
        num_ranks: N.
    """
    requests = _Requests.of(wanted_X, buffer_size, num_ranks)

    def one_round(turn: jax.Array, rows_XD: jax.Array) -> jax.Array:
        place_X = requests.places(turn, buffer_size, num_ranks)
        asked_Z = requests.asked(place_X, buffer_size, num_ranks)
        found_ZD = jnp.where((asked_Z != NONE)[:, None], own_vD[jnp.maximum(asked_Z, 0)], 0)
        return rows_XD + _exchanged(found_ZD, num_ranks).at[place_X].get(mode="fill", fill_value=0)

    none_XD = jnp.zeros((len(wanted_X), own_vD.shape[1]), own_vD.dtype)
    return lax.fori_loop(0, requests.rounds, one_round, none_XD)


def _fetch_forward(
    own_vD: jax.Array, wanted_X: jax.Array, buffer_size: int, num_ranks: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # A column says how many rows there are, and their dtype.
    return fetch_rows(own_vD, wanted_X, buffer_size, num_ranks), (own_vD[:, :1], wanted_X)


def _fetch_backward(
    buffer_size: int, num_ranks: int, kept: tuple[jax.Array, jax.Array], d_rows_XD: jax.Array
) -> tuple[jax.Array, None]:
    (own_v1, wanted_X), wide = kept, at_least_float32(d_rows_XD.dtype)
    requests, num_own = _Requests.of(wanted_X, buffer_size, num_ranks), len(own_v1)

    def one_round(turn: jax.Array, total_vD: jax.Array) -> jax.Array:
        place_X = requests.places(turn, buffer_size, num_ranks)
        asked_Z = requests.asked(place_X, buffer_size, num_ranks)
        none_ZD = jnp.zeros((num_ranks * buffer_size, d_rows_XD.shape[1]), d_rows_XD.dtype)
        came_ZD = _exchanged(none_ZD.at[place_X].set(d_rows_XD, mode="drop"), num_ranks)
        # Those of no request are zeros: they may be added to any row.
        return total_vD + sum_rows(came_ZD, jnp.maximum(asked_Z, 0), num_own, wide)

    none_vD = jnp.zeros((num_own, d_rows_XD.shape[1]), wide)
    return lax.fori_loop(0, requests.rounds, one_round, none_vD).astype(own_v1.dtype), None


fetch_rows.defvjp(_fetch_forward, _fetch_backward)


def _exchanged(buffers: jax.Array, num_ranks: int) -> jax.Array:
    """The buffers that the ranks have for this one ``[N * Q, ...]``, of those that this one has for them."""
    by_rank = buffers.reshape(num_ranks, -1, *buffers.shape[1:])
    return lax.all_to_all(by_rank, EXPERT_AXIS, split_axis=0, concat_axis=0).reshape(buffers.shape)
