"""Interface of placement policies, the steps that most policies share, and the static policy.

Shape suffixes: L expert layers, E experts, N expert ranks, S slots per rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from swift.errors import SettingError
from swift.experts.placement.replicas import contiguous

PolicyState: TypeAlias = Any
"""State of a policy: a pytree of arrays, or the empty tuple for a stateless policy."""


class PlacementPolicy(Protocol):
    """Chooses the next iteration's placement from this iteration's popularity.

    A policy is a frozen dataclass without arrays. It is thus hashable, and a jitted function may close over it or take
    it as a static argument. It is pure and deterministic: every rank calls it with the same popularity and computes the
    same placement without communication. Every expert has a slot in every placement; slots may be in any order.
    """

    @property
    def name(self) -> str:
        """Short name for tables."""

    def init(
        self, num_layers: int, num_classes: int, num_ranks: int, slots_per_rank: int
    ) -> tuple[Int[Array, "L N S"], PolicyState]:
        """Returns the placement before any popularity is known, int32[L, N, S], and the policy's initial state.

        Raises:
            SettingError: there are fewer slots than experts.
        """

    def __call__(
        self, popularity_LE: Int[Array, "L E"], placement_LNS: Int[Array, "L N S"], state: PolicyState
    ) -> tuple[Int[Array, "L N S"], PolicyState]:
        """Computes the next placement and state.

        Args:
            popularity_LE: int32[L, E], tokens per expert in this iteration, before any drop.
            placement_LNS: int32[L, N, S], placement of this iteration.
            state: state returned by ``init`` or by the previous call.

        Returns:
            The placement of the next iteration, int32[L, N, S], and the new state, a pytree of the same structure.
        """


def check_slots(num_classes: int, num_ranks: int, slots_per_rank: int) -> None:
    """Raises SettingError if there are fewer slots than experts."""
    if num_ranks * slots_per_rank < num_classes:
        enough = -(-num_classes // num_ranks)
        raise SettingError(
            "ExpertConfig.slots_per_rank",
            slots_per_rank,
            f"at least {enough}, for each of {num_classes} experts to have a slot on {num_ranks} expert ranks",
        )


def uniform_placement(num_layers: int, num_classes: int, num_ranks: int, slots_per_rank: int) -> Int[Array, "L N S"]:
    """Places equally many replicas of every expert, in expert order.

    If the number of slots is not a multiple of the number of experts, the first experts get one more replica.

    Args:
        num_layers: number of expert layers, L.
        num_classes: number of experts, E.
        num_ranks: number of expert ranks, N.
        slots_per_rank: slots per rank, S.

    Returns:
        int32[L, N, S].

    Raises:
        SettingError: there are fewer slots than experts.

    >>> uniform_placement(num_layers=1, num_classes=3, num_ranks=2, slots_per_rank=2).tolist()
    [[[0, 0], [1, 2]]]
    """
    check_slots(num_classes, num_ranks, slots_per_rank)
    replicas, remainder = divmod(num_ranks * slots_per_rank, num_classes)
    counts_E = replicas + (jnp.arange(num_classes) < remainder).astype(jnp.int32)
    placement_NS = contiguous(counts_E, num_ranks, slots_per_rank)
    return jnp.broadcast_to(placement_NS[None], (num_layers, num_ranks, slots_per_rank))


class StartsUniform:
    """Base class of stateless policies that start from the uniform placement."""

    def init(
        self, num_layers: int, num_classes: int, num_ranks: int, slots_per_rank: int
    ) -> tuple[Int[Array, "L N S"], PolicyState]:
        """Returns the uniform placement, int32[L, N, S], and the empty state."""
        return uniform_placement(num_layers, num_classes, num_ranks, slots_per_rank), ()


def place_contiguously(
    replicas_of: Callable[[jax.Array, int], jax.Array],
    popularity_LE: Int[Array, "L E"],
    placement_LNS: Int[Array, "L N S"],
) -> Int[Array, "L N S"]:
    """Places every layer in expert order, with replica counts computed by a rule from the layer's popularity.

    Args:
        replicas_of: rule ``(popularity int32[E], num_slots) -> replicas int32[E]``, with at least one replica per
            expert and ``num_slots`` in total.
        popularity_LE: int32[L, E], tokens per expert.
        placement_LNS: int32[L, N, S], current placement; only its shape is used.

    Returns:
        int32[L, N, S].
    """
    _, num_ranks, slots_per_rank = placement_LNS.shape
    num_slots = num_ranks * slots_per_rank
    assert num_slots >= popularity_LE.shape[1], "a rule could loop forever if experts outnumber slots"

    def place(popularity_E: jax.Array) -> jax.Array:
        return contiguous(replicas_of(popularity_E, num_slots), num_ranks, slots_per_rank)

    return jax.vmap(place)(popularity_LE)


@dataclass(frozen=True)
class Static:
    """Keeps a uniform placement: S * N / E replicas per expert, and one more for the first experts if not divisible.

    Slots are assigned round-robin, as in DeepSpeed: the replicas of an expert are on different ranks, E / S ranks apart
    if S divides E.

    >>> Static().init(num_layers=1, num_classes=4, num_ranks=4, slots_per_rank=2)[0].tolist()
    [[[0, 1], [2, 3], [0, 1], [2, 3]]]
    """

    name = "static"

    def init(
        self, num_layers: int, num_classes: int, num_ranks: int, slots_per_rank: int
    ) -> tuple[Int[Array, "L N S"], PolicyState]:
        """Returns the round-robin placement, int32[L, N, S], and the empty state."""
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
