"""Dispatch: which row of which slot every (token, choice) pair gets, and moving tokens there and back.

The rule (design: capacity is local): a source rank may send a class at most replicas * C of its pairs, in token
order, then choice order, where C is the rows of a slot that belong to one source; they go round the replicas evenly.
Pairs beyond that are dropped. Padding takes no room.

Legend: T tokens, K choices, A = T * K pairs, E classes, N ranks, S slots of a rank, R = N * S * C rows, D model dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from swift.experts.routing import count_choices


class Dispatch(NamedTuple):
    """The assignment of a rank's (token, choice) pairs to rows, and its inverse."""

    row_of_pair_A: jax.Array  # int32, R where the pair is dropped or padding
    pair_of_row_R: jax.Array  # int32, A where the row is empty
    popularity_E: jax.Array  # int32, pairs that want each class
    dropped_E: jax.Array  # int32, those of them that found no room


def assign_rows(
    choices_TK: jax.Array, valid_T: jax.Array, placement_NS: jax.Array, num_classes: int, rows_per_slot: int
) -> Dispatch:
    """Gives every pair a row, or drops it. Slots may hold the classes in any order."""
    num_tokens, top_k = choices_TK.shape
    num_pairs, num_rows = num_tokens * top_k, placement_NS.size * rows_per_slot
    classes_1E = jnp.arange(num_classes, dtype=jnp.int32)[None]
    slot_class = placement_NS.reshape(-1)
    replicas_E = jnp.sum(slot_class[:, None] == classes_1E, axis=0, dtype=jnp.int32)
    first_E = jnp.cumsum(replicas_E, dtype=jnp.int32) - replicas_E
    slots_by_class = jnp.argsort(slot_class, stable=True).astype(jnp.int32)

    class_A = choices_TK.reshape(-1).astype(jnp.int32)
    valid_A = jnp.repeat(valid_T, top_k)
    wants_AE = (class_A[:, None] == classes_1E) & valid_A[:, None]
    position_A = jnp.sum(jnp.where(wants_AE, jnp.cumsum(wants_AE, axis=0, dtype=jnp.int32) - 1, 0), axis=1)
    replicas_A = jnp.maximum(replicas_E[class_A], 1)
    kept_A = valid_A & (position_A < replicas_E[class_A] * rows_per_slot)
    slot_A = slots_by_class[jnp.where(kept_A, first_E[class_A] + position_A % replicas_A, 0)]
    row_of_pair = jnp.where(kept_A, slot_A * rows_per_slot + position_A // replicas_A, num_rows)
    pairs = jnp.arange(num_pairs, dtype=jnp.int32)
    pair_of_row = jnp.full(num_rows, num_pairs, jnp.int32).at[row_of_pair].set(pairs, mode="drop")

    popularity_E = jnp.sum(wants_AE, axis=0, dtype=jnp.int32)
    kept_E = count_choices(choices_TK, kept_A.reshape(choices_TK.shape), num_classes)
    return Dispatch(row_of_pair, pair_of_row, popularity_E, popularity_E - kept_E)


@jax.custom_vjp
def take_rows(x_XD: jax.Array, index_Y: jax.Array, inverse_X: jax.Array) -> jax.Array:
    """``y[i] = x[index[i]]``, or zeros where the index is out of range.

    No row is taken twice, and ``inverse[j]`` tells who took row j (or is out of range): so the gradient is a gather
    too, where autodiff's scatter-add would be slow and, on GPU, not deterministic.
    """
    del inverse_X
    return x_XD.at[index_Y].get(mode="fill", fill_value=0)


def _take_rows_forward(
    x_XD: jax.Array, index_Y: jax.Array, inverse_X: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return take_rows(x_XD, index_Y, inverse_X), (index_Y, inverse_X)


def _take_rows_backward(residuals: tuple[jax.Array, jax.Array], dy_YD: jax.Array) -> tuple[jax.Array, None, None]:
    index_Y, inverse_X = residuals
    return take_rows(dy_YD, inverse_X, index_Y), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def send(x_TD: jax.Array, dispatch: Dispatch, top_k: int) -> jax.Array:
    """The rows ``[R, D]`` that this rank sends, slot by slot."""
    return take_rows(jnp.repeat(x_TD, top_k, axis=0), dispatch.pair_of_row_R, dispatch.row_of_pair_A)


def combine(rows_RD: jax.Array, dispatch: Dispatch, gates_TK: jax.Array) -> jax.Array:
    """The experts' outputs ``[T, D]``, weighted by the gates; zeros for a pair that was dropped."""
    num_tokens, top_k = gates_TK.shape
    pairs_AD = take_rows(rows_RD, dispatch.row_of_pair_A, dispatch.pair_of_row_R)
    pairs_TKD = pairs_AD.reshape(num_tokens, top_k, -1)
    return jnp.sum(pairs_TKD * gates_TK[..., None].astype(rows_RD.dtype), axis=1)
