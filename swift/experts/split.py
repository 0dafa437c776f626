"""The split: how many tokens of every class a source rank sends to each slot, from the counts of all ranks.

It starts from an even split over the replicas of a class and, in a few rounds, scales it towards the ranks that have
room to spare: the share of every slot is multiplied by the room of its rank over its load, and the shares of a class
are made to add up again. Then whole tokens are shared out.

All ranks compute it from the same counts, and all have to come to the same, whatever program they run and wherever: so
it is computed in integers alone, where a float's last bit would depend on what the compiler fuses.

Legend: N ranks (as sources, or as the ranks D that serve), S slots of a rank, M = N * S slots, E classes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_SHARE_BITS = 14
_LOAD_BITS = 16
_RATIO_BITS = 10
_MOST_CHANGE = 4  # of a share in one round, up or down


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
    counts_NE: jax.Array, placement_NS: jax.Array, slots: Slots, room: int, most_pairs: int, rounds: int
) -> jax.Array:
    """Shares out the tokens of every source and class over the slots that hold the class.

    Args:
        counts_NE: int32, (token, choice) pairs of every source rank that want each class.
        placement_NS: the class in every slot.
        slots: the same by class.
        room: rows of a rank.
        most_pairs: of a source rank, whatever they want.
        rounds: of scaling towards spare room; 0: an even split.

    Returns:
        int32[N, M]: of every source, to every slot; not negative, and all of the slots of a class together get all
        pairs of the class.
    """
    num_ranks = placement_NS.shape[0]
    shares_M = _shares(jnp.sum(counts_NE, axis=0, dtype=jnp.int32), num_ranks, slots, room, most_pairs, rounds)

    # Where a slot's part of its class ends, the last one's exactly at 1. Over the sources one after the other, every
    # slot so comes within a token of its share of all.
    bits = fixed_bits(num_ranks * most_pairs)
    ends_M = (slots.up_to(shares_M) << bits) // slots.of_class(shares_M)
    so_far_NM = jnp.cumsum(counts_NE, axis=0, dtype=jnp.int32)[:, slots.class_M]
    ends_NM = jnp.diff((so_far_NM * ends_M[None]) >> bits, axis=0, prepend=jnp.zeros((1, ends_M.size), jnp.int32))
    return _ascending_parts(ends_NM, counts_NE, slots)


def _shares(
    popularity_E: jax.Array, num_ranks: int, slots: Slots, room: int, most_pairs: int, rounds: int
) -> jax.Array:
    """Shares of the slots in their classes, in units of 2^-14, at least 1."""
    one = 1 << _SHARE_BITS
    shift = max(0, (num_ranks * most_pairs).bit_length() - _LOAD_BITS)
    tokens_M = (popularity_E >> shift)[slots.class_M]
    room = min(max(1, room >> shift), 1 << 20)

    def scale(_: jax.Array, shares_M: jax.Array) -> jax.Array:
        load_N = jnp.sum(((tokens_M * shares_M) >> _SHARE_BITS).reshape(num_ranks, -1), axis=1, dtype=jnp.int32)
        ratio_N = (room << _RATIO_BITS) // jnp.maximum(load_N, 1)
        ratio_N = jnp.clip(ratio_N, (1 << _RATIO_BITS) // _MOST_CHANGE, (1 << _RATIO_BITS) * _MOST_CHANGE)
        ratio_M = jnp.repeat(ratio_N, shares_M.size // num_ranks, total_repeat_length=shares_M.size)
        scaled_M = (shares_M * ratio_M) >> _RATIO_BITS
        return jnp.maximum((scaled_M << _SHARE_BITS) // jnp.maximum(slots.of_class(scaled_M), 1), 1)

    even_M = one // slots.of_class(jnp.ones_like(slots.class_M))
    return lax.fori_loop(0, rounds, scale, even_M) if rounds else even_M


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
