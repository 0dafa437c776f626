"""What a placement policy is, and the two steps that most policies share.

Shape suffixes: L expert layers, E classes, N expert ranks, S slots per rank.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from swift.errors import SettingError
from swift.experts.placement.replicas import contiguous

PolicyState: TypeAlias = Any
"""A pytree of arrays; the empty tuple for a policy that remembers nothing."""


class PlacementPolicy(Protocol):
    """Chooses the next iteration's placement from this iteration's popularity.

    A policy is a frozen dataclass without arrays: hashable, so a jitted function may close over it or take it as a
    static argument. It is pure and deterministic; every rank calls it with the same popularity and, without any
    communication, comes to the same placement. Every class has a slot in every placement. Slots are in no particular
    order.
    """

    @property
    def name(self) -> str:
        """Short name for tables."""

    def init(
        self, num_layers: int, num_classes: int, num_ranks: int, slots_per_rank: int
    ) -> tuple[jax.Array, PolicyState]:
        """The placement before any popularity is known, int32[L, N, S], and the policy's first state.

        Raises:
            SettingError: there are fewer slots than classes.
        """

    def __call__(
        self, popularity_LE: jax.Array, placement_LNS: jax.Array, state: PolicyState
    ) -> tuple[jax.Array, PolicyState]:
        """The next placement and state.

        Args:
            popularity_LE: int32[L, E], tokens per class of this iteration, before any drop.
            placement_LNS: int32[L, N, S], the placement of this iteration.
            state: what ``init`` or the previous call returned.

        Returns:
            The placement int32[L, N, S] of the next iteration, and the new state, a pytree of the same structure.
        """


def check_slots(num_classes: int, num_ranks: int, slots_per_rank: int) -> None:
    """Raises SettingError where there are fewer slots than classes."""
    if num_ranks * slots_per_rank < num_classes:
        enough = -(-num_classes // num_ranks)
        raise SettingError(
            "ExpertConfig.slots_per_rank",
            slots_per_rank,
            f"at least {enough}, for {num_classes} classes to have a slot each on {num_ranks} expert ranks",
        )


def uniform_placement(num_layers: int, num_classes: int, num_ranks: int, slots_per_rank: int) -> jax.Array:
    """The placement in class order that gives every class as many replicas as any other.

    Where the classes do not divide the slots, the first classes have one replica more.

    Args:
        num_layers: L.
        num_classes: E.
        num_ranks: N.
        slots_per_rank: S.

    Returns:
        int32[L, N, S].

    Raises:
        SettingError: there are fewer slots than classes.

    >>> uniform_placement(num_layers=1, num_classes=3, num_ranks=2, slots_per_rank=2).tolist()
    [[[0, 0], [1, 2]]]
    """
    check_slots(num_classes, num_ranks, slots_per_rank)
    replicas, remainder = divmod(num_ranks * slots_per_rank, num_classes)
    counts_E = replicas + (jnp.arange(num_classes) < remainder).astype(jnp.int32)
    placement_NS = contiguous(counts_E, num_ranks, slots_per_rank)
    return jnp.broadcast_to(placement_NS[None], (num_layers, num_ranks, slots_per_rank))


class StartsUniform:
    """A policy that remembers nothing, and begins with the uniform placement."""

    def init(
        self, num_layers: int, num_classes: int, num_ranks: int, slots_per_rank: int
    ) -> tuple[jax.Array, PolicyState]:
        """The uniform placement, int32[L, N, S], and no state."""
        return uniform_placement(num_layers, num_classes, num_ranks, slots_per_rank), ()


def place_contiguously(
    replicas_of: Callable[[jax.Array, int], jax.Array], popularity_LE: jax.Array, placement_LNS: jax.Array
) -> jax.Array:
    """Places every layer in class order, with the replicas that a rule gives to its popularity.

    Args:
        replicas_of: the rule, ``(popularity int32[E], num_slots) -> replicas int32[E]``: at least one per class,
            ``num_slots`` in all.
        popularity_LE: int32[L, E].
        placement_LNS: int32[L, N, S], the present placement; only its shape is used.

    Returns:
        int32[L, N, S].
    """
    _, num_ranks, slots_per_rank = placement_LNS.shape
    num_slots = num_ranks * slots_per_rank
    assert num_slots >= popularity_LE.shape[1], "a rule could search for ever where classes outnumber slots"

    def place(popularity_E: jax.Array) -> jax.Array:
        return contiguous(replicas_of(popularity_E, num_slots), num_ranks, slots_per_rank)

    return jax.vmap(place)(popularity_LE)
