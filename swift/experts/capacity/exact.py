"""Exact capacity: after routing, slots are assigned anew, so that every rank gets an even share of the tokens.

Nothing is dropped, whatever the load, if slots * ranks >= experts + ranks - 1. Proof, by filling one rank after the
other with R tokens, the mean rounded up. Let S be the slots of a rank, and let K = (S - 1) * n + 1 experts have at most
n * R tokens for the n ranks that are left; at first K is at least the number of experts, and experts without tokens
make up the difference. Sort the experts by their tokens, and take the first S neighbours that have at least R tokens
together. All but the last of them have at most R: they are less than R with the expert before them, or they are the
S - 1 smallest of all, whose mean is at most n * R / K < R / (S - 1). So the rank gets those S - 1 experts whole, and of
the last one what fits. Left are n - 1 ranks, at most (n - 1) * R tokens, and S - 1 experts fewer: K' = (S - 1) *
(n - 1) + 1. If no S neighbours have R tokens, the S largest go to the rank as they are, and so on for all others.

Legend: E experts, N ranks, S slots of a rank, I experts and fillers without tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from swift.errors import SettingError


class Assignment(NamedTuple):
    """The slots of a micro-batch."""

    placement_NS: jax.Array  # int32, the expert in every slot
    tokens_NS: jax.Array  # int32, its tokens


def check_exact(num_classes: int, num_ranks: int, slots_per_rank: int) -> None:
    """Raises SettingError if there may be too few slots for an even share of any load."""
    if num_ranks * slots_per_rank < num_classes + num_ranks - 1:
        enough = exact_slots(num_classes, num_ranks)
        raise SettingError(
            "ExpertConfig.slots_per_rank",
            slots_per_rank,
            f"at least {enough} with ExpertConfig.capacity = 'exact', for {num_classes} experts on {num_ranks} expert "
            "ranks: slots * ranks must be at least experts + ranks - 1",
        )


def exact_slots(num_classes: int, num_ranks: int) -> int:
    """The fewest slots of a rank with which every load can be shared evenly.

    >>> exact_slots(8, 8), exact_slots(9, 8), exact_slots(5, 1)
    (2, 2, 5)
    """
    return -(-(num_classes + num_ranks - 1) // num_ranks)


def assign_slots(tokens_E: Int[Array, " E"], num_ranks: int, num_slots: int) -> Assignment:
    """Shares the tokens of all experts evenly among ranks: each gets at most their mean, rounded up.

    Args:
        tokens_E: int32, (token, choice) pairs of each expert; their sum is below 2^30.
        num_ranks: number of ranks, N.
        num_slots: slots of a rank, S; ``check_exact`` says how many are enough.

    >>> [leaf.tolist() for leaf in assign_slots(jnp.array([5, 1, 0]), num_ranks=2, num_slots=2)]
    [[[1, 0], [2, 0]], [[1, 2], [0, 3]]]
    """
    num_classes = tokens_E.shape[0]
    num_items = (num_slots - 1) * num_ranks + 1
    assert num_items >= num_classes, "too few slots: see check_exact"
    share = (jnp.sum(tokens_E, dtype=jnp.int32) + num_ranks - 1) // num_ranks
    # Fillers stand in slots that stay empty; as the weights of some expert have to be there, it is the last one.
    tokens_I = jnp.concatenate([tokens_E, jnp.broadcast_to(share * 0, (num_items - num_classes,))])

    def fill(remaining_I: jax.Array, rank: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        order_I = jnp.argsort(remaining_I, stable=True).astype(jnp.int32)
        sorted_I = remaining_I[order_I]
        up_to_I = jnp.cumsum(sorted_I, dtype=jnp.int32)
        window_sum_I = up_to_I[num_slots - 1 :] - (up_to_I - sorted_I)[: num_items - num_slots + 1]
        # The smallest are those that went to the ranks before: S - 1 for each of them.
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
