"""The placement whose most loaded replica has the fewest tokens.

Shape suffixes: L expert layers, E classes, N expert ranks, S slots per rank.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from swift.experts.placement.policy import PolicyState, StartsUniform, place_contiguously


@dataclass(frozen=True)
class MinMax(StartsUniform):
    """Gives the next replica to the class with the most tokens per replica, until the slots are full; in class order.

    No placement has a smaller largest load per replica, up to float32 rounding: a class is given another replica only
    while its load is the largest, and no placement with a smaller largest load can leave it without.

    >>> policy = MinMax()
    >>> placement_LNS, state = policy.init(num_layers=1, num_classes=3, num_ranks=3, slots_per_rank=2)
    >>> policy(jnp.array([[21, 60, 19]]), placement_LNS, state)[0].tolist()
    [[[0, 0], [1, 1], [1, 2]]]
    """

    @property
    def name(self) -> str:
        """Short name for tables."""
        return "minmax"

    def __call__(
        self, popularity_LE: jax.Array, placement_LNS: jax.Array, state: PolicyState
    ) -> tuple[jax.Array, PolicyState]:
        """The placement with the smallest largest load per replica; uniform for a layer without tokens."""
        return place_contiguously(minmax_replicas, popularity_LE, placement_LNS), state


def minmax_replicas(popularity_E: jax.Array, num_slots: int) -> jax.Array:
    """Replicas of every class, int32[E], that make the largest load per replica the smallest."""
    tokens_E = popularity_E.astype(jnp.float32)
    num_classes = popularity_E.shape[0]
    classes_E = jnp.arange(num_classes)

    def grow(_: jax.Array, counts_E: jax.Array) -> jax.Array:
        load_E = tokens_E / counts_E.astype(jnp.float32)
        # Equal loads go to the fewest replicas first, so that no tokens at all give a uniform placement.
        hottest = jnp.argmin(jnp.where(load_E == jnp.max(load_E), counts_E, num_slots))
        return counts_E + (classes_E == hottest).astype(jnp.int32)

    return lax.fori_loop(0, num_slots - num_classes, grow, jnp.ones(num_classes, jnp.int32))
