"""FlexMoE's placement policy: at intervals, shifts replicas one at a time to the most loaded expert.

Shape suffixes: L expert layers, E experts, N expert ranks, S slots per rank, M = N * S slots of a layer.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from swift.errors import SettingError
from swift.experts.placement.policy import uniform_placement
from swift.experts.placement.replicas import replica_counts


class FlexMoEState(NamedTuple):
    """State of FlexMoE; all layers share it, so that they rebalance in the same iteration."""

    iteration: jax.Array  # int32[], iterations since the last rebalance


@dataclass(frozen=True)
class FlexMoE:
    """Rebalances every ``interval`` iterations, one shift at a time (FlexMoE, SIGMOD'23).

    A shift takes one slot from the expert that would have the smallest load per replica without it, and gives the slot
    to the expert with the largest load per replica, provided that the giver stays below that load. The giver loses the
    last of its slots in flat order. Every other slot keeps its expert, so only the slots that change have to migrate.

    The largest load per replica never rises, and a rebalance ends only at the minimum over all placements, up to
    float32 rounding: if no expert can spare a slot, none could in a better placement. No slot changes twice in one
    rebalance: an expert that received a slot cannot spare one later, and an expert that gave one never receives one.

    Args:
        interval: iterations between rebalances.

    Raises:
        SettingError: the interval is below 1.

    >>> policy = FlexMoE(interval=1)
    >>> placement_LNS, state = policy.init(num_layers=1, num_classes=3, num_ranks=3, slots_per_rank=2)
    >>> placement_LNS.tolist()
    [[[0, 0], [1, 1], [2, 2]]]
    >>> policy(jnp.array([[10, 70, 20]]), placement_LNS, state)[0].tolist()
    [[[0, 1], [1, 1], [2, 1]]]
    """

    interval: int = 10

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise SettingError("FlexMoE.interval", self.interval, "at least 1 iteration")

    @property
    def name(self) -> str:
        """Short name for tables."""
        return f"flexmoe({self.interval})"

    def init(
        self, num_layers: int, num_classes: int, num_ranks: int, slots_per_rank: int
    ) -> tuple[Int[Array, "L N S"], FlexMoEState]:
        """Returns the uniform placement, int32[L, N, S], and a counter at zero."""
        placement_LNS = uniform_placement(num_layers, num_classes, num_ranks, slots_per_rank)
        return placement_LNS, FlexMoEState(jnp.zeros((), jnp.int32))

    def __call__(
        self, popularity_LE: Int[Array, "L E"], placement_LNS: Int[Array, "L N S"], state: FlexMoEState
    ) -> tuple[Int[Array, "L N S"], FlexMoEState]:
        """Rebalances the placement at the end of an interval, and otherwise returns it unchanged."""
        iteration = state.iteration + 1
        due = iteration >= self.interval
        counts_LE = replica_counts(placement_LNS, popularity_LE.shape[1])
        placement_LM = placement_LNS.reshape(placement_LNS.shape[0], -1)
        placement_LM = jax.vmap(partial(_rebalance, due))(popularity_LE, placement_LM, counts_LE)
        return placement_LM.reshape(placement_LNS.shape), FlexMoEState(jnp.where(due, 0, iteration))


def _rebalance(due: jax.Array, popularity_E: jax.Array, placement_M: jax.Array, counts_E: jax.Array) -> jax.Array:
    """Shifts slots of one layer as long as that reduces the largest load; changes nothing unless a rebalance is due."""
    tokens_E = popularity_E.astype(jnp.float32)
    classes_E = jnp.arange(counts_E.shape[0], dtype=jnp.int32)
    slots_M = jnp.arange(placement_M.shape[0], dtype=jnp.int32)

    def shift(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        placement_M, counts_E, _ = carry
        load_E = tokens_E / counts_E.astype(jnp.float32)
        load_without_E = tokens_E / jnp.maximum(counts_E - 1, 1).astype(jnp.float32)
        load_without_E = jnp.where(counts_E > 1, load_without_E, jnp.inf)
        helps = jnp.min(load_without_E) < jnp.max(load_E)

        taker = classes_E[jnp.argmax(load_E)]
        giver = classes_E[jnp.argmin(load_without_E)]
        slot = jnp.max(jnp.where(placement_M == giver, slots_M, -1))
        shifted_M = jnp.where(slots_M == slot, taker, placement_M)
        change_E = (classes_E == taker).astype(jnp.int32) - (classes_E == giver).astype(jnp.int32)
        return jnp.where(helps, shifted_M, placement_M), jnp.where(helps, counts_E + change_E, counts_E), helps

    return lax.while_loop(lambda carry: carry[2], shift, (placement_M, counts_E, due))[0]
