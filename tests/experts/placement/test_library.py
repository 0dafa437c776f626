"""Placements and splits without a trainer: numpy arrays in and out, loads of any unit, mistakes in a line."""

import numpy as np
import pytest

from swift.errors import SettingError
from swift.experts.placement.library import place_experts, rank_loads, split_tokens
from swift.experts.placement.policy import Static

LOADS = np.random.default_rng(0).dirichlet(np.full(16, 0.4), size=2)


def test_every_expert_has_a_slot_and_ranks_are_more_even_than_before():
    placement_LNS = place_experts(LOADS, num_ranks=8, slots_per_rank=3)
    assert (type(placement_LNS), placement_LNS.shape) == (np.ndarray, (2, 8, 3))
    assert all(set(layer.ravel()) == set(range(16)) for layer in placement_LNS)
    static = place_experts(LOADS, 8, 3, Static())
    before, after = (rank_loads(LOADS, placement, evenly=True) for placement in (static, placement_LNS))
    split = rank_loads(LOADS, placement_LNS)
    for loads in (before, after, split):
        np.testing.assert_allclose(loads.sum(axis=1), 1, rtol=1e-6)
    assert (after.max(axis=1) < 0.8 * before.max(axis=1)).all()
    assert (split.max(axis=1) <= 1.001 * after.max(axis=1)).all()


def test_the_unit_of_the_loads_does_not_matter():
    one, thousand = (place_experts(scale * LOADS, 8, 3) for scale in (1.0, 1e9))
    np.testing.assert_array_equal(one, thousand)
    assert place_experts(LOADS[0], 8, 3).tolist() == one[:1].tolist()
    assert place_experts(np.zeros(4), 2, 2).tolist() == [[[0, 1], [2, 3]]]


def test_tokens_are_split_in_whole_numbers():
    random = np.random.default_rng(1)
    counts_NE = random.multinomial(512, LOADS[0], size=8)
    placement_NS = place_experts(counts_NE.sum(axis=0), 8, 3)[0]
    tokens_NNS = split_tokens(counts_NE, placement_NS)
    is_class_NSE = placement_NS[..., None] == np.arange(16)
    np.testing.assert_array_equal(np.einsum("snk,nke->se", tokens_NNS, is_class_NSE), counts_NE)
    assert tokens_NNS.sum(axis=(0, 2)).max() <= 1.001 * 512 + 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: place_experts(np.ones((2, 2, 2)), 2, 2), r"loads = 'float64\[2, 2, 2\]': must be numbers \[experts\]"),
        (lambda: place_experts(np.array(["a"]), 2, 2), r"must be numbers \[experts\], or \[layers, experts\]"),
        (lambda: place_experts(np.array([1, -1]), 2, 2), r"must be finite, and none below 0"),
        (lambda: place_experts(np.array([1, np.nan]), 2, 2), r"must be finite, and none below 0"),
        (lambda: place_experts(np.ones(5), 2, 2), r"slots_per_rank = 2: at least 3"),
        (lambda: split_tokens(np.ones((2, 2)), np.zeros((2, 1), int)), r"must be integers, below 2\^30 in all"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(SettingError, match=message):
        call()
