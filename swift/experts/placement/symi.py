"""SYMI's expert placement scheduler: replicas in proportion to the popularity of the previous iteration.

Shape suffixes: L expert layers, E experts, N expert ranks, S slots per rank.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from swift.experts.placement.policy import PolicyState, StartsUniform, place_contiguously
from swift.experts.placement.replicas import total_tokens


@dataclass(frozen=True)
class Symi(StartsUniform):
    """Places replicas in proportion to popularity, in expert order (SYMI, arXiv 2504.19925, Algorithm 1).

    >>> policy = Symi()
    >>> placement_LNS, state = policy.init(num_layers=1, num_classes=3, num_ranks=3, slots_per_rank=2)
    >>> policy(jnp.array([[10, 70, 20]]), placement_LNS, state)[0].tolist()
    [[[0, 1], [1, 1], [1, 2]]]
    """

    name = "symi"

    def __call__(
        self, popularity_LE: Int[Array, "L E"], placement_LNS: Int[Array, "L N S"], state: PolicyState
    ) -> tuple[Int[Array, "L N S"], PolicyState]:
        """Places replicas in proportion to popularity, or uniformly for a layer without tokens."""
        return place_contiguously(_proportional_replicas, popularity_LE, placement_LNS), state


def _proportional_replicas(popularity_E: jax.Array, num_slots: int) -> jax.Array:
    tokens_E = popularity_E.astype(jnp.float32)
    # Without tokens every goal is zero, and slots are assigned round-robin. The barrier prevents XLA from replacing the
    # division by a scalar with a multiplication by its inverse, which rounds differently and resolves ties differently.
    total_E = lax.optimization_barrier(jnp.full_like(tokens_E, jnp.maximum(total_tokens(popularity_E), 1.0)))
    goal_E = tokens_E / total_E * num_slots
    classes_E = jnp.arange(popularity_E.shape[0])

    # The paper carries diff = cnt - goal along with cnt. Both change by one together, so diff is recomputed inside the
    # loops; outside, a compiler may fuse the product in goal with the subtraction and round differently.
    def diff_E(counts_E: jax.Array) -> jax.Array:
        return counts_E.astype(jnp.float32) - goal_E

    def shrink(counts_E: jax.Array) -> jax.Array:
        # The paper's loop also visits experts with one replica, but changes only their diff, which affects nothing but
        # when they are visited again. Skipping them gives the same counts in at most E steps instead of E * E.
        widest = jnp.argmax(jnp.where(counts_E > 1, diff_E(counts_E), -jnp.inf))
        return counts_E - (classes_E == widest).astype(jnp.int32)

    def grow(counts_E: jax.Array) -> jax.Array:
        return counts_E + (classes_E == jnp.argmin(diff_E(counts_E))).astype(jnp.int32)

    counts_E = jnp.floor(jnp.maximum(goal_E, 1.0)).astype(jnp.int32)
    counts_E = lax.while_loop(lambda counts_E: jnp.sum(counts_E, dtype=jnp.int32) > num_slots, shrink, counts_E)
    return lax.while_loop(lambda counts_E: jnp.sum(counts_E, dtype=jnp.int32) < num_slots, grow, counts_E)
