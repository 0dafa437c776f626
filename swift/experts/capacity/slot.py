"""Dispatch with capacity by slot: assigns (token, choice) pairs to rows of slots, and moves tokens there and back.

Capacity is local: a source rank may send an expert at most replicas * C of its pairs, in token order, then choice
order, where C is the number of rows that a slot reserves for each source. Pairs are assigned to the replicas
round-robin; pairs beyond the capacity are dropped. Padding takes up no rows. By DeepSpeed's rules an expert's capacity
does not grow with its number of replicas, and all first choices come before any second one.

Legend: T tokens, K choices, A = T * K pairs, E experts, N ranks, S slots of a rank, R = N * S * C rows, D model dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Pairs(NamedTuple):
    """The (token, choice) pairs of a rank, in token order, then choice order."""

    class_A: jax.Array  # int32, the chosen expert
    valid_A: jax.Array  # bool, False for padding and where a token has no choice
    position_A: jax.Array  # int32, number of earlier pairs with the same expert
    popularity_E: jax.Array  # int32, pairs of each expert

    @classmethod
    def of(
        cls,
        choices_TK: Int[Array, "T K"],
        valid_T: Bool[Array, " T"],
        num_classes: int,
        is_choice_TK: Bool[Array, "T K"] | None = None,
        *,
        first_choices_first: bool = False,
    ) -> "Pairs":
        """Builds the (token, choice) pairs from the choices of a rank's tokens.

        Args:
            choices_TK: int32, the chosen experts.
            valid_T: False for padding.
            num_classes: number of experts, E.
            is_choice_TK: False where a token has fewer than K experts; None if all have K.
            first_choices_first: whether positions count all first choices before any second one, instead of going token
                by token.
        """
        class_A = choices_TK.reshape(-1).astype(jnp.int32)
        valid_A = jnp.repeat(valid_T, choices_TK.shape[1])
        if is_choice_TK is not None:
            valid_A = valid_A & is_choice_TK.reshape(-1)
        wants_AE = (class_A[:, None] == jnp.arange(num_classes, dtype=jnp.int32)[None]) & valid_A[:, None]
        if first_choices_first:
            wants_TKE = wants_AE.reshape(*choices_TK.shape, num_classes)
            up_to_XE = jnp.cumsum(wants_TKE.swapaxes(0, 1).reshape(wants_AE.shape), axis=0, dtype=jnp.int32)
            up_to_KTE = up_to_XE.reshape(*choices_TK.shape[::-1], num_classes)
            up_to_AE = up_to_KTE.swapaxes(0, 1).reshape(wants_AE.shape)
        else:
            up_to_AE = jnp.cumsum(wants_AE, axis=0, dtype=jnp.int32)
        position_A = jnp.sum(jnp.where(wants_AE, up_to_AE - 1, 0), axis=1)
        return cls(class_A, valid_A, position_A, jnp.sum(wants_AE, axis=0, dtype=jnp.int32))


class Dispatch(NamedTuple):
    """Assignment of a rank's (token, choice) pairs to rows, and its inverse."""

    row_of_pair_A: jax.Array  # int32, R for dropped pairs and padding
    pair_of_row_R: jax.Array  # int32, A for empty rows


def assign_rows(
    pairs: Pairs, placement_NS: Int[Array, "N S"], rows_per_slot: int, rows_per_class: int | None = None
) -> tuple[Dispatch, Int[Array, " E"]]:
    """Assigns every pair to a row, or drops it.

    Slots may hold the experts in any order; a slot without an expert stays empty.

    Args:
        pairs: (token, choice) pairs of this rank.
        placement_NS: int32, the expert in every slot.
        rows_per_slot: rows of a slot for one source, C.
        rows_per_class: maximum rows over all slots of an expert for one source; None if only the slots limit them.

    Returns:
        (the assignment, dropped pairs of each expert, int32[E]).
    """
    num_classes, num_rows = pairs.popularity_E.size, placement_NS.size * rows_per_slot
    slot_class = placement_NS.reshape(-1)
    classes_1E = jnp.arange(num_classes, dtype=jnp.int32)[None]
    replicas_E = jnp.sum(slot_class[:, None] == classes_1E, axis=0, dtype=jnp.int32)
    first_E = jnp.sum(slot_class[:, None] < classes_1E, axis=0, dtype=jnp.int32)
    slots_by_class = jnp.argsort(slot_class, stable=True).astype(jnp.int32)

    class_A, position_A = pairs.class_A, pairs.position_A
    replicas_A = jnp.maximum(replicas_E[class_A], 1)
    room_E = replicas_E * rows_per_slot
    if rows_per_class is not None:
        room_E = jnp.minimum(room_E, rows_per_class)
    kept_A = pairs.valid_A & (position_A < room_E[class_A])
    slot_A = slots_by_class[jnp.where(kept_A, first_E[class_A] + position_A % replicas_A, 0)]
    row_of_pair = jnp.where(kept_A, slot_A * rows_per_slot + position_A // replicas_A, num_rows)
    dropped_E = jnp.maximum(pairs.popularity_E - room_E, 0)
    return Dispatch(row_of_pair, inverse_rows(row_of_pair, num_rows)), dropped_E


def inverse_rows(row_of_X: Int[Array, " X"], num_rows: int) -> Int[Array, " R"]:
    """Inverts an assignment of X items to rows: computes the item in every row, int32[num_rows]; X if it is empty."""
    owners = jnp.arange(row_of_X.size, dtype=jnp.int32)
    return jnp.full(num_rows, row_of_X.size, jnp.int32).at[row_of_X].set(owners, mode="drop")


@jax.custom_vjp
def take_rows(x_XD: Float[Array, "X D"], index_Y: Int[Array, " Y"], inverse_X: Int[Array, " X"]) -> Float[Array, "Y D"]:
    """Gathers rows, ``y[i] = x[index[i]]``; zeros where the index is out of range.

    No row is taken twice, and ``inverse[j]`` is the position to which row j goes (or out of range). The gradient is
    therefore a gather, too; autodiff's scatter-add would be slow and, on GPU, not deterministic.
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


def send(x_TD: Float[Array, "T D"], dispatch: Dispatch, num_choices: int) -> Float[Array, "R D"]:
    """Gathers the rows ``[R, D]`` that this rank sends, slot by slot."""
    return take_rows(jnp.repeat(x_TD, num_choices, axis=0), dispatch.pair_of_row_R, dispatch.row_of_pair_A)


def combine(rows_RD: Float[Array, "R D"], dispatch: Dispatch, gates_TK: Float[Array, "T K"]) -> Float[Array, "T D"]:
    """Sums a token's expert outputs ``[T, D]``, weighted by the gates; dropped pairs contribute zeros."""
    return apply_gates(take_rows(rows_RD, dispatch.row_of_pair_A, dispatch.pair_of_row_R), gates_TK)


def apply_gates(pairs_AD: Float[Array, "A D"], gates_TK: Float[Array, "T K"]) -> Float[Array, "T D"]:
    """Sums the outputs of each token's pairs, weighted by the gates: ``[A, D]`` -> ``[T, D]``."""
    num_tokens, top_k = gates_TK.shape
    pairs_TKD = pairs_AD.reshape(num_tokens, top_k, -1)
    return jnp.sum(pairs_TKD * gates_TK[..., None].astype(pairs_AD.dtype), axis=1)
