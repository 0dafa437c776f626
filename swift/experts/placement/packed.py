"""Policies for even loads: ``MinMax`` balances slots, ``Packed`` balances ranks, for slots that share capacity.

``MinMax`` minimizes the load of the most loaded replica. ``Packed`` distributes the same replicas so that ranks are
evenly loaded: with capacity by rank, the loads of single slots do not matter.

Shape suffixes: L expert layers, E experts, N expert ranks, S slots per rank, M = N * S slots of a layer.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from swift.experts.placement.policy import PolicyState, StartsUniform, place_contiguously
from swift.experts.placement.replicas import contiguous


@dataclass(frozen=True)
class MinMax(StartsUniform):
    """Repeatedly gives a replica to the expert with the most tokens per replica, until the slots are full.

    Replicas are laid out in expert order. No placement has a smaller largest load per replica, up to float32 rounding:
    an expert gets another replica only while its load is the largest, and every placement with a smaller largest load
    has to give that expert another replica, too.

    >>> policy = MinMax()
    >>> placement_LNS, state = policy.init(num_layers=1, num_classes=3, num_ranks=3, slots_per_rank=2)
    >>> policy(jnp.array([[21, 60, 19]]), placement_LNS, state)[0].tolist()
    [[[0, 0], [1, 1], [1, 2]]]
    """

    name = "minmax"

    def __call__(
        self, popularity_LE: Int[Array, "L E"], placement_LNS: Int[Array, "L N S"], state: PolicyState
    ) -> tuple[Int[Array, "L N S"], PolicyState]:
        """Places replicas so that the largest load per replica is minimal, or uniformly for a layer without tokens."""
        return place_contiguously(minmax_replicas, popularity_LE, placement_LNS), state


def minmax_replicas(
    popularity_E: Int[Array, " E"], num_slots: int, first_of_ties: Bool[Array, ""] | bool = False
) -> Int[Array, " E"]:
    """Chooses every expert's replica count, int32[E], so that the largest load per replica is minimal.

    Args:
        popularity_E: int32[E], tokens per expert.
        num_slots: total number of replicas of all experts.
        first_of_ties: whether the first of several experts with the largest load gets the next replica, as in
            DeepSeek's EPLB. Otherwise the one with the fewest replicas gets it, so that a layer without tokens becomes
            uniform.
    """
    tokens_E = popularity_E.astype(jnp.float32)
    num_classes = popularity_E.shape[0]
    classes_E = jnp.arange(num_classes)
    by_count = 1 - jnp.asarray(first_of_ties).astype(jnp.int32)

    def grow(_: jax.Array, counts_E: jax.Array) -> jax.Array:
        load_E = tokens_E / counts_E.astype(jnp.float32)
        hottest = jnp.argmin(jnp.where(load_E == jnp.max(load_E), counts_E * by_count, num_slots))
        return counts_E + (classes_E == hottest).astype(jnp.int32)

    return lax.fori_loop(0, num_slots - num_classes, grow, jnp.ones(num_classes, jnp.int32))


@dataclass(frozen=True)
class Packed(StartsUniform):
    """Places the replicas of ``MinMax``, most loaded first, each on the least loaded rank with a free slot.

    Two replicas of an expert may share a rank: only the balance between ranks counts, and keeping replicas apart would
    worsen it. If experts tie for a replica, both tie-breaks are tried. If expert order happens to balance the ranks
    better, expert order is used. Finally, slots are exchanged between the most loaded rank and another rank, always the
    best pair of slots, as long as this reduces the larger of the two loads.

    >>> policy = Packed()
    >>> placement_LNS, state = policy.init(num_layers=1, num_classes=4, num_ranks=2, slots_per_rank=2)
    >>> policy(jnp.array([[40, 30, 20, 10]]), placement_LNS, state)[0].tolist()
    [[[0, 3], [1, 2]]]
    """

    name = "packed"

    def __call__(
        self, popularity_LE: Int[Array, "L E"], placement_LNS: Int[Array, "L N S"], state: PolicyState
    ) -> tuple[Int[Array, "L N S"], PolicyState]:
        """Packs the replicas of every layer; in a layer without tokens, experts get equally many replicas."""
        _, num_ranks, slots_per_rank = placement_LNS.shape

        def place(popularity_E: jax.Array) -> jax.Array:
            return _pack(popularity_E, num_ranks, slots_per_rank)

        return jax.vmap(place)(popularity_LE), state


def _pack(popularity_E: jax.Array, num_ranks: int, slots_per_rank: int) -> jax.Array:
    def start(first_of_ties: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        replicas_E = minmax_replicas(popularity_E, num_ranks * slots_per_rank, first_of_ties)
        load_E = popularity_E.astype(jnp.float32) / replicas_E.astype(jnp.float32)
        packed_NS, packed_N = _greedy(load_E, replicas_E, num_ranks, slots_per_rank)
        in_order_NS = contiguous(replicas_E, num_ranks, slots_per_rank)
        largest = jnp.max(jnp.stack([packed_N, jnp.sum(load_E[in_order_NS], axis=1)]), axis=1)
        return jnp.stack([packed_NS, in_order_NS]), largest, replicas_E

    # Experts may tie for a replica, and either choice may give the better packing.
    placement_TCNS, largest_TC, replicas_TE = jax.vmap(start)(jnp.array([False, True]))
    best = jnp.argmin(largest_TC.reshape(-1))
    replicas_E = replicas_TE[best // largest_TC.shape[1]]
    return _exchanged(
        placement_TCNS.reshape(-1, num_ranks, slots_per_rank)[best], _whole_loads(popularity_E, replicas_E)
    )


def _greedy(
    load_E: jax.Array, replicas_E: jax.Array, num_ranks: int, slots_per_rank: int
) -> tuple[jax.Array, jax.Array]:
    """Places replicas, most loaded first, on the least loaded rank with a free slot; returns (placement, loads)."""
    num_slots = num_ranks * slots_per_rank
    by_load_E = jnp.argsort(-load_E, stable=True).astype(jnp.int32)
    class_M = jnp.repeat(by_load_E, replicas_E[by_load_E], total_repeat_length=num_slots)

    def put(carry: tuple[jax.Array, jax.Array], load: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        load_N, filled_N = carry
        rank = jnp.argmin(jnp.where(filled_N < slots_per_rank, load_N, jnp.inf)).astype(jnp.int32)
        is_rank_N = jnp.arange(num_ranks, dtype=jnp.int32) == rank
        place = rank * slots_per_rank + filled_N[rank]
        return (load_N + jnp.where(is_rank_N, load, 0.0), filled_N + is_rank_N.astype(jnp.int32)), place

    none = jnp.zeros(num_ranks, jnp.float32), jnp.zeros(num_ranks, jnp.int32)
    (load_N, _), place_M = lax.scan(put, none, load_E[class_M])
    return jnp.zeros(num_slots, jnp.int32).at[place_M].set(class_M).reshape(num_ranks, slots_per_rank), load_N


def _whole_loads(popularity_E: jax.Array, replicas_E: jax.Array) -> jax.Array:
    """Computes each expert's load per replica, int32, scaled so that the loads of all slots sum to less than 2^30."""
    # Comparisons of integer sums do not depend on how a compiler fuses operations. The total may exceed 32 bits.
    high = jnp.sum(popularity_E >> 12, dtype=jnp.int32)
    low = jnp.sum(popularity_E & 0xFFF, dtype=jnp.int32)
    bits = 1 + jnp.maximum(jnp.where(high > 0, 12 + 32 - lax.clz(high), 0), 32 - lax.clz(low))
    more, fewer = jnp.maximum(29 - bits, 0), jnp.maximum(bits - 29, 0)
    return (popularity_E << more >> fewer) // replicas_E


def _exchanged(placement_NS: jax.Array, load_E: jax.Array) -> jax.Array:
    """Exchanges slots between the most loaded rank and others, as long as that lowers the larger of the two loads."""
    num_ranks, num_slots = placement_NS.shape

    def improve(search: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        class_M, step, _ = search
        load_NS = load_E[class_M].reshape(num_ranks, num_slots)
        load_N = jnp.sum(load_NS, axis=1, dtype=jnp.int32)
        fullest, most = jnp.argmax(load_N).astype(jnp.int32), jnp.max(load_N)
        # An exchange within the fullest rank must never be chosen: for its own slots, use the load of the whole rank.
        is_fullest_N1 = (jnp.arange(num_ranks, dtype=jnp.int32) == fullest)[:, None]
        load_M, left_M = load_NS.reshape(-1), jnp.where(is_fullest_N1, most, load_N[:, None] - load_NS).reshape(-1)

        def larger(load: jax.Array) -> jax.Array:
            return jnp.maximum(most - load + load_M, left_M + load)

        # For integers min is much faster than argmin, so argmin runs only over a single row.
        slot = jnp.argmin(jax.vmap(lambda load: jnp.min(larger(load)))(load_NS[fullest])).astype(jnp.int32)
        larger_M, index = larger(load_NS[fullest, slot]), fullest * num_slots + slot
        other = jnp.argmin(larger_M).astype(jnp.int32)
        exchanged_M = class_M.at[index].set(class_M[other]).at[other].set(class_M[index])
        helps = larger_M[other] < most
        return jnp.where(helps, exchanged_M, class_M), step + 1, helps

    def goes_on(search: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return search[2] & (search[1] < placement_NS.size)

    start = placement_NS.reshape(-1), jnp.zeros((), jnp.int32), jnp.ones((), bool)
    return lax.while_loop(goes_on, improve, start)[0].reshape(placement_NS.shape)
