"""The split: how many tokens of every class a source rank sends to each slot, from the counts of all ranks.

It starts from an even split over the replicas of a class and, in a few rounds, scales it towards the ranks that have
room to spare: a source's share for a slot is multiplied by the room of the slot's rank over its load, where the source
has more for the rank than the buffer between the two holds also by the part that fits, and its shares of a class are
made to add up again. Then whole tokens are shared out.

All ranks compute it from the same counts, and all have to come to the same, whatever program they run and wherever: so
it is computed in integers alone, where a float's last bit would depend on what the compiler fuses.

Legend: N ranks (as sources, or as the ranks D that serve), S slots of a rank, M = N * S slots, E classes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_SHARE_BITS = 14
_LOAD_BITS = 16
_RATIO_BITS = 10
_MOST_CHANGE = 4  # of a share in one round, up or down
_MOST_ROOM = 1 << 20


class Rooms(NamedTuple):
    """Rows that there are."""

    rank: int  # of a rank, for all sources
    buffer: int  # of the buffer from one source to one rank


class Slots(NamedTuple):
    """The slots of all ranks, by the classes that they hold."""

    class_M: jax.Array  # int32
    is_class_EM: jax.Array  # bool
    is_before_MM: jax.Array  # bool [i, j]: slot i holds the class of slot j, and is j or comes before it

    @classmethod
    def of(cls, placement_NS: jax.Array, num_classes: int) -> "Slots":
        """The slots of a placement in any order."""
        class_M = placement_NS.reshape(-1).astype(jnp.int32)
        is_class_EM = jnp.arange(num_classes, dtype=jnp.int32)[:, None] == class_M[None]
        order_M = jnp.arange(class_M.size, dtype=jnp.int32)
        is_before_MM = (class_M[:, None] == class_M[None]) & (order_M[:, None] <= order_M[None])
        return cls(class_M, is_class_EM, is_before_MM)

    def up_to(self, values_M: jax.Array) -> jax.Array:
        """For every slot, the sum over the slots of its class up to and with itself."""
        return jnp.sum(jnp.where(self.is_before_MM, values_M[:, None], 0), axis=0, dtype=jnp.int32)

    def of_class(self, values_M: jax.Array) -> jax.Array:
        """For every slot, the sum over all slots of its class."""
        return self.by_class(values_M)[self.class_M]

    def by_class(self, values_M: jax.Array) -> jax.Array:
        """The sum over the slots of each class, ``[E]``."""
        return jnp.sum(jnp.where(self.is_class_EM, values_M[None], 0), axis=1, dtype=jnp.int32)


def fixed_bits(most: int, bits: int = _SHARE_BITS) -> int:
    """Bits behind the point of a number up to 1 that is multiplied by whole numbers up to ``most`` in int32."""
    return min(bits, 30 - most.bit_length())


def split_tokens(
    counts_NE: jax.Array, placement_NS: jax.Array, slots: Slots, rooms: Rooms, most_pairs: int, rounds: int
) -> jax.Array:
    """Shares out the tokens of every source and class over the slots that hold the class.

    Args:
        counts_NE: int32, (token, choice) pairs of every source rank that want each class.
        placement_NS: the class in every slot.
        slots: the same by class.
        rooms: of ranks and buffers.
        most_pairs: of a source rank, whatever they want.
        rounds: of scaling towards spare room; 0: an even split.

    Returns:
        int32[N, M]: of every source, to every slot; not negative, and all of the slots of a class together get all
        pairs of the class.
    """
    counts_NM = counts_NE[:, slots.class_M]
    even_M = (1 << _SHARE_BITS) // slots.of_class(jnp.ones_like(slots.class_M))
    shares_NM = jnp.broadcast_to(even_M, counts_NM.shape)
    if rounds:
        scale = _scaling(counts_NM, placement_NS.shape[1], slots, rooms, most_pairs)
        shares_NM = lax.fori_loop(0, rounds, lambda _, shares_NM: scale(shares_NM), shares_NM)

    # Where a slot's part of its class ends, the last one's exactly at 1. What is behind the point goes over to the next
    # source, so that all sources together give every slot its shares within a token.
    bits = fixed_bits(len(counts_NM) * most_pairs)
    ends_NM = (jax.vmap(slots.up_to)(shares_NM) << bits) // jax.vmap(slots.of_class)(shares_NM)
    so_far_NM = jnp.cumsum(counts_NM * ends_NM, axis=0, dtype=jnp.int32) >> bits
    ends_NM = jnp.diff(so_far_NM, axis=0, prepend=jnp.zeros_like(so_far_NM[:1]))
    return _ascending_parts(ends_NM, counts_NE, slots)


def _scaling(
    counts_NM: jax.Array, slots_per_rank: int, slots: Slots, rooms: Rooms, most_pairs: int
) -> Callable[[jax.Array], jax.Array]:
    """A round: the shares of every source's slots in their classes, in units of 2^-14 and at least 1 -> the next."""
    num_ranks = len(counts_NM)
    shift = _LOAD_BITS - most_pairs.bit_length()  # a load is in units of 2^-shift pairs
    tokens_NM, room, buffer = (_shifted(pairs, shift) for pairs in (counts_NM, *rooms))

    def ratio(room: int, load: jax.Array, most: int) -> jax.Array:
        parts = (min(max(room, 1), _MOST_ROOM) << _RATIO_BITS) // jnp.maximum(load, 1)
        return jnp.clip(parts, (1 << _RATIO_BITS) // _MOST_CHANGE, (1 << _RATIO_BITS) * most)

    def scale(shares_NM: jax.Array) -> jax.Array:
        load_NDS = ((tokens_NM * shares_NM) >> _SHARE_BITS).reshape(num_ranks, num_ranks, slots_per_rank)
        load_ND = jnp.sum(load_NDS, axis=2, dtype=jnp.int32)
        of_rank_D = ratio(room, jnp.sum(load_ND, axis=0, dtype=jnp.int32), _MOST_CHANGE)
        ratio_ND = (ratio(buffer, load_ND, 1) * of_rank_D[None]) >> _RATIO_BITS
        ratio_NDS = jnp.broadcast_to(ratio_ND[..., None], load_NDS.shape)
        scaled_NM = (shares_NM * ratio_NDS.reshape(shares_NM.shape)) >> _RATIO_BITS
        # A division for each class and not for each slot; no part is more than its sum, so no product is above 2^28.
        inverse_NE = (1 << 2 * _SHARE_BITS) // jnp.maximum(jax.vmap(slots.by_class)(scaled_NM), 1)
        return jnp.maximum((scaled_NM * inverse_NE[:, slots.class_M]) >> _SHARE_BITS, 1)

    return scale


def _shifted(value: Any, bits: int) -> Any:
    return value << bits if bits > 0 else value >> -bits


def _ascending_parts(ends_NM: jax.Array, counts_NE: jax.Array, slots: Slots) -> jax.Array:
    """The parts between ends, which rounding can put in the wrong order by one: an end then moves up."""
    # In the order of classes, all ends of a source can be put in order at once: those of a class follow on the last
    # of the class before, which is the sum of all classes up to there.
    before_NM = (jnp.cumsum(counts_NE, axis=1, dtype=jnp.int32) - counts_NE)[:, slots.class_M]
    replicas_E = jnp.sum(slots.is_class_EM, axis=1, dtype=jnp.int32)
    nth_M = slots.up_to(jnp.ones_like(slots.class_M)) - 1
    place_M = (jnp.cumsum(replicas_E, dtype=jnp.int32) - replicas_E)[slots.class_M] + nth_M
    ordered_NM = jnp.zeros_like(ends_NM).at[:, place_M].set(before_NM + ends_NM, unique_indices=True)
    return jnp.diff(lax.cummax(ordered_NM, axis=1), axis=1, prepend=jnp.zeros((len(ends_NM), 1), jnp.int32))[:, place_M]
