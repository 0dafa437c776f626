"""The static placement of DeepSpeed-MoE: every expert keeps its replicas for the whole run."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from swift.experts.placement.policy import PolicyState, check_slots


@dataclass(frozen=True)
class Static:
    """Uniform replicas, S * N / E per expert, never changed; the first experts have one more if there is a remainder.

    Slots are assigned round-robin, as DeepSpeed lays them out: the replicas of an expert are on different ranks, E / S
    ranks apart where S divides E.

    >>> Static().init(num_layers=1, num_classes=4, num_ranks=4, slots_per_rank=2)[0].tolist()
    [[[0, 1], [2, 3], [0, 1], [2, 3]]]
    """

    name = "static"

    def init(
        self, num_layers: int, num_classes: int, num_ranks: int, slots_per_rank: int
    ) -> tuple[Int[Array, "L N S"], PolicyState]:
        """Returns the round-robin placement, int32[L, N, S], and no state."""
        check_slots(num_classes, num_ranks, slots_per_rank)
        placement_NS = jnp.arange(num_ranks * slots_per_rank, dtype=jnp.int32) % num_classes
        return jnp.broadcast_to(placement_NS.reshape(1, num_ranks, -1), (num_layers, num_ranks, slots_per_rank)), ()

    def __call__(
        self,
        popularity_LE: Int[Array, "L E"],  # noqa: ARG002 - part of the interface
        placement_LNS: Int[Array, "L N S"],
        state: PolicyState,
    ) -> tuple[Int[Array, "L N S"], PolicyState]:
        """Returns the placement unchanged."""
        return placement_LNS, state
