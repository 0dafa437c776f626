"""Exact capacity: after routing, slots are reassigned so that every rank gets an even share of the tokens.

Nothing is dropped, whatever the load, if slots * ranks >= experts + ranks - 1. The proof fills one rank after the other
with R tokens, the mean rounded up. S is the number of slots of a rank. With n ranks left, K = (S - 1) * n + 1 experts
have at most n * R tokens; initially K is at least the number of experts, and experts without tokens make up the
difference. Sort the experts by their tokens, and take the first S consecutive ones that together have at least R
tokens. All of them but the last together have at most R tokens: either they and the expert before them together have
less than R, or they are the S - 1 smallest of all, whose mean is at most n * R / K < R / (S - 1). The rank therefore
gets all tokens of these S - 1 experts, and as many tokens of the last one as fit. This leaves n - 1 ranks, at most
(n - 1) * R tokens, and S - 1 experts fewer: K' = (S - 1) * (n - 1) + 1. If no S consecutive experts have R tokens, the
rank gets all tokens of the S largest experts, and the same holds for all later ranks.

Legend: E experts, N ranks, S slots of a rank, I experts and fillers without tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


class Assignment(NamedTuple):
    """Expert placement for one micro-batch, and each slot's number of tokens."""

    placement_NS: jax.Array  # int32, the expert in every slot
    tokens_NS: jax.Array  # int32, number of the slot's (token, choice) pairs


def assign_slots(tokens_E: Int[Array, " E"], num_ranks: int, num_slots: int) -> Assignment:
    """Assigns experts to slots so that each rank gets at most the mean number of tokens per rank, rounded up.

    Args:
        tokens_E: int32, (token, choice) pairs of each expert; their sum is below 2^30.
        num_ranks: number of ranks, N.
        num_slots: slots of a rank, S; ``ExactCapacity.check_slots`` raises an error for too few.

    >>> [leaf.tolist() for leaf in assign_slots(jnp.array([5, 1, 0]), num_ranks=2, num_slots=2)]
    [[[1, 0], [2, 0]], [[1, 2], [0, 3]]]
    """
    num_classes = tokens_E.shape[0]
    num_items = (num_slots - 1) * num_ranks + 1
    assert num_items >= num_classes, "too few slots: see ExactCapacity.check_slots"
    share = (jnp.sum(tokens_E, dtype=jnp.int32) + num_ranks - 1) // num_ranks
    # A filler is an item without tokens. Its slot must still hold some expert's weights: those of the last expert.
    tokens_I = jnp.concatenate([tokens_E, jnp.broadcast_to(share * 0, (num_items - num_classes,))])

    def fill(remaining_I: jax.Array, rank: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        order_I = jnp.argsort(remaining_I, stable=True).astype(jnp.int32)
        sorted_I = remaining_I[order_I]
        up_to_I = jnp.cumsum(sorted_I, dtype=jnp.int32)
        window_sum_I = up_to_I[num_slots - 1 :] - (up_to_I - sorted_I)[: num_items - num_slots + 1]
        # Each earlier rank has used up S - 1 items, which have no tokens left and are sorted to the front.
        position_I = jnp.arange(window_sum_I.size, dtype=jnp.int32)
        is_enough_I = (window_sum_I >= share) & (position_I >= (num_slots - 1) * rank)
        first = jnp.where(jnp.any(is_enough_I), jnp.argmax(is_enough_I).astype(jnp.int32), window_sum_I.size - 1)
        item_S = lax.dynamic_slice_in_dim(order_I, first, num_slots)
        whole_S = remaining_I[item_S]
        before = jnp.sum(whole_S[:-1], dtype=jnp.int32)
        assigned_S = whole_S.at[-1].set(jnp.minimum(whole_S[-1], share - before))
        return remaining_I.at[item_S].add(-assigned_S), (jnp.minimum(item_S, num_classes - 1), assigned_S)

    _, assigned = lax.scan(fill, tokens_I, jnp.arange(num_ranks, dtype=jnp.int32))
    return Assignment(*assigned)
