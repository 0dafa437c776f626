"""Placement that minimizes the load of the most loaded replica.

Shape suffixes: L expert layers, E experts, N expert ranks, S slots per rank.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from swift.experts.placement.policy import PolicyState, StartsUniform, place_contiguously


@dataclass(frozen=True)
class MinMax(StartsUniform):
    """Gives each next replica to the expert with the most tokens per replica, until the slots are full.

    Replicas are laid out in expert order. No placement has a smaller largest load per replica, up to float32 rounding:
    an expert gets another replica only while its load is the largest, and every placement with a smaller largest load
    has to give it one, too.

    >>> policy = MinMax()
    >>> placement_LNS, state = policy.init(num_layers=1, num_classes=3, num_ranks=3, slots_per_rank=2)
    >>> policy(jnp.array([[21, 60, 19]]), placement_LNS, state)[0].tolist()
    [[[0, 0], [1, 1], [1, 2]]]
    """

    name = "minmax"

    def __call__(
        self, popularity_LE: Int[Array, "L E"], placement_LNS: Int[Array, "L N S"], state: PolicyState
    ) -> tuple[Int[Array, "L N S"], PolicyState]:
        """Places replicas so that the largest load per replica is minimal; uniformly for a layer without tokens."""
        return place_contiguously(minmax_replicas, popularity_LE, placement_LNS), state


def minmax_replicas(
    popularity_E: Int[Array, " E"], num_slots: int, first_of_ties: Bool[Array, ""] | bool = False
) -> Int[Array, " E"]:
    """Chooses the replicas of every expert, int32[E], that minimize the largest load per replica.

    Args:
        popularity_E: int32[E], tokens per expert.
        num_slots: replicas of all experts together.
        first_of_ties: whether the first of several experts with the largest load gets the next replica, as in
            DeepSeek's EPLB; otherwise the one with the fewest replicas, so that a layer without tokens becomes uniform.
    """
    tokens_E = popularity_E.astype(jnp.float32)
    num_classes = popularity_E.shape[0]
    classes_E = jnp.arange(num_classes)
    by_count = 1 - jnp.asarray(first_of_ties).astype(jnp.int32)

    def grow(_: jax.Array, counts_E: jax.Array) -> jax.Array:
        load_E = tokens_E / counts_E.astype(jnp.float32)
        hottest = jnp.argmin(jnp.where(load_E == jnp.max(load_E), counts_E * by_count, num_slots))
        return counts_E + (classes_E == hottest).astype(jnp.int32)

    return lax.fori_loop(0, num_slots - num_classes, grow, jnp.ones(num_classes, jnp.int32))
