"""Embedding lookup on a rank, whole or sharded, and its gradient.

Sharded table: each rank has some of the rows, and requests the others that its tokens need. Rows are assigned
round-robin: row r is on rank ``r % N``. All ranks therefore have equally many frequent rows if rows are ordered by
popularity, and nearly so in a tokenizer's order. Tokens are used as unevenly as experts (Zipf), so the row of a token
that occurs several times is requested only once (RecD's inverse indices). Requests and rows are sent in rounds of small
buffers, as many as the pair of ranks with the most requests needs, so every token gets its row.

Hot rows: for the duration of an iteration, a rank caches copies of the rows that it needs most. A row that several
micro-batches need is fetched once, before the first of them, and the sum of its gradients is sent once, after the last
(RecShard's placement by popularity). The popularity is that of the iteration itself, whose tokens are known when it
begins: nothing has to be kept between iterations, and every copy saves at least one request. Rows that all ranks need
often are cached on all of them.

Legend: N ranks, V rows of the table, v = V / N rows of a rank, H hot rows of a rank, n micro-batches, B sequences,
T positions, or tokens of a rank in a micro-batch, K iterations, X requests of a rank, Q requests in a buffer from one
rank to another, Z = N * Q places in the buffers, D width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from swift.largest import largest
from swift.mesh.per_rank import EXPERT_AXIS
from swift.models.modules import at_least_float32, look_up, sum_rows
from swift.models.parameters import Group

NONE = -1
"""Row number that stands for no row."""

_ROUNDS = 64
"""Number of rounds if all tokens are distinct and spread evenly over the ranks; real text takes a quarter of it."""

_COLUMNS_AT_ONCE = 256
"""Number of gradient columns that are summed at once, a multiple of a TPU's 128 lanes."""

_TOKENS_PER_ROW = 16
"""Tokens per hot row in a micro-batch. With 4, copies would save up to a quarter of the remaining bytes with 16
micro-batches, but take 9 MB more at OLMoE's width: over a tenth more memory than a plain lookup."""


class HotRowCache(NamedTuple):
    """Copies of the rows that a rank needs most."""

    hot_H: Int[Array, " H"]  # int32, the copied rows, ascending
    copy_HD: Float[Array, "H D"]

    @classmethod
    def none_like(cls, rows_D: Float[Array, "... D"]) -> "HotRowCache":
        """Returns an empty cache for rows of the same width and dtype."""
        return cls(jnp.zeros(0, jnp.int32), rows_D[..., :0, :].reshape(0, rows_D.shape[-1]))


def embed(
    group: Group,
    state: Any,
    copies: HotRowCache | None,
    tokens_BT: Int[Array, "B T"],
    position_BT: Int[Array, "B T"] | None,
    num_ranks: int,
) -> Float[Array, "B T D"]:
    """Embeds tokens, from a whole or a sharded table.

    Args:
        group: group of the embedding, with the shapes that a rank has.
        state: the embedding's state on this rank.
        copies: copies of hot rows; None if all rows are requested.
        tokens_BT: int32; all ranks that share the rows must have equally many tokens.
        position_BT: int32; None for positions counted from 0.
        num_ranks: number of ranks that share the rows; 1 if the table is whole.
    """

    def in_shares(own_vD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        return sharded_lookup(own_vD, *(copies or HotRowCache.none_like(own_vD)), tokens_BT, num_ranks)

    return group.module(state)(tokens_BT, position_BT, look_up if num_ranks == 1 else in_shares)


def embedding_gradient(
    group: Group,
    state: Any,
    copies: HotRowCache | None,
    tokens_BT: Int[Array, "B T"],
    position_BT: Int[Array, "B T"] | None,
    d_x_BTD: Float[Array, "B T D"],
    num_ranks: int,
    wire_dtype: DTypeLike,
) -> tuple[Any, Float[Array, "H D"]]:
    """Computes the gradients for the state and the copies from the gradient of ``embed``, without looking up rows.

    Args:
        group, state, copies, tokens_BT, position_BT, num_ranks: see ``embed``.
        d_x_BTD: gradient of the result of ``embed``.
        wire_dtype: dtype of shared rows' gradients on the wire; their sum is at least float32.
    """
    rows_of = look_up if num_ranks == 1 else lambda *_: jnp.zeros_like(d_x_BTD)
    _, pull_back = jax.vjp(lambda state: group.module(state)(tokens_BT, position_BT, rows_of), state)
    (gradient,) = pull_back(d_x_BTD)
    hot_H, none_0D = copies or HotRowCache.none_like(d_x_BTD)
    if num_ranks == 1:
        return gradient, none_0D
    table, num_rows = gradient["token_VD"], state["token_VD"].shape[0]
    row_gradient, copy_gradient_HD = sharded_lookup_gradient(d_x_BTD, hot_H, tokens_BT, num_rows, num_ranks, wire_dtype)
    gradient["token_VD"] = table.replace(row_gradient)
    return gradient, copy_gradient_HD


def sharded_lookup(
    own_vD: Float[Array, "v D"],
    hot_H: Int[Array, " H"],
    copies_HD: Float[Array, "H D"],
    tokens_BT: Int[Array, "B T"],
    num_ranks: int,
) -> Float[Array, "B T D"]:
    """Looks up each token's row, where row r is on rank ``r % N``; its gradient is ``sharded_lookup_gradient``.

    Args:
        own_vD: this rank's rows.
        hot_H: int32, the rows of which this rank has copies, ascending; ``NONE`` for no row.
        copies_HD: copies of these rows.
        tokens_BT: int32, tokens of this rank; all ranks must have equally many.
        num_ranks: number of ranks that share the rows, N.
    """
    requests, index_T, place_X, is_hot_X = _requests_of(tokens_BT, hot_H, num_ranks)
    rows_XD = jnp.zeros((len(index_T), own_vD.shape[1]), own_vD.dtype)
    if len(hot_H):
        rows_XD = jnp.where(is_hot_X[:, None], jnp.take(copies_HD, place_X, axis=0, mode="clip"), rows_XD)
    return requests.fetch(own_vD, rows_XD)[index_T].reshape(*tokens_BT.shape, -1)


def sharded_lookup_gradient(
    d_x_BTD: Float[Array, "B T D"],
    hot_H: Int[Array, " H"],
    tokens_BT: Int[Array, "B T"],
    num_rows: int,
    num_ranks: int,
    wire_dtype: DTypeLike,
) -> tuple[Float[Array, "v D"], Float[Array, "H D"]]:
    """Computes the gradient of ``sharded_lookup``, in at least float32 and in a fixed order, without sending rows.

    Each rank sums the gradients of a row's tokens. For rows without a local copy, it sends the sums to the owner, which
    adds the sums of all ranks.

    Args:
        d_x_BTD: gradients of the rows of this rank's tokens.
        hot_H: see ``sharded_lookup``.
        tokens_BT: int32, tokens of this rank; all ranks must have equally many.
        num_rows: number of rows of this rank, v.
        num_ranks: number of ranks that share the rows, N.
        wire_dtype: dtype of gradients on the wire.

    Returns:
        (gradients of this rank's rows, for the tokens of all ranks; gradients of its copies, for its own tokens).
    """
    d_rows_TD = d_x_BTD.reshape(tokens_BT.size, -1)
    requests, index_T, place_X, is_hot_X = _requests_of(tokens_BT, hot_H, num_ranks)
    sums_XD = _sum_tokens(d_rows_TD, index_T, wire_dtype)
    wide = at_least_float32(d_x_BTD.dtype)
    total_vD = requests.add_on_owners(sums_XD, jnp.zeros((num_rows, d_rows_TD.shape[1]), wide))
    if not len(hot_H):
        return total_vD, jnp.zeros((0, d_rows_TD.shape[1]), wide)
    # Index of each copy's sum, or an index beyond the sums for a row that no token needs.
    index_X = jnp.arange(len(sums_XD), dtype=jnp.int32)
    source_H = jnp.full(len(hot_H), len(sums_XD), jnp.int32)
    copy_X = jnp.where(is_hot_X, place_X, len(hot_H) + index_X)
    source_H = source_H.at[copy_X].set(index_X, mode="drop", unique_indices=True)
    return total_vD, sums_XD.at[source_H].get(mode="fill", fill_value=0).astype(wide)


def _requests_of(
    tokens_BT: jax.Array, hot_H: jax.Array, num_ranks: int
) -> tuple["Requests", jax.Array, jax.Array, jax.Array]:
    """Creates the requests for the rows that tokens need and of which this rank has no copy.

    Returns:
        (requests; index of each token's row among the distinct rows [T]; index of each distinct row among the copies,
        and whether it is there [X]). X = T, the largest possible number of distinct rows.
    """
    wanted_X, index_T = distinct(tokens_BT.reshape(-1))
    place_X, is_hot_X = _place_in(hot_H, wanted_X)
    return _requests(jnp.where(is_hot_X, NONE, wanted_X), num_ranks), index_T, place_X, is_hot_X


def _place_in(hot_H: jax.Array, row_X: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Searches rows among a rank's copies: returns the index of each, int32[X], and whether it is there."""
    if not len(hot_H):
        return jnp.zeros_like(row_X), jnp.zeros(len(row_X), bool)
    place_X = jnp.searchsorted(hot_H, row_X).astype(jnp.int32)
    return place_X, (jnp.take(hot_H, place_X, mode="clip") == row_X) & (row_X != NONE)


def distinct(row_T: Int[Array, " T"]) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Returns the distinct rows, ascending and padded with ``NONE``, and the index of each token's row among them."""
    found_T, index_T = jnp.unique(row_T, return_inverse=True, size=len(row_T), fill_value=NONE)
    return found_T, index_T.astype(jnp.int32)


class Requests(NamedTuple):
    """Requests of a rank for distinct rows, each addressed to the rank that owns the row."""

    owner_X: jax.Array  # int32
    row_X: jax.Array  # int32, row on the owner
    position_X: jax.Array  # int32, position among the requests to the same owner; negative for none
    rounds: jax.Array  # int32, number of rounds, the same on all ranks
    buffer_size: int  # Q
    num_ranks: int  # N

    @classmethod
    def of(cls, wanted_X: Int[Array, " X"], buffer_size: int, num_ranks: int) -> "Requests":
        """Assigns the rows that a rank wants (or ``NONE``) to their owners."""
        is_wanted_X, owner_X = wanted_X != NONE, wanted_X % num_ranks
        ranks_1N = jnp.arange(num_ranks, dtype=jnp.int32)[None]
        is_to_XN = (owner_X[:, None] == ranks_1N) & is_wanted_X[:, None]
        count_XN = jnp.cumsum(is_to_XN, axis=0, dtype=jnp.int32)
        position_X = jnp.sum(jnp.where(is_to_XN, count_XN, 0), axis=1, dtype=jnp.int32) - 1
        # All ranks must run the same number of rounds, since each round is a collective.
        most = lax.pmax(jnp.max(count_XN[-1]), EXPERT_AXIS)
        rounds = (most + buffer_size - 1) // buffer_size
        return cls(owner_X, wanted_X // num_ranks, position_X, rounds, buffer_size, num_ranks)

    def fetch(self, own_vD: Float[Array, "v D"], rows_XD: Float[Array, "X D"]) -> Float[Array, "X D"]:
        """Returns ``rows_XD`` with the requested rows fetched from their owners; other rows stay unchanged."""

        def one_round(round_index: jax.Array, rows_XD: jax.Array) -> jax.Array:
            request_Z = self._in_places(round_index)
            asked_Z = self._asked(request_Z)
            found_ZD = jnp.where((asked_Z != NONE)[:, None], own_vD[jnp.maximum(asked_Z, 0)], 0)
            return rows_XD.at[request_Z].set(self._exchanged(found_ZD), mode="drop", unique_indices=True)

        return lax.fori_loop(0, self.rounds, one_round, rows_XD)

    def add_on_owners(self, sums_XD: Float[Array, "X D"], total_vD: Float[Array, "v D"]) -> Float[Array, "v D"]:
        """Adds all ranks' gradients for the rows that they request from this rank to its own gradients."""

        def one_round(round_index: jax.Array, total_vD: jax.Array) -> jax.Array:
            request_Z = self._in_places(round_index)
            asked_Z = self._asked(request_Z)
            sent_ZD = sums_XD.at[request_Z].get(mode="fill", fill_value=0)
            return _added(total_vD, self._exchanged(sent_ZD), asked_Z, self.num_ranks)

        return lax.fori_loop(0, self.rounds, one_round, total_vD)

    def _in_places(self, round_index: jax.Array) -> jax.Array:
        """Returns the request in each place ``[Z]`` of a round's buffers, or a distinct index beyond X if empty."""
        position_X, num_places = self.position_X - round_index * self.buffer_size, self.num_ranks * self.buffer_size
        is_now_X = (self.position_X >= 0) & (position_X >= 0) & (position_X < self.buffer_size)
        place_X = jnp.where(is_now_X, self.owner_X * self.buffer_size + position_X, num_places)
        index_X = jnp.arange(len(place_X), dtype=jnp.int32)
        beyond_Z = len(place_X) + jnp.arange(num_places, dtype=jnp.int32)
        return beyond_Z.at[place_X].set(index_X, mode="drop")

    def _asked(self, request_Z: jax.Array) -> jax.Array:
        """Returns the rows ``[Z]`` that all ranks request from this rank in a round; ``NONE`` for empty places."""
        return self._exchanged(self.row_X.at[request_Z].get(mode="fill", fill_value=NONE))

    def _exchanged(self, buffers: jax.Array) -> jax.Array:
        """Exchanges buffers ``[Z, ...]``: sends one to each rank, and returns those received from each rank."""
        by_rank = buffers.reshape(self.num_ranks, -1, *buffers.shape[1:])
        return lax.all_to_all(by_rank, EXPERT_AXIS, split_axis=0, concat_axis=0).reshape(buffers.shape)


def _requests(wanted_X: jax.Array, num_ranks: int) -> Requests:
    return Requests.of(wanted_X, max_requests_per_round(len(wanted_X), num_ranks), num_ranks)


def max_requests_per_round(num_tokens: int, num_ranks: int) -> int:
    """Returns the number of requests per round from one rank to another, Q, if each rank has ``num_tokens`` tokens."""
    return -(-num_tokens // (_ROUNDS * num_ranks))


def max_rounds(num_tokens: int, num_rows: int, num_ranks: int) -> int:
    """Returns a lookup's rounds if all of a rank's tokens are distinct and spread evenly over the ranks."""
    different = min(-(-num_tokens // num_ranks), -(-num_rows // num_ranks))
    return -(-different // max_requests_per_round(num_tokens, num_ranks))


def _sum_tokens(d_rows_TD: jax.Array, index_T: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Sums the gradients of each distinct row's tokens ``[X, D]``, X = T, in at least float32; casts to ``dtype``."""
    num_columns = d_rows_TD.shape[1]
    # A few columns at a time: the intermediate sums of all columns would be larger than the gradients.
    size = _COLUMNS_AT_ONCE if num_columns % _COLUMNS_AT_ONCE == 0 else num_columns
    wide = at_least_float32(d_rows_TD.dtype)

    def add_columns(chunk: jax.Array, sums_XD: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(d_rows_TD, chunk * size, size, axis=1)
        sums = sum_rows(part, index_T, len(index_T), wide).astype(dtype)
        return lax.dynamic_update_slice_in_dim(sums_XD, sums, chunk * size, axis=1)

    return lax.fori_loop(0, num_columns // size, add_columns, jnp.zeros(d_rows_TD.shape, dtype))


def _added(total_vD: jax.Array, came_ZD: jax.Array, asked_Z: jax.Array, num_ranks: int) -> jax.Array:
    """Adds gradients to the requested rows, one rank at a time, since each rank requests a row at most once."""
    beyond_Z = len(total_vD) + jnp.arange(len(asked_Z), dtype=jnp.int32)
    row_NQ = jnp.where(asked_Z == NONE, beyond_Z, asked_Z).reshape(num_ranks, -1)
    came_NQD = came_ZD.reshape(*row_NQ.shape, -1)

    def add_rank(rank: jax.Array, total_vD: jax.Array) -> jax.Array:
        more_QD = came_NQD[rank].astype(total_vD.dtype)
        return total_vD.at[row_NQ[rank]].add(more_QD, mode="drop", unique_indices=True)

    return lax.fori_loop(0, num_ranks, add_rank, total_vD)


def num_hot_rows(num_tokens: int, vocab_size: int, num_microbatches: int) -> int:
    """Returns the number of rows that a rank may copy, H; 0 for a single micro-batch, which requests each row once.

    Args:
        num_tokens: number of tokens of a rank in a micro-batch, T.
        vocab_size: number of rows of the table, V.
        num_microbatches: number of micro-batches per iteration in a pipeline.
    """
    return min(-(-num_tokens // _TOKENS_PER_ROW), vocab_size) if num_microbatches > 1 else 0


def choose_hot_rows(
    tokens_nT: Int[Array, "n T"], iteration_n: Int[Array, " n"], num_iterations: int, vocab_size: int, num_hot: int
) -> Int[Array, "K H"]:
    """Chooses the rows needed by the most micro-batches in an iteration, and by at least two.

    Args:
        tokens_nT: int32, tokens of this rank.
        iteration_n: int32, the iteration of each micro-batch; -1 if it belongs to none.
        num_iterations: number of iterations, K.
        vocab_size: number of rows of the table, V.
        num_hot: number of rows to choose in each iteration, H.

    Returns:
        int32[K, H], in ascending order for each iteration; if fewer rows qualify, ``NONE`` comes first.
    """

    def add(count_KV: jax.Array, microbatch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        tokens_T, iteration = microbatch
        is_needed_V = jnp.zeros(vocab_size, jnp.int32).at[tokens_T].set(1)
        return count_KV.at[iteration].add(is_needed_V, mode="drop"), None

    def choose() -> jax.Array:
        row_n = jnp.where(iteration_n < 0, num_iterations, iteration_n)  # -1 would index the last one
        count_KV, _ = lax.scan(add, jnp.zeros((num_iterations, vocab_size), jnp.int32), (tokens_nT, row_n))
        # In float32, for which XLA:CPU does not have to sort. Counts are at most the number of micro-batches, and
        # therefore exact.
        most_KH, row_KH = largest(count_KV.astype(jnp.float32), num_hot)
        return jnp.sort(jnp.where(most_KH > 1, row_KH.astype(jnp.int32), NONE))

    # Most workers of a pipeline embed nothing. Counting needs no communication, so workers may take different branches.
    return lax.cond(jnp.any(iteration_n >= 0), choose, lambda: jnp.full((num_iterations, num_hot), NONE, jnp.int32))


def fetch_copies(own_vD: Float[Array, "v D"], hot_H: Int[Array, " H"], num_ranks: int) -> Float[Array, "H D"]:
    """Fetches each rank's hot rows from their owners; zeros for ``NONE``."""
    return _requests(hot_H, num_ranks).fetch(own_vD, jnp.zeros((len(hot_H), own_vD.shape[1]), own_vD.dtype))


def add_gradients_of_copies(
    total_vD: Float[Array, "v D"],
    d_copies_HD: Float[Array, "H D"],
    hot_H: Int[Array, " H"],
    num_ranks: int,
    wire_dtype: DTypeLike,
) -> Float[Array, "v D"]:
    """Adds the gradients of all ranks' copies to the gradients for this rank's rows.

    Args:
        total_vD: gradients of this rank's rows.
        d_copies_HD: gradients of this rank's copies.
        hot_H: int32, the copied rows, see ``choose_hot_rows``.
        num_ranks: number of ranks that share the rows, N.
        wire_dtype: dtype of gradients on the wire.
    """
    return _requests(hot_H, num_ranks).add_on_owners(d_copies_HD.astype(wire_dtype), total_vD)
