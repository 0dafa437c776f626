"""The split of tokens over replicas: whole, conserved, near its shares, and towards the ranks with room to spare."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.experts.split import Rooms, Slots, split_tokens

pytestmark = pytest.mark.usefixtures("strict_types")


@partial(jax.jit, static_argnames=("rooms", "rounds"))
def split(counts_NE, placement_NS, rooms, rounds):
    slots = Slots.of(placement_NS, counts_NE.shape[1])
    return split_tokens(counts_NE, placement_NS, slots, rooms, rooms.rank, rounds)


def draw(random, num_classes, num_ranks, slots_per_rank, tokens, skew=1.0):
    share_E = random.dirichlet(np.full(num_classes, skew))
    counts_NE = np.stack([random.multinomial(tokens, share_E) for _ in range(num_ranks)]).astype(np.int32)
    spare = random.integers(0, num_classes, num_ranks * slots_per_rank - num_classes)
    placement = random.permutation(np.concatenate([np.arange(num_classes), spare])).astype(np.int32)
    return counts_NE, placement.reshape(num_ranks, slots_per_rank)


def by_class(split_NM, placement_NS, num_classes):
    return split_NM @ (placement_NS.reshape(-1, 1) == np.arange(num_classes))


CASES = [  # (E, N, S), tokens of a source, rounds
    ((5, 3, 2), 1, 8),
    ((8, 8, 4), 256, 8),
    ((8, 8, 4), 7, 0),
    ((128, 8, 16), 2048, 8),
    ((4, 2, 3), 2_000_000, 8),
]


@pytest.mark.parametrize(("shape", "tokens", "rounds"), CASES, ids=str)
@settings(deadline=None, max_examples=20)
@given(skew=st.sampled_from([0.05, 0.5, 5.0]), seed=st.integers(0, 2**16))
def test_all_tokens_of_a_source_and_class_go_to_slots_of_the_class(shape, tokens, rounds, skew, seed):
    counts_NE, placement_NS = draw(np.random.default_rng(seed), *shape, tokens, skew)
    split_NM = np.asarray(split(counts_NE, placement_NS, Rooms(tokens, tokens), rounds))
    assert split_NM.dtype == np.int32
    assert (split_NM >= 0).all()
    np.testing.assert_array_equal(by_class(split_NM, placement_NS, shape[0]), counts_NE)


@pytest.mark.parametrize("tokens", [5, 256, 2048])
def test_an_even_split_gives_every_replica_its_share_within_a_token(tokens):
    for seed in range(5):
        counts_NE, placement_NS = draw(np.random.default_rng(seed), 8, 8, 4, tokens)
        split_NM = np.asarray(split(counts_NE, placement_NS, Rooms(tokens, tokens), 0))
        replicas_E = np.bincount(placement_NS.ravel(), minlength=8)
        share_M = (counts_NE.sum(axis=0) / replicas_E)[placement_NS.ravel()]
        assert np.abs(split_NM.sum(axis=0) - share_M).max() <= 2 + tokens * 8 / 2**12
        share_NM = (counts_NE / replicas_E)[:, placement_NS.ravel()]
        assert np.abs(split_NM - share_NM).max() <= 3


def test_rounds_move_tokens_to_ranks_with_room_to_spare():
    over = dict.fromkeys((0, 2, 8), 0)
    for seed in range(20):
        counts_NE, placement_NS = draw(np.random.default_rng(seed), 8, 8, 4, 256)
        for rounds in over:
            split_NM = np.asarray(split(counts_NE, placement_NS, Rooms(256, 256), rounds))
            over[rounds] += np.maximum(split_NM.sum(axis=0).reshape(8, 4).sum(axis=1) - 256, 0).sum()
    assert over[2] < 0.7 * over[0]
    assert over[8] < 0.8 * over[2]


@pytest.mark.parametrize(("buffer", "most"), [(64, 47), (40, 42)])
def test_a_source_keeps_away_from_the_rank_that_its_other_tokens_fill(buffer, most):
    """Both ranks are evenly loaded, but every source has more for one, and one class that it can send to both."""
    counts_NE = np.array([[34, 30, 0], [34, 0, 30]], np.int32)
    split_ND = np.asarray(split(counts_NE, np.array([[0, 1], [0, 2]], np.int32), Rooms(64, buffer), 8))
    split_ND = split_ND.reshape(2, 2, 2).sum(axis=2)
    assert np.abs(split_ND.sum(axis=0) - 64).max() <= 1
    assert split_ND.max() == most
