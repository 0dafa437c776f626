"""The rules of other systems that placements are compared with, written anew: what is published of them holds."""

import numpy as np
import pytest
from eplb import eplb
from peer_rules import home_ranks, ultraep, waterfilling

SHAPES = [(8, 8, 4), (8, 64, 10), (16, 24, 3), (32, 64, 3)]  # ranks, experts, slots of a rank


def test_eplb_is_as_in_its_published_example():
    """Two layers of twelve experts in four groups, on two nodes of four ranks with two slots each."""
    loads_LE = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
    placed = [eplb(np.array(load_E), num_ranks=8, slots_per_rank=2, num_groups=4, num_nodes=2) for load_E in loads_LE]
    assert placed[0].ravel().tolist() == [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]
    assert placed[1].ravel().tolist() == [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ultraep_serves_every_token_with_the_slots_there_are(shape):
    ranks, classes, slots = shape
    for seed in range(8):
        random = np.random.default_rng(seed)
        tokens_E = random.multinomial(ranks * 1000, random.dirichlet(np.full(classes, 0.3)))
        quota_NE = ultraep(tokens_E, ranks, slots)
        assert quota_NE.min() >= 0
        np.testing.assert_array_equal(quota_NE.sum(axis=0), tokens_E)
        home_NE = np.arange(ranks)[:, None] == home_ranks(classes, ranks)
        assert (home_NE.sum(axis=1) + ((quota_NE > 0) & ~home_NE).sum(axis=1) <= slots).all()
        assert quota_NE.sum(axis=1).max() <= np.where(home_NE, tokens_E, 0).sum(axis=1).max()


@pytest.mark.parametrize(
    ("tokens_E", "slots_per_rank", "expected_N"),
    [
        ([80, 20], 1, [80, 20]),  # no slot for a copy
        ([80, 20], 2, [50, 50]),
        ([40, 40, 10, 10], 3, [50, 50]),  # of one of the two experts
        ([60, 30, 0], 2, [30, 30, 30]),
    ],
)
def test_ultraep_by_hand(tokens_E, slots_per_rank, expected_N):
    assert ultraep(np.array(tokens_E), len(expected_N), slots_per_rank).sum(axis=1).tolist() == expected_N


def test_waterfilling_by_hand():
    """Two experts a rank, ten rows: five each for certain, and what one leaves for the other."""
    assert waterfilling(np.array([7, 2, 9, 8]), num_ranks=2, rows_per_rank=10).tolist() == [7, 2, 5, 5]
    assert waterfilling(np.array([9, 2, 0, 3]), num_ranks=2, rows_per_rank=10).tolist() == [8, 2, 0, 3]
