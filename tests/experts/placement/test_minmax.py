"""The min-max placement against every placement there is."""

import functools
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.experts.placement.packed import MinMax
from swift.experts.placement.policy import Static
from swift.experts.placement.replicas import load_imbalance, replica_counts
from swift.experts.placement.symi import Symi

SHAPES = [(1, 2, 2), (2, 3, 1), (3, 3, 2), (4, 4, 2), (4, 2, 2), (5, 5, 2)]  # E, N, S
minmax = jax.jit(MinMax())


def minmax_replicas(popularity: list[int], num_ranks: int, slots_per_rank: int) -> np.ndarray:
    placement_LNS = np.zeros((1, num_ranks, slots_per_rank), np.int32)
    moved_LNS, _ = minmax(np.array([popularity], np.int32), placement_LNS, ())
    return np.bincount(np.asarray(moved_LNS).ravel(), minlength=len(popularity))


@functools.cache
def all_replicas(num_classes: int, num_slots: int) -> np.ndarray:
    """Every vector of at least one replica per class, int[vectors, E]."""
    cuts = [(0, *inner, num_slots) for inner in combinations(range(1, num_slots), num_classes - 1)]
    return np.diff(np.array(cuts), axis=1)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_no_placement_has_a_smaller_largest_load(data):
    num_classes, num_ranks, slots_per_rank = data.draw(st.sampled_from(SHAPES))
    tokens = data.draw(st.sampled_from([st.integers(0, 4), st.integers(0, 1000), st.integers(0, 2**20)]))
    popularity = data.draw(st.lists(tokens, min_size=num_classes, max_size=num_classes))
    largest = (np.array(popularity) / minmax_replicas(popularity, num_ranks, slots_per_rank)).max()
    least = (np.array(popularity) / all_replicas(num_classes, num_ranks * slots_per_rank)).max(axis=1).min()
    np.testing.assert_allclose(largest, least, rtol=1e-7)


@pytest.mark.parametrize(
    ("popularity", "num_ranks", "slots_per_rank", "expected"),
    [
        ([21, 60, 19], 3, 2, [2, 3, 1]),
        ([0, 0, 0, 0], 3, 2, [2, 2, 1, 1]),
        ([100, 0, 0, 0], 4, 2, [5, 1, 1, 1]),
        ([6, 3, 3, 6], 3, 2, [2, 1, 1, 2]),
        ([6, 3, 3], 5, 1, [2, 2, 1]),
    ],
    ids=["uneven", "none", "one hot", "equal", "a tie goes to the fewest replicas"],
)
def test_by_hand(popularity, num_ranks, slots_per_rank, expected):
    assert minmax_replicas(popularity, num_ranks, slots_per_rank).tolist() == expected


def test_is_no_worse_than_the_other_contiguous_policies():
    popularity_LE = jnp.asarray(1000 * np.random.default_rng(0).pareto(1.0, (12, 16)), jnp.int32)
    imbalance = {}
    for policy in (MinMax(), Symi(), Static()):
        placement_LNS, _ = jax.jit(policy)(popularity_LE, *policy.init(12, 16, 16, 4))
        imbalance[policy.name] = np.asarray(load_imbalance(popularity_LE, replica_counts(placement_LNS, 16)))
    assert (imbalance["minmax"] <= imbalance["symi"]).all()
    assert (imbalance["minmax"] <= imbalance["static"]).all()
    assert imbalance["minmax"].mean() < imbalance["static"].mean()
