"""The split: how many tokens of every class a source rank sends to each slot, from the counts of all ranks.

It starts from an even split over the replicas of a class and, in a few rounds, scales it towards the ranks that have
room to spare: a source's share for a slot is multiplied by the room of the slot's rank over its load, where the source
has more for the rank than the buffer between the two holds also by the part that fits, and its shares of a class are
made to add up again. Then whole tokens are shared out, exactly: what a slot gets of all sources together is within a
token of its shares, however many ranks and tokens there are.

All ranks compute it from the same counts, and all have to come to the same, whatever program they run and wherever: so
it is computed in integers alone, where a float's last bit would depend on what the compiler fuses.

Legend: N ranks (as sources, or as the ranks D that serve), S slots of a rank, M = N * S slots, E classes.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from swift.experts.rank_capacity.fixed_point import BITS, ONE, cumulated, fraction_of, times

_SHARE_BITS = 22
_RATIO_BITS = 10
_CHANGE_BITS = 2  # of a share in one round, by at most 4 up or down
_MOST_RATIO = 1 << (_RATIO_BITS + _CHANGE_BITS)
_LEAST_RATIO = 1 << (_RATIO_BITS - _CHANGE_BITS)
_ROOM_BITS = 30 - _RATIO_BITS


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

    def highest_up_to(self, values_M: jax.Array) -> jax.Array:
        """For every slot, the highest over the slots of its class up to and with itself, and of 0."""
        return jnp.max(jnp.where(self.is_before_MM, values_M[:, None], 0), axis=0)

    def just_before(self, ends_M: jax.Array) -> jax.Array:
        """For every slot, where the slot of its class before it ends, of ends that ascend; 0 for the first."""
        is_itself_MM = jnp.eye(ends_M.size, dtype=bool)
        return jnp.max(jnp.where(self.is_before_MM & ~is_itself_MM, ends_M[:, None], 0), axis=0)

    def of_class(self, values_M: jax.Array) -> jax.Array:
        """For every slot, the sum over all slots of its class."""
        return self.by_class(values_M)[self.class_M]

    def by_class(self, values_M: jax.Array) -> jax.Array:
        """The sum over the slots of each class, ``[E]``."""
        return jnp.sum(jnp.where(self.is_class_EM, values_M[None], 0), axis=1, dtype=jnp.int32)


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
    assert len(counts_NE) * most_pairs < 1 << BITS, "sums over all ranks have to stay below 2^30"
    counts_NM = counts_NE[:, slots.class_M]
    even_M = (1 << _SHARE_BITS) // slots.of_class(jnp.ones_like(slots.class_M))
    shares_NM = jnp.broadcast_to(even_M, counts_NM.shape)
    if rounds:
        scale = _scaling(counts_NM, placement_NS.shape[1], slots, rooms, most_pairs)
        shares_NM = lax.fori_loop(0, rounds, lambda _, shares_NM: scale(shares_NM), shares_NM)
    return _whole_tokens(counts_NM, shares_NM, slots)


def _scaling(
    counts_NM: jax.Array, slots_per_rank: int, slots: Slots, rooms: Rooms, most_pairs: int
) -> Callable[[jax.Array], jax.Array]:
    """A round: the shares of every source's slots in their classes, in units of 2^-22 and at least 1 -> the next."""
    num_ranks = len(counts_NM)
    shift = BITS - (num_ranks * most_pairs).bit_length()  # a load is in units of 2^-shift pairs
    tokens_NM, room, buffer = counts_NM << shift, rooms.rank << shift, rooms.buffer << shift

    def ratio(room: int, load: jax.Array, most: int) -> jax.Array:
        room = min(room, ONE)  # which is as much as all tokens there are
        spare_bits = max(room.bit_length() - _ROOM_BITS, 0)
        parts = (max(room >> spare_bits, 1) << _RATIO_BITS) // jnp.maximum(load >> spare_bits, 1)
        return jnp.clip(parts, _LEAST_RATIO, most)

    def scale(shares_NM: jax.Array) -> jax.Array:
        load_NM = times(tokens_NM, shares_NM << (BITS - _SHARE_BITS)).whole
        load_NDS = load_NM.reshape(num_ranks, num_ranks, slots_per_rank)
        load_ND = jnp.sum(load_NDS, axis=2, dtype=jnp.int32)
        of_rank_D = ratio(room, jnp.sum(load_ND, axis=0, dtype=jnp.int32), _MOST_RATIO)
        ratio_ND = (ratio(buffer, load_ND, 1 << _RATIO_BITS) * of_rank_D[None]) >> _RATIO_BITS
        ratio_NDS = jnp.broadcast_to(ratio_ND[..., None], load_NDS.shape)
        # As parts of the most that a share can grow, so that no scaled share, and no sum of a class, is above 1.
        parts_NM = ratio_NDS.reshape(shares_NM.shape) << (BITS - _RATIO_BITS - _CHANGE_BITS)
        scaled_NM = times(shares_NM, parts_NM).whole
        # A division for each class and not for each slot: 2^38 over the sum, which is 2^16 to 2^22.
        sum_NE = jnp.maximum(jax.vmap(slots.by_class)(scaled_NM), 1 << 16)
        inverse_NE = ONE // (sum_NE >> 8)
        normal_NM = times(scaled_NM << 6, inverse_NE[:, slots.class_M] << 8).whole
        return jnp.clip(normal_NM, 1, 1 << _SHARE_BITS)

    return scale


def _whole_tokens(counts_NM: jax.Array, shares_NM: jax.Array, slots: Slots) -> jax.Array:
    """Whole tokens of every source for every slot, in proportion to its shares.

    A class's tokens of a source are cut at ends, one for each slot, the last one's at 1. Of all sources together a slot
    ends where the sum of its ends says, rounded down: what is behind the point goes over to the next source.
    """
    ends_NM = fraction_of(
        jax.vmap(slots.up_to)(shares_NM), jax.vmap(slots.of_class)(shares_NM), most=(2 << _SHARE_BITS) - 1
    )
    so_far_NM = cumulated(times(counts_NM, ends_NM))

    # Where a part is less than a token, rounding can put ends in the wrong order: an end then moves up, and the next
    # sources make up for it.
    def give(given_M: jax.Array, so_far_M: jax.Array) -> tuple[jax.Array, jax.Array]:
        ends_M = slots.highest_up_to(so_far_M - given_M)
        return given_M + ends_M, ends_M

    _, ends_NM = lax.scan(give, jnp.zeros_like(so_far_NM[0]), so_far_NM)
    return ends_NM - jax.vmap(slots.just_before)(ends_NM)
