"""Replicas per expert: counting them in a placement, laying them out, and measuring their balance.

A placement is valid for training if every expert has a slot and every slot holds an expert.

Shape suffixes: L expert layers, E experts, N expert ranks, S slots per rank.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def replica_counts(placement_LNS: Int[Array, "L N S"], num_classes: int) -> Int[Array, "L E"]:
    """Counts the slots that hold each expert.

    Args:
        placement_LNS: int32[L, N, S], the expert in every slot, in any order.
        num_classes: number of experts, E.

    Returns:
        int32[L, E]; every row sums to N * S.

    >>> replica_counts(jnp.array([[[0, 2], [1, 0]]]), num_classes=3).tolist()
    [[2, 1, 1]]
    """
    return jnp.sum(jax.nn.one_hot(placement_LNS, num_classes, dtype=jnp.int32), axis=(1, 2), dtype=jnp.int32)


def contiguous(counts_E: Int[Array, " E"], num_ranks: int, slots_per_rank: int) -> Int[Array, "N S"]:
    """Lays out the replicas of one layer in expert order, filling one rank after the other (SYMI, Algorithm 1).

    Args:
        counts_E: int32[E], replicas of each expert; they sum to ``num_ranks * slots_per_rank``.
        num_ranks: number of expert ranks, N.
        slots_per_rank: slots per rank, S.

    Returns:
        int32[N, S], ascending in flat order.

    >>> contiguous(jnp.array([3, 1, 2]), num_ranks=3, slots_per_rank=2).tolist()
    [[0, 0], [0, 1], [2, 2]]
    """
    classes_E = jnp.arange(counts_E.shape[0], dtype=jnp.int32)
    flat = jnp.repeat(classes_E, counts_E, total_repeat_length=num_ranks * slots_per_rank)
    return flat.reshape(num_ranks, slots_per_rank)


def changed_slots(old_LNS: Int[Array, "L N S"], new_LNS: Int[Array, "L N S"]) -> Int[Array, ""]:
    """Counts the slots, over all layers, that hold different experts in two placements and have to migrate.

    Args:
        old_LNS: int32[L, N, S], placement before.
        new_LNS: int32[L, N, S], placement after.

    Returns:
        int32 scalar.

    >>> int(changed_slots(jnp.array([[[0, 1], [1, 2]]]), jnp.array([[[0, 1], [0, 2]]])))
    1
    """
    return jnp.sum(old_LNS != new_LNS, dtype=jnp.int32)


def load_imbalance(popularity_LE: Int[Array, "L E"], replicas_LE: Int[Array, "L E"]) -> Float[Array, " L"]:
    """Computes the largest load per replica relative to the mean load per slot, for each layer.

    Args:
        popularity_LE: int32[L, E], tokens per expert, before any drop.
        replicas_LE: int32[L, E], number of replicas of each expert, at least one.

    Returns:
        float32[L]: 1.0 if all slots are equally loaded, or if there are no tokens.

    >>> load_imbalance(jnp.array([[6, 2]]), jnp.array([[2, 2]])).tolist()
    [1.5]
    """
    total_L = total_tokens(popularity_LE)
    slots_L = jnp.sum(replicas_LE, axis=-1, dtype=jnp.int32).astype(jnp.float32)
    peak_L = jnp.max(popularity_LE.astype(jnp.float32) / replicas_LE.astype(jnp.float32), axis=-1)
    return jnp.where(total_L > 0, peak_L / (jnp.maximum(total_L, 1.0) / slots_L), 1.0)


def total_tokens(popularity_E: Int[Array, "... E"]) -> Float[Array, "..."]:
    """Sums the popularity over its last dim, bit-identically on every backend and without overflow.

    Args:
        popularity_E: int32[..., E], nonnegative token counts.

    Returns:
        float32[...].

    >>> float(total_tokens(jnp.array([2**31 - 1, 1])))
    2147483648.0
    """
    # A float32 sum depends on the order in which a backend adds, and an int32 sum may overflow, so sum 16-bit halves.
    high = jnp.sum(popularity_E >> 16, axis=-1, dtype=jnp.int32)
    low = jnp.sum(popularity_E & 0xFFFF, axis=-1, dtype=jnp.int32)
    return high.astype(jnp.float32) * 65536 + low.astype(jnp.float32)


def replica_error(replicas_LE: Int[np.ndarray, "L E"], num_slots: int) -> str | None:
    """Describes the first error in a placement, given its replica counts; returns None for a valid placement.

    Args:
        replicas_LE: int[L, E], number of slots that hold each expert, without slots that have an invalid expert number.
        num_slots: number of slots of a layer.

    >>> replica_error(np.array([[2, 2, 0]]), num_slots=4)
    'expert 2 of 0 to 2 has no slot in layer 0'
    >>> replica_error(np.array([[2, 1, 1]]), num_slots=6)
    '2 slots of layer 0 hold none of the experts 0 to 2'
    """
    for layer, replicas_E in enumerate(np.asarray(replicas_LE)):
        without = np.flatnonzero(replicas_E == 0)
        if without.size:
            return f"expert {without[0]} of 0 to {len(replicas_E) - 1} has no slot in layer {layer}"
        stray = num_slots - int(replicas_E.sum())
        if stray:
            return f"{stray} slots of layer {layer} hold none of the experts 0 to {len(replicas_E) - 1}"
    return None


def placement_error(placement_LNS: Int[np.ndarray, "L N S"], num_classes: int) -> str | None:
    """Describes the first error in a placement, given the expert in every slot; returns None for a valid placement."""
    num_slots = math.prod(placement_LNS.shape[1:])
    placement_LM = placement_LNS.reshape(-1, num_slots)
    replicas_LE = [np.count_nonzero(placement_LM == number, axis=1) for number in range(num_classes)]
    return replica_error(np.stack(replicas_LE, axis=1), num_slots)
