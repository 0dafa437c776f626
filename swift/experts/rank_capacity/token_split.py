"""Split of tokens over replicas: how many of an expert's tokens each source rank sends to each slot.

It starts from an even split over the replicas of an expert and, in a few rounds, scales it towards ranks with spare
room: a source's share for a slot is multiplied by the ratio of room to load of the slot's rank and, where the source
has more for the rank than the buffer between the two holds, by the part that fits; then its shares of each expert are
normalized. Finally whole tokens are assigned, exactly: the tokens that a slot gets from all sources together are within
one token of its shares, however many ranks and tokens there are.

All ranks compute the split from the same counts and must get the same result, whatever program they run and on
whatever device. So it uses integers only: the last bit of a float would depend on what the compiler fuses.

Legend: N ranks as sources, D the same ranks as destinations, S slots of a rank, M = N * S slots, E experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from swift.experts.rank_capacity.fixed_point import BITS, ONE, cumulated, fraction_of, times

_SHARE_BITS = 22
_RATIO_BITS = 10
_CHANGE_BITS = 2  # a share changes by at most a factor of 4 in one round
_MOST_RATIO = 1 << (_RATIO_BITS + _CHANGE_BITS)
_LEAST_RATIO = 1 << (_RATIO_BITS - _CHANGE_BITS)
_ROOM_BITS = 30 - _RATIO_BITS


class Rooms(NamedTuple):
    """Available rows."""

    rank: int  # rows of a rank, for all sources
    buffer: int  # rows of the buffer from one source to one rank


class Slots(NamedTuple):
    """Slots of all ranks, with the experts that they hold."""

    class_M: jax.Array  # int32
    is_class_EM: jax.Array  # bool
    is_before_MM: jax.Array  # bool [i, j]: slot i holds the same expert as slot j, and i <= j

    @classmethod
    def of(cls, placement_NS: Int[Array, "N S"], num_classes: int) -> "Slots":
        """Makes the slots of a placement; experts may be placed in any order."""
        class_M = placement_NS.reshape(-1).astype(jnp.int32)
        is_class_EM = jnp.arange(num_classes, dtype=jnp.int32)[:, None] == class_M[None]
        order_M = jnp.arange(class_M.size, dtype=jnp.int32)
        is_before_MM = (class_M[:, None] == class_M[None]) & (order_M[:, None] <= order_M[None])
        return cls(class_M, is_class_EM, is_before_MM)

    def up_to(self, values_M: Int[Array, " M"]) -> Int[Array, " M"]:
        """Sums over the slots of the same expert, for every slot up to and including itself."""
        return jnp.sum(jnp.where(self.is_before_MM, values_M[:, None], 0), axis=0, dtype=jnp.int32)

    def highest_up_to(self, values_M: Int[Array, " M"]) -> Int[Array, " M"]:
        """Maximum over the slots of the same expert, for every slot up to and including itself, and 0."""
        return jnp.max(jnp.where(self.is_before_MM, values_M[:, None], 0), axis=0)

    def just_before(self, ends_M: Int[Array, " M"]) -> Int[Array, " M"]:
        """End of the previous slot of the same expert, for every slot, given ascending ends; 0 for the first."""
        is_itself_MM = jnp.eye(ends_M.size, dtype=bool)
        return jnp.max(jnp.where(self.is_before_MM & ~is_itself_MM, ends_M[:, None], 0), axis=0)

    def of_class(self, values_M: Int[Array, " M"]) -> Int[Array, " M"]:
        """Sums over all slots of the same expert, for every slot."""
        return self.by_class(values_M)[self.class_M]

    def by_class(self, values_M: Int[Array, " M"]) -> Int[Array, " E"]:
        """Sums over the slots of each expert, ``[E]``."""
        return jnp.sum(jnp.where(self.is_class_EM, values_M[None], 0), axis=1, dtype=jnp.int32)


def split_tokens(
    counts_NE: Int[Array, "N E"],
    placement_NS: Int[Array, "N S"],
    slots: Slots,
    rooms: Rooms,
    most_pairs: int,
    rounds: int,
) -> Int[Array, "N M"]:
    """Splits the tokens of every source and expert over the slots that hold the expert.

    Args:
        counts_NE: int32, (token, choice) pairs of every source rank for each expert.
        placement_NS: int32, the expert in every slot.
        slots: the same placement as slots.
        rooms: rows of ranks and buffers.
        most_pairs: upper bound of a source rank's pairs.
        rounds: rounds of scaling towards spare room; 0 for an even split.

    Returns:
        int32[N, M]: pairs from every source to every slot; nonnegative, and the slots of an expert together get all of
        its pairs.
    """
    assert len(counts_NE) * most_pairs < 1 << BITS, "sums over all ranks have to stay below 2^30"
    counts_NM = counts_NE[:, slots.class_M]
    even_M = (1 << _SHARE_BITS) // slots.of_class(jnp.ones_like(slots.class_M))
    shares_NM = counts_NM * 0 + even_M[None]  # differs from rank to rank, to ``jax.shard_map`` with ``check_vma=True``
    if rounds:
        scale = _scaling(counts_NM, placement_NS.shape[1], slots, rooms, most_pairs)
        shares_NM = lax.fori_loop(0, rounds, lambda _, shares_NM: scale(shares_NM), shares_NM)
    return _whole_tokens(counts_NM, shares_NM, slots)


def _scaling(
    counts_NM: jax.Array, slots_per_rank: int, slots: Slots, rooms: Rooms, most_pairs: int
) -> Callable[[jax.Array], jax.Array]:
    """Makes the function of one round: shares of every source's slots, in units of 2^-22 and at least 1 -> the next."""
    num_ranks = len(counts_NM)
    shift = BITS - (num_ranks * most_pairs).bit_length()  # loads are in units of 2^-shift pairs
    tokens_NM, room, buffer = counts_NM << shift, rooms.rank << shift, rooms.buffer << shift

    def ratio(room: int, load: jax.Array, most: int) -> jax.Array:
        room = min(room, ONE)  # enough for all tokens
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
        # Relative to the largest growth of a share, so that no scaled share, and no sum over an expert, exceeds 1.
        parts_NM = ratio_NDS.reshape(shares_NM.shape) << (BITS - _RATIO_BITS - _CHANGE_BITS)
        scaled_NM = times(shares_NM, parts_NM).whole
        # One division per expert rather than per slot: 2^38 over the sum, which is between 2^16 and 2^22.
        sum_NE = jnp.maximum(jax.vmap(slots.by_class)(scaled_NM), 1 << 16)
        inverse_NE = ONE // (sum_NE >> 8)
        normal_NM = times(scaled_NM << 6, inverse_NE[:, slots.class_M] << 8).whole
        return jnp.clip(normal_NM, 1, 1 << _SHARE_BITS)

    return scale


def _whole_tokens(counts_NM: jax.Array, shares_NM: jax.Array, slots: Slots) -> jax.Array:
    """Assigns whole tokens of every source to every slot, in proportion to the shares.

    A source's tokens of an expert are cut at ends, one per slot, the last of them at 1. Over all sources up to any one,
    a slot ends at the sum of its ends, rounded down: the fractional part carries over to the next source.
    """
    ends_NM = fraction_of(
        jax.vmap(slots.up_to)(shares_NM), jax.vmap(slots.of_class)(shares_NM), most=(2 << _SHARE_BITS) - 1
    )
    so_far_NM = cumulated(times(counts_NM, ends_NM))

    # Where a part is less than a token, rounding can put ends in the wrong order: such an end moves up, and the next
    # sources compensate.
    def give(given_M: jax.Array, so_far_M: jax.Array) -> tuple[jax.Array, jax.Array]:
        ends_M = slots.highest_up_to(so_far_M - given_M)
        return given_M + ends_M, ends_M

    _, ends_NM = lax.scan(give, so_far_NM[0] * 0, so_far_NM)
    return ends_NM - jax.vmap(slots.just_before)(ends_NM)
