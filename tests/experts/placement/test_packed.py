"""The packed placement: evenly loaded ranks, and never less even than class order."""

import jax
import numpy as np
import pytest
from eplb import eplb, largest_rank_load
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.experts.placement.packed import MinMax, Packed

SHAPES = [(4, 2, 2), (8, 8, 4), (128, 8, 17)]  # E, N, S
packed, minmax = jax.jit(Packed()), jax.jit(MinMax())


def rank_loads(popularity_E, placement_NS):
    replicas_E = np.bincount(placement_NS.ravel(), minlength=len(popularity_E))
    return (popularity_E / replicas_E)[placement_NS].sum(axis=1)


def place(policy, popularity_E, num_ranks, slots_per_rank):
    start_LNS, _ = Packed().init(1, len(popularity_E), num_ranks, slots_per_rank)
    return np.asarray(policy(np.array([popularity_E], np.int32), start_LNS, ())[0])[0]


def greedy_replicas(popularity_E, num_slots, prefers_first):
    """Each next replica to the largest load per replica: of several the first, or the one with the fewest replicas."""
    tokens_E, counts_E = popularity_E.astype(np.float32), np.ones(len(popularity_E), int)
    for _ in range(num_slots - len(popularity_E)):
        load_E = tokens_E / counts_E.astype(np.float32)
        tied = np.flatnonzero(load_E == load_E.max())
        counts_E[tied[0] if prefers_first else min(tied, key=counts_E.__getitem__)] += 1
    return counts_E.tolist()


def draw(data, shapes):
    num_classes, num_ranks, slots_per_rank = data.draw(st.sampled_from(shapes))
    tokens = data.draw(st.sampled_from([st.integers(0, 4), st.integers(0, 1000), st.integers(0, 2**20)]))
    tokens_E = data.draw(st.lists(tokens, min_size=num_classes, max_size=num_classes))
    return np.array(tokens_E), num_ranks, slots_per_rank


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_replicas_minimize_the_largest_load_and_ranks_are_no_more_loaded_than_in_class_order(data):
    """They are those of ``MinMax``, or those of the other way to decide between experts that tie for one."""
    popularity_E, num_ranks, slots_per_rank = draw(data, SHAPES)
    in_order_NS, packed_NS = (place(policy, popularity_E, num_ranks, slots_per_rank) for policy in (minmax, packed))
    of_minmax, other = (greedy_replicas(popularity_E, packed_NS.size, prefers_first) for prefers_first in (False, True))
    assert np.bincount(in_order_NS.ravel()).tolist() == of_minmax
    assert np.bincount(packed_NS.ravel()).tolist() in (of_minmax, other)
    most, in_order = (rank_loads(popularity_E, placement_NS).max() for placement_NS in (packed_NS, in_order_NS))
    assert most <= in_order * (1 + 1e-6)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_rank_is_more_loaded_than_with_eplb(data):
    """Experts with few tokens tie for replicas, and EPLB gives them to the first one."""
    popularity_E, num_ranks, slots_per_rank = draw(data, [*SHAPES, (4, 3, 2)])
    packed_NS = place(packed, popularity_E, num_ranks, slots_per_rank)
    most = largest_rank_load(popularity_E, eplb(popularity_E, num_ranks, slots_per_rank))
    assert rank_loads(popularity_E, packed_NS).max() <= most * (1 + 1e-6)


def test_a_tie_for_a_replica_is_decided_by_how_well_it_packs():
    """With two replicas of the first two experts no rank could have less than 9."""
    packed_NS = place(packed, np.array([12, 6, 3, 2]), 3, 2)
    assert sorted(map(sorted, packed_NS.tolist())) == [[0, 0], [0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("popularity_E", "expected_NS"),
    [
        ([40, 30, 20, 10], [[0, 3], [1, 2]]),
        ([10, 20, 30, 40], [[3, 0], [2, 1]]),  # class order would load the ranks with 30 and 70
        ([0, 0, 0, 0], [[0, 1], [2, 3]]),  # no rank is the least loaded: the first with a free slot
        ([99, 1, 0, 0], [[0, 3], [1, 2]]),  # a rank with one slot left is passed over while another is less loaded
    ],
    ids=["falling", "rising", "none", "one hot"],
)
def test_by_hand(popularity_E, expected_NS):
    assert place(packed, np.array(popularity_E), 2, 2).tolist() == expected_NS


def test_ranks_are_nearly_even_where_class_order_is_not():
    random = np.random.default_rng(0)
    share = {"packed": [], "minmax": []}
    for _ in range(20):
        popularity_E = random.permutation((10_000 / np.arange(1, 17) ** 1.2).astype(int))
        for policy, name in ((packed, "packed"), (minmax, "minmax")):
            loads_N = rank_loads(popularity_E, place(policy, popularity_E, 8, 4))
            share[name].append(loads_N.max() / loads_N.mean())
    assert np.max(share["packed"]) < 1.1 < np.median(share["minmax"])


@pytest.mark.parametrize("tokens", [100, 2**20, 2**31 - 1])
def test_no_two_slots_can_be_exchanged_for_a_lower_load_of_the_fullest_rank(tokens):
    """With the popularity in any unit, and a sum beyond 32 bits."""
    random = np.random.default_rng(0)
    for _ in range(5):
        popularity_E = (tokens * random.random(16) ** 2).astype(np.int64)
        packed_NS = place(packed, popularity_E, 8, 4)
        load_NS = (popularity_E / np.bincount(packed_NS.ravel(), minlength=16))[packed_NS]
        load_N = load_NS.sum(axis=1)
        most = load_N.argmax()
        for slot, rank, other in np.ndindex(4, 8, 4):
            moved = load_NS[most, slot] - load_NS[rank, other]
            assert rank == most or max(load_N[most] - moved, load_N[rank] + moved) > load_N[most] * (1 - 1e-6)
