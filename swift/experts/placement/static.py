"""The static placement of DeepSpeed-MoE: every class keeps the same number of replicas for ever."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swift.experts.placement.policy import PolicyState, check_slots


@dataclass(frozen=True)
class Static:
    """Uniform replicas, S * N / E for each class, never changed; the first classes have one more if need be.

    The slots go round the classes, as DeepSpeed lays them out: the replicas of a class are on different ranks, E / S
    ranks apart where S divides E.

    >>> Static().init(num_layers=1, num_classes=4, num_ranks=4, slots_per_rank=2)[0].tolist()
    [[[0, 1], [2, 3], [0, 1], [2, 3]]]
    """

    @property
    def name(self) -> str:
        """Short name for tables."""
        return "static"

    def init(
        self, num_layers: int, num_classes: int, num_ranks: int, slots_per_rank: int
    ) -> tuple[jax.Array, PolicyState]:
        """The round-robin placement, int32[L, N, S], and no state."""
        check_slots(num_classes, num_ranks, slots_per_rank)
        placement_NS = jnp.arange(num_ranks * slots_per_rank, dtype=jnp.int32) % num_classes
        return jnp.broadcast_to(placement_NS.reshape(1, num_ranks, -1), (num_layers, num_ranks, slots_per_rank)), ()

    def __call__(
        self,
        popularity_LE: jax.Array,  # noqa: ARG002 - part of the interface
        placement_LNS: jax.Array,
        state: PolicyState,
    ) -> tuple[jax.Array, PolicyState]:
        """The placement as it is."""
        return placement_LNS, state
