"""SYMI's scheduler against Algorithm 1 of the paper, written out in plain numpy."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.experts.placement.replicas import replica_counts
from swift.experts.placement.symi import Symi

SHAPES = [(1, 1, 1), (5, 3, 2), (8, 4, 3), (7, 7, 1), (32, 9, 5)]  # E, N, S
symi = jax.jit(Symi())


def algorithm1(popularity: list[int], num_slots: int) -> list[int]:
    """Replicas per class, line by line as the paper has it, in float32."""
    one, num_classes, total = np.float32(1), len(popularity), sum(popularity)
    goal = [np.float32(tokens) / np.float32(total) * np.float32(num_slots) for tokens in popularity]
    cnt = [np.floor(max(share, one)) for share in goal]
    diff = [cnt[i] - goal[i] for i in range(num_classes)]
    while sum(cnt) > num_slots:
        i = diff.index(max(diff))
        if cnt[i] > 1:
            cnt[i] -= one
        diff[i] -= one
    while sum(cnt) < num_slots:
        i = diff.index(min(diff))
        cnt[i] += one
        diff[i] += one
    return [int(replicas) for replicas in cnt]


def symi_replicas(popularity: list[int], num_ranks: int, slots_per_rank: int) -> list[int]:
    placement_LNS = np.zeros((1, num_ranks, slots_per_rank), np.int32)
    moved_LNS, _ = symi(np.array([popularity], np.int32), placement_LNS, ())
    return np.bincount(np.asarray(moved_LNS).ravel(), minlength=len(popularity)).tolist()


few, many, any_number = st.integers(0, 4), st.integers(0, 5000), st.integers(0, 2**31 - 1)
skewed = st.integers(0, 30).map(lambda power: 2**power)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_algorithm_1_to_the_letter(data):
    num_classes, num_ranks, slots_per_rank = data.draw(st.sampled_from(SHAPES))
    tokens = data.draw(st.sampled_from([few, many, any_number, skewed, few | any_number]))
    popularity = data.draw(st.lists(tokens, min_size=num_classes, max_size=num_classes).filter(any))
    expected = algorithm1(popularity, num_ranks * slots_per_rank)
    assert symi_replicas(popularity, num_ranks, slots_per_rank) == expected


@pytest.mark.parametrize(
    ("popularity", "num_ranks", "slots_per_rank"),
    [([0, 0, 72730067, 72730075, 72730075], 3, 2), ([2, 2, 0, 2, 0, 0, 3, 2, 1, 1, 1, 1], 9, 5)],
)
def test_roundings_that_a_compiler_must_not_change(popularity, num_ranks, slots_per_rank):
    assert symi_replicas(popularity, num_ranks, slots_per_rank) == algorithm1(popularity, num_ranks * slots_per_rank)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_tokens_and_equal_tokens_are_uniform(shape):
    num_classes, num_ranks, slots_per_rank = shape
    uniform_LNS, _ = Symi().init(1, *shape)
    uniform = replica_counts(uniform_LNS, num_classes)[0].tolist()
    for tokens in (0, 1, 1000):
        assert symi_replicas([tokens] * num_classes, num_ranks, slots_per_rank) == uniform


@pytest.mark.parametrize(
    ("popularity", "num_ranks", "slots_per_rank", "expected"),
    [
        ([10, 70, 20], 3, 2, [1, 4, 1]),
        ([100, 0, 0, 0], 4, 2, [5, 1, 1, 1]),
        ([1, 1, 1, 3], 3, 2, [1, 1, 1, 3]),
        ([3, 3, 1, 1], 3, 2, [2, 2, 1, 1]),
    ],
)
def test_by_hand(popularity, num_ranks, slots_per_rank, expected):
    assert symi_replicas(popularity, num_ranks, slots_per_rank) == expected
