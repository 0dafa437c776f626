"""Hot rows of a table in shares: a rank has copies of the rows that it needs most, for as long as an iteration.

A row that several micro-batches of a rank need is fetched once, before the first of them, and the sum of its gradients
is sent once, after the last (RecShard's placement by popularity). The popularity is that of the iteration itself, whose
tokens are known when it begins: so nothing has to be remembered from one iteration to the next, and a row has a copy
where it saves a request at least. What all ranks need often, all of them have.

Legend: N ranks, V rows of the table, v = V / N those of a rank, H hot rows of a rank, n micro-batches, T tokens of a
rank in each, K iterations, D width.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from swift.largest import largest
from swift.models.vocabulary.row_look_up import NONE, Requests, requests_at_once

TOKENS_PER_ROW = 16
"""Tokens of a micro-batch for each hot row. Four would save up to a quarter of the bytes that are left with 16
micro-batches, and take 9 MB more for OLMoE's width: more memory than a plain look-up by more than a tenth."""


def num_hot_rows(num_tokens: int, vocab_size: int, num_microbatches: int) -> int:
    """Rows that a rank may have copies of, H; none where there is one micro-batch, which asks for each row once.

    Args:
        num_tokens: tokens of a rank in a micro-batch, T.
        vocab_size: V.
        num_microbatches: micro-batches of an iteration in a pipeline.
    """
    return min(-(-num_tokens // TOKENS_PER_ROW), vocab_size) if num_microbatches > 1 else 0


def choose_hot_rows(
    tokens_nT: Int[Array, "n T"], iteration_n: Int[Array, " n"], num_iterations: int, vocab_size: int, num_hot: int
) -> Int[Array, "K H"]:
    """Chooses the rows that most micro-batches of an iteration need, of those that at least two do.

    Args:
        tokens_nT: int32, tokens of this rank.
        iteration_n: int32, the iteration of a micro-batch; -1: it counts in none.
        num_iterations: K.
        vocab_size: V.
        num_hot: H.

    Returns:
        int32, for each iteration ascending, after ``NONE`` for none.
    """

    def add(count_KV: jax.Array, microbatch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        tokens_T, iteration = microbatch
        is_needed_V = jnp.zeros(vocab_size, jnp.int32).at[tokens_T].set(1)
        return count_KV.at[iteration].add(is_needed_V, mode="drop"), None

    def choose() -> jax.Array:
        row_n = jnp.where(iteration_n < 0, num_iterations, iteration_n)  # -1 would be the last one
        count_KV, _ = lax.scan(add, jnp.zeros((num_iterations, vocab_size), jnp.int32), (tokens_nT, row_n))
        # As float32, which XLA:CPU need not sort; at most one for each micro-batch, so they stay exact.
        most_KH, row_KH = largest(count_KV.astype(jnp.float32), num_hot)
        return jnp.sort(jnp.where(most_KH > 1, row_KH.astype(jnp.int32), NONE))

    # Most workers of a pipeline embed nothing. Counting is local, so it may be in a branch that only some of them take.
    return lax.cond(jnp.any(iteration_n >= 0), choose, lambda: jnp.full((num_iterations, num_hot), NONE, jnp.int32))


def fetch_copies(own_vD: Float[Array, "v D"], hot_H: Int[Array, " H"], num_ranks: int) -> Float[Array, "H D"]:
    """Fetches the hot rows of each rank from their owners; zeros for ``NONE``."""
    return _requests(hot_H, num_ranks).fetch(own_vD, jnp.zeros((len(hot_H), own_vD.shape[1]), own_vD.dtype))


def add_gradients_of_copies(
    total_vD: Float[Array, "v D"],
    d_copies_HD: Float[Array, "H D"],
    hot_H: Int[Array, " H"],
    num_ranks: int,
    wire_dtype: DTypeLike,
) -> Float[Array, "v D"]:
    """Adds the gradients of all ranks' copies to those of this rank's rows.

    Args:
        total_vD: gradients of this rank's rows.
        d_copies_HD: gradients of its copies.
        hot_H: int32, the rows that they are copies of, see ``choose_hot_rows``.
        num_ranks: N.
        wire_dtype: dtype of gradients on the wire.
    """
    return _requests(hot_H, num_ranks).add_on_owners(d_copies_HD.astype(wire_dtype), total_vD)


def _requests(hot_H: jax.Array, num_ranks: int) -> Requests:
    return Requests.of(hot_H, requests_at_once(len(hot_H), num_ranks), num_ranks)
