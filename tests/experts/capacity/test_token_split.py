"""The split of tokens over replicas: whole, conserved, near its shares, and towards the ranks with room to spare."""

from fractions import Fraction
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.experts.capacity.token_split import RowLimits, Slots, _whole_tokens, split_tokens

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
    split_NM = np.asarray(split(counts_NE, placement_NS, RowLimits(tokens, tokens), rounds))
    assert split_NM.dtype == np.int32
    assert (split_NM >= 0).all()
    np.testing.assert_array_equal(by_class(split_NM, placement_NS, shape[0]), counts_NE)


EVEN = [  # (E, N, S), tokens of a source
    ((8, 8, 4), 5),
    ((8, 8, 4), 256),
    ((3, 64, 3), 40),
    ((16, 64, 2), 32_768),
    ((64, 256, 2), 131_072),
]


@pytest.mark.parametrize(("shape", "tokens"), EVEN, ids=str)
def test_an_even_split_gives_every_replica_its_share_within_a_token(shape, tokens):
    for seed in range(2 if shape[1] > 8 else 5):
        counts_NE, placement_NS = draw(np.random.default_rng(seed), *shape, tokens)
        split_NM = np.asarray(split(counts_NE, placement_NS, RowLimits(tokens, tokens), 0), np.int64)
        replicas_E = np.bincount(placement_NS.ravel(), minlength=shape[0])
        share_M = (counts_NE.sum(axis=0) / replicas_E)[placement_NS.ravel()]
        assert np.abs(split_NM.sum(axis=0) - share_M).max() <= 1
        share_NM = (counts_NE / replicas_E)[:, placement_NS.ravel()]
        assert np.abs(split_NM - share_NM).max() <= 3


@pytest.mark.parametrize("tokens", [3, 131_072])
def test_uneven_shares_are_given_within_two_tokens_over_all_sources(tokens):
    """Against Python's integers: 256 sources, each with other shares of six slots of one class and two of another."""
    random = np.random.default_rng(0)
    counts_NE = random.multinomial(tokens, [0.7, 0.3], size=256).astype(np.int32)
    shares_NM = random.integers(1, 2**22 // 6, (256, 8), dtype=np.int32)
    class_M = np.array([0, 1, 0, 0, 0, 1, 0, 0], np.int32)
    slots = Slots.of(class_M[None], 2)
    given_NM = np.asarray(jax.jit(_whole_tokens)(counts_NE[:, class_M], shares_NM, slots), np.int64)
    np.testing.assert_array_equal(given_NM @ (class_M[:, None] == np.arange(2)), counts_NE)
    assert (given_NM >= 0).all()
    for slot, its_class in enumerate(class_M.tolist()):
        own, of_class = shares_NM[:, slot].tolist(), shares_NM[:, class_M == its_class].sum(axis=1).tolist()
        exact = sum(Fraction(c * a, b) for c, a, b in zip(counts_NE[:, its_class].tolist(), own, of_class, strict=True))
        assert abs(int(given_NM[:, slot].sum()) - exact) <= 2


def test_rounds_move_tokens_to_ranks_with_room_to_spare():
    over = dict.fromkeys((0, 2, 8), 0)
    for seed in range(20):
        counts_NE, placement_NS = draw(np.random.default_rng(seed), 8, 8, 4, 256)
        for rounds in over:
            split_NM = np.asarray(split(counts_NE, placement_NS, RowLimits(256, 256), rounds))
            over[rounds] += np.maximum(split_NM.sum(axis=0).reshape(8, 4).sum(axis=1) - 256, 0).sum()
    assert over[2] < 0.7 * over[0]
    assert over[8] < 0.8 * over[2]


def test_rounds_move_tokens_also_where_ranks_and_tokens_are_many():
    counts_NE, placement_NS = draw(np.random.default_rng(1), 16, 64, 2, 32_768)
    rooms, over = RowLimits(32_768, 32_768), dict.fromkeys((0, 8), 0)
    for rounds in over:
        split_NM = np.asarray(split(counts_NE, placement_NS, rooms, rounds))
        over[rounds] = np.maximum(split_NM.sum(axis=0).reshape(64, 2).sum(axis=1) - rooms.rank, 0).sum()
    assert over[8] < 0.9 * over[0]


@pytest.mark.parametrize(("buffer", "most"), [(64, 47), (40, 42)])
def test_a_source_keeps_away_from_the_rank_that_its_other_tokens_fill(buffer, most):
    """Both ranks are evenly loaded, but every source has more for one, and one class that it can send to both."""
    counts_NE = np.array([[34, 30, 0], [34, 0, 30]], np.int32)
    split_ND = np.asarray(split(counts_NE, np.array([[0, 1], [0, 2]], np.int32), RowLimits(64, buffer), 8))
    split_ND = split_ND.reshape(2, 2, 2).sum(axis=2)
    assert np.abs(split_ND.sum(axis=0) - 64).max() <= 1
    assert split_ND.max() == most
