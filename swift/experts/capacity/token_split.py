"""Token split: how many of an expert's tokens each source rank sends to each replica's slot.

``split_tokens`` starts from an even split over the replicas of an expert and, in a few rounds, shifts it towards ranks
with spare room. In each round a source's share for a slot is multiplied by the ratio of room to load of the slot's rank
and, if the source has more tokens for the rank than fit into the buffer between the two, by the fraction that fits;
then its shares of each expert are normalized. Finally whole tokens are assigned so that the number of a slot's tokens
from all sources together differs by at most one from its shares, for any number of ranks and tokens.

``by_source`` divides the tokens of each slot among the sources, after ``balanced_flow`` or exact capacity has fixed how
many each slot gets. A source's tokens for an expert are sent to the slots in proportion to each slot's part of the
expert, so that the traffic between ranks is as even as the routing allows. Sums are exact in both directions: over the
slots of the expert, and over the sources. Proportions are rounded down first. The remainder, less than a token for each
source and slot, is assigned in rounds, with a part of each source's remainder in each round.

All ranks compute the split from the same counts and must get the same result, to the last token, regardless of program
and device. The last bit of a float would depend on how the compiler fuses operations, and JAX has no 64-bit integers
unless a program enables them. Fractions are therefore multiples of 2^-30, and a product is computed from two halves of
15 bits, whose partial products fit into 32 bits.

Legend: N ranks as sources, D the same ranks as destinations, S slots of a rank, M = N * S slots of all ranks (in
``by_source`` sorted by expert), E experts, R rounds.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from swift.experts.capacity.balanced_flow import ReplicaMap

BITS = 30
ONE = 1 << BITS
"""The fraction 1."""

_HALF = BITS // 2
_LOW = (1 << _HALF) - 1

_SHARE_BITS = 22
_RATIO_BITS = 10
_CHANGE_BITS = 2  # a share changes by at most a factor of 4 in one round
_MOST_RATIO = 1 << (_RATIO_BITS + _CHANGE_BITS)
_LEAST_RATIO = 1 << (_RATIO_BITS - _CHANGE_BITS)
_ROOM_BITS = 30 - _RATIO_BITS

_ROUNDS = 4
"""Rounds in which ``by_source`` assigns the remainder of rounding down."""


class _Product(NamedTuple):
    """Product of a number and a fraction, as its whole and fractional parts."""

    whole: jax.Array  # int32
    rest: jax.Array  # int32, in units of 2^-30


def times(number: Int[Array, "..."], fraction: Int[Array, "..."]) -> _Product:
    """Multiplies a whole number by a fraction, exactly.

    Args:
        number: int32, 0 to 2^30.
        fraction: int32, 0 to 1 in units of 2^-30, in a shape that broadcasts with that of ``number``.

    >>> [int(part) for part in times(jnp.int32(10**9), jnp.int32(ONE // 3))]
    [333333333, 24580608]
    """
    high, low = number >> _HALF, number & _LOW
    fraction_high, fraction_low = fraction >> _HALF, fraction & _LOW
    lowest = low * fraction_low
    middle = high * fraction_low + low * fraction_high + (lowest >> _HALF)
    return _Product(high * fraction_high + (middle >> _HALF), ((middle & _LOW) << _HALF) | (lowest & _LOW))


def cumulated(product: _Product) -> Int[Array, "..."]:
    """Computes cumulative sums over the first dim, rounded down; exact for up to 2^15 entries with a sum below 2^31."""
    low = jnp.cumsum(product.rest & _LOW, axis=0, dtype=jnp.int32) >> _HALF
    high = jnp.cumsum(product.rest >> _HALF, axis=0, dtype=jnp.int32)
    return jnp.cumsum(product.whole, axis=0, dtype=jnp.int32) + ((high + low) >> _HALF)


def divide_exactly(part: Int[Array, "..."], total: Int[Array, "..."], most: int) -> Int[Array, "..."]:
    """Computes the fraction ``part / total``, rounded down to a multiple of 2^-30.

    Args:
        part: int32, at least 0.
        total: int32, at least ``part`` and at least 1.
        most: upper bound of the values in ``total``, below 2^30.

    >>> int(divide_exactly(jnp.int32(1), jnp.int32(3), most=8)), ONE // 3
    (357913941, 357913941)
    """
    step = 31 - most.bit_length()  # quotient bits per 32-bit division
    quotient, rest, missing = part // total, part % total, BITS
    while missing:
        bits = min(step, missing)
        rest = rest << bits
        quotient, rest, missing = (quotient << bits) | (rest // total), rest % total, missing - bits
    return quotient


class RowLimits(NamedTuple):
    """Rows available for tokens."""

    rank: int  # rows of a rank, shared by all sources
    buffer: int  # rows of the buffer from one source to one rank


class Slots(NamedTuple):
    """All ranks' slots and the experts that they hold."""

    class_M: jax.Array  # int32
    is_class_EM: jax.Array  # bool
    is_before_MM: jax.Array  # bool [i, j]: slot i holds the same expert as slot j, and i <= j

    @classmethod
    def of(cls, placement_NS: Int[Array, "N S"], num_classes: int) -> "Slots":
        """Builds the slots of a placement, in which experts may be in any order."""
        class_M = placement_NS.reshape(-1).astype(jnp.int32)
        is_class_EM = jnp.arange(num_classes, dtype=jnp.int32)[:, None] == class_M[None]
        order_M = jnp.arange(class_M.size, dtype=jnp.int32)
        is_before_MM = (class_M[:, None] == class_M[None]) & (order_M[:, None] <= order_M[None])
        return cls(class_M, is_class_EM, is_before_MM)

    def up_to(self, values_M: Int[Array, " M"]) -> Int[Array, " M"]:
        """Sums the values of the same expert's slots up to and including each slot."""
        return jnp.sum(jnp.where(self.is_before_MM, values_M[:, None], 0), axis=0, dtype=jnp.int32)

    def highest_up_to(self, values_M: Int[Array, " M"]) -> Int[Array, " M"]:
        """Returns the maximum of 0 and the values in the same expert's slots up to and including each slot."""
        return jnp.max(jnp.where(self.is_before_MM, values_M[:, None], 0), axis=0)

    def just_before(self, ends_M: Int[Array, " M"]) -> Int[Array, " M"]:
        """Returns the end of each slot's predecessor with the same expert, given ascending ends; 0 for the first."""
        is_itself_MM = jnp.eye(ends_M.size, dtype=bool)
        return jnp.max(jnp.where(self.is_before_MM & ~is_itself_MM, ends_M[:, None], 0), axis=0)

    def of_class(self, values_M: Int[Array, " M"]) -> Int[Array, " M"]:
        """Sums the values in all slots with each slot's expert."""
        return self.by_class(values_M)[self.class_M]

    def by_class(self, values_M: Int[Array, " M"]) -> Int[Array, " E"]:
        """Sums the values of each expert's slots, ``[E]``."""
        return jnp.sum(jnp.where(self.is_class_EM, values_M[None], 0), axis=1, dtype=jnp.int32)


def split_tokens(
    counts_NE: Int[Array, "N E"],
    placement_NS: Int[Array, "N S"],
    slots: Slots,
    rooms: RowLimits,
    most_pairs: int,
    rounds: int,
) -> Int[Array, "N M"]:
    """Splits the tokens of every source and expert over the slots that hold the expert.

    Args:
        counts_NE: int32, (token, choice) pairs of every source rank for each expert.
        placement_NS: int32, the expert in every slot.
        slots: the slots of ``placement_NS``.
        rooms: numbers of rows of a rank and of a buffer.
        most_pairs: maximum number of pairs of a source rank.
        rounds: number of rounds that shift the split towards ranks with spare room; 0 for an even split.

    Returns:
        int32[N, M]: number of pairs from every source to every slot; an expert's slots together get all of its pairs.
    """
    assert len(counts_NE) * most_pairs < 1 << BITS, "sums over all ranks have to stay below 2^30"
    counts_NM = counts_NE[:, slots.class_M]
    even_M = (1 << _SHARE_BITS) // slots.of_class(jnp.ones_like(slots.class_M))
    shares_NM = counts_NM * 0 + even_M[None]  # * 0: varies by rank for ``shard_map(check_vma=True)``
    if rounds:
        scale = _scaling(counts_NM, placement_NS.shape[1], slots, rooms, most_pairs)
        shares_NM = lax.fori_loop(0, rounds, lambda _, shares_NM: scale(shares_NM), shares_NM)
    return _whole_tokens(counts_NM, shares_NM, slots)


def _scaling(
    counts_NM: jax.Array, slots_per_rank: int, slots: Slots, rooms: RowLimits, most_pairs: int
) -> Callable[[jax.Array], jax.Array]:
    """Returns the function that computes new shares in a round; a share is at least 1, in units of 2^-22."""
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
        rank_ratio_D = ratio(room, jnp.sum(load_ND, axis=0, dtype=jnp.int32), _MOST_RATIO)
        ratio_ND = (ratio(buffer, load_ND, 1 << _RATIO_BITS) * rank_ratio_D[None]) >> _RATIO_BITS
        ratio_NDS = jnp.broadcast_to(ratio_ND[..., None], load_NDS.shape)
        # Dividing by the largest possible growth of a share keeps scaled shares and their sum per expert at most 1.
        parts_NM = ratio_NDS.reshape(shares_NM.shape) << (BITS - _RATIO_BITS - _CHANGE_BITS)
        scaled_NM = times(shares_NM, parts_NM).whole
        # One division per expert instead of one per slot: 2^38 over the sum, which is between 2^16 and 2^22.
        sum_NE = jnp.maximum(jax.vmap(slots.by_class)(scaled_NM), 1 << 16)
        inverse_NE = ONE // (sum_NE >> 8)
        normal_NM = times(scaled_NM << 6, inverse_NE[:, slots.class_M] << 8).whole
        return jnp.clip(normal_NM, 1, 1 << _SHARE_BITS)

    return scale


def _whole_tokens(counts_NM: jax.Array, shares_NM: jax.Array, slots: Slots) -> jax.Array:
    """Assigns whole tokens of every source to every slot, in proportion to the shares.

    The cumulative shares of an expert's slots are the ends at which a source's tokens are cut; the last end is 1.
    Cumulative sums of the ends over the sources are rounded down, so that fractions carry over to the next source.
    """
    ends_NM = divide_exactly(
        jax.vmap(slots.up_to)(shares_NM), jax.vmap(slots.of_class)(shares_NM), most=(2 << _SHARE_BITS) - 1
    )
    so_far_NM = cumulated(times(counts_NM, ends_NM))

    # For parts of less than a token, rounding can put ends in the wrong order. Such an end is raised, and the next
    # sources compensate for it.
    def give(assigned_M: jax.Array, so_far_M: jax.Array) -> tuple[jax.Array, jax.Array]:
        ends_M = slots.highest_up_to(so_far_M - assigned_M)
        return assigned_M + ends_M, ends_M

    _, ends_NM = lax.scan(give, so_far_NM[0] * 0, so_far_NM)
    return ends_NM - jax.vmap(slots.just_before)(ends_NM)


def by_source(
    counts_NE: Int[Array, "N E"], tokens_NS: Int[Array, "N S"], holders: ReplicaMap, most: int = ONE - 1
) -> Int[Array, "N M"]:
    """Divides the tokens of every slot among the source ranks.

    Args:
        counts_NE: int32, (token, choice) pairs of every source for each expert; their sum is below 2^30.
        tokens_NS: int32, pairs of each slot; the sum over an expert's slots is the expert's number of pairs.
        holders: slots of all ranks.
        most: upper bound of the number of pairs of all sources together, below 2^30.

    Returns:
        int32[N, M]: number of pairs from every source to every slot, with slots in rank order.
    """
    order = holders.slot_M
    class_M, tokens_M = holders.class_NS.reshape(-1)[order], tokens_NS.reshape(-1)[order]
    counts_NM = counts_NE[:, class_M]
    class_tokens_M = jnp.sum(counts_NM, axis=0, dtype=jnp.int32)
    part_M = divide_exactly(tokens_M, jnp.maximum(class_tokens_M, 1), most)
    share_M = jnp.where(tokens_M == class_tokens_M, ONE, part_M)
    floor_NM = times(counts_NM, share_M[None]).whole

    # Place an expert's remainders end to end, once by (round, source) and once by slot; both have the same total
    # length. The overlap of a source's interval with a slot's is the number of tokens that the source sends to the
    # slot. Several rounds spread a source over more slots.
    end_M = _up_to(tokens_M - jnp.sum(floor_NM, axis=0, dtype=jnp.int32), holders)
    start_M = jnp.where(jnp.arange(end_M.size, dtype=jnp.int32) == holders.first_M, 0, jnp.roll(end_M, 1))
    left_NM = counts_NM - _of_class(floor_NM, holders)
    edges = [left_NM * part // _ROUNDS for part in range(_ROUNDS + 1)]
    parts_RNM = jnp.stack([high - low for low, high in pairwise(edges)])
    flat_XM = parts_RNM.reshape(-1, class_M.size)
    last_XM = jnp.cumsum(flat_XM, axis=0, dtype=jnp.int32)
    dealt_XM = jnp.minimum(last_XM, end_M[None]) - jnp.maximum(last_XM - flat_XM, start_M[None])
    dealt_NM = jnp.sum(jnp.maximum(dealt_XM, 0).reshape(parts_RNM.shape), axis=0, dtype=jnp.int32)
    return (floor_NM + dealt_NM)[:, holders.position_M]


def _up_to(values_M: jax.Array, holders: ReplicaMap) -> jax.Array:
    """Sums the values of the same expert's slots up to and including each slot."""
    sums_M = jnp.cumsum(values_M, dtype=jnp.int32)
    return sums_M - (sums_M - values_M)[holders.first_M]


def _of_class(values_NM: jax.Array, holders: ReplicaMap) -> jax.Array:
    """Sums the values in all slots with each slot's expert, for every source."""
    sums_NM = jnp.cumsum(values_NM, axis=1, dtype=jnp.int32)
    return sums_NM[:, holders.last_M] - (sums_NM - values_NM)[:, holders.first_M]
