"""Replicas per class: counted in a placement, laid out as one, and judged against popularity.

Shape suffixes: L expert layers, E classes, N expert ranks, S slots per rank.
"""

import jax
import jax.numpy as jnp


def replica_counts(placement_LNS: jax.Array, num_classes: int) -> jax.Array:
    """Number of slots that hold each class.

    Args:
        placement_LNS: int32[L, N, S], the class in every slot, in any order.
        num_classes: E.

    Returns:
        int32[L, E]; every row sums to N * S.

    >>> replica_counts(jnp.array([[[0, 2], [1, 0]]]), num_classes=3).tolist()
    [[2, 1, 1]]
    """
    return jnp.sum(jax.nn.one_hot(placement_LNS, num_classes, dtype=jnp.int32), axis=(1, 2), dtype=jnp.int32)


def contiguous(counts_E: jax.Array, num_ranks: int, slots_per_rank: int) -> jax.Array:
    """One layer's placement in class order: the replicas of a class fill a rank before the next (SYMI, Algorithm 1).

    Args:
        counts_E: int32[E], replicas of each class; they sum to ``num_ranks * slots_per_rank``.
        num_ranks: N.
        slots_per_rank: S.

    Returns:
        int32[N, S], ascending in flat order.

    >>> contiguous(jnp.array([3, 1, 2]), num_ranks=3, slots_per_rank=2).tolist()
    [[0, 0], [0, 1], [2, 2]]
    """
    classes_E = jnp.arange(counts_E.shape[0], dtype=jnp.int32)
    flat = jnp.repeat(classes_E, counts_E, total_repeat_length=num_ranks * slots_per_rank)
    return flat.reshape(num_ranks, slots_per_rank)


def changed_slots(old_LNS: jax.Array, new_LNS: jax.Array) -> jax.Array:
    """Number of slots, over all layers, whose class differs between two placements: what has to migrate.

    Args:
        old_LNS: int32[L, N, S].
        new_LNS: int32[L, N, S].

    Returns:
        int32 scalar.

    >>> int(changed_slots(jnp.array([[[0, 1], [1, 2]]]), jnp.array([[[0, 1], [0, 2]]])))
    1
    """
    return jnp.sum(old_LNS != new_LNS, dtype=jnp.int32)


def load_imbalance(popularity_LE: jax.Array, replicas_LE: jax.Array) -> jax.Array:
    """Largest load per replica over the mean load per slot, for each layer.

    Args:
        popularity_LE: int32[L, E], tokens per class, before any drop.
        replicas_LE: int32[L, E], at least one per class.

    Returns:
        float32[L]: 1.0 when every slot is as loaded as every other, and when there are no tokens.

    >>> load_imbalance(jnp.array([[6, 2]]), jnp.array([[2, 2]])).tolist()
    [1.5]
    """
    total_L = total_tokens(popularity_LE)
    slots_L = jnp.sum(replicas_LE, axis=-1, dtype=jnp.int32).astype(jnp.float32)
    peak_L = jnp.max(popularity_LE.astype(jnp.float32) / replicas_LE.astype(jnp.float32), axis=-1)
    return jnp.where(total_L > 0, peak_L / (jnp.maximum(total_L, 1.0) / slots_L), 1.0)


def total_tokens(popularity_E: jax.Array) -> jax.Array:
    """Sum of the popularity over its last dim, the same on every backend and without overflow.

    Args:
        popularity_E: int32[..., E], not negative.

    Returns:
        float32[...].

    >>> float(total_tokens(jnp.array([2**31 - 1, 1])))
    2147483648.0
    """
    # A float32 sum depends on the order in which a backend adds, and an int32 sum may overflow: add integer halves.
    high = jnp.sum(popularity_E >> 16, axis=-1, dtype=jnp.int32)
    low = jnp.sum(popularity_E & 0xFFFF, axis=-1, dtype=jnp.int32)
    return high.astype(jnp.float32) * 65536 + low.astype(jnp.float32)
