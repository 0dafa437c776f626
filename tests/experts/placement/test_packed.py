"""The packed placement: evenly loaded ranks, and never less even than class order."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.experts.placement import MinMax, Packed

SHAPES = [(4, 2, 2), (8, 8, 4), (128, 8, 17)]  # E, N, S
packed, minmax = jax.jit(Packed()), jax.jit(MinMax())


def rank_loads(popularity_E, placement_NS):
    replicas_E = np.bincount(placement_NS.ravel(), minlength=len(popularity_E))
    return (popularity_E / replicas_E)[placement_NS].sum(axis=1)


def place(policy, popularity_E, num_ranks, slots_per_rank):
    start_LNS, _ = Packed().init(1, len(popularity_E), num_ranks, slots_per_rank)
    return np.asarray(policy(np.array([popularity_E], np.int32), start_LNS, ())[0])[0]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_replicas_are_those_of_minmax_and_ranks_no_more_loaded_than_in_class_order(data):
    num_classes, num_ranks, slots_per_rank = data.draw(st.sampled_from(SHAPES))
    tokens = data.draw(st.sampled_from([st.integers(0, 4), st.integers(0, 1000), st.integers(0, 2**20)]))
    popularity_E = np.array(data.draw(st.lists(tokens, min_size=num_classes, max_size=num_classes)))
    in_order_NS, packed_NS = (place(policy, popularity_E, num_ranks, slots_per_rank) for policy in (minmax, packed))
    np.testing.assert_array_equal(np.sort(packed_NS, axis=None), np.sort(in_order_NS, axis=None))
    most, in_order = (rank_loads(popularity_E, placement_NS).max() for placement_NS in (packed_NS, in_order_NS))
    assert most <= in_order * (1 + 1e-6)


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
