"""Intervals: Wilson's against scipy's, and how often that of a difference holds the truth."""

from itertools import product
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from swift.evaluate.results import difference_interval, share_interval


@given(st.integers(1, 400), st.data())
def test_the_interval_of_a_share_is_wilsons(count, data):
    correct = data.draw(st.integers(0, count))
    theirs = binomtest(correct, count).proportion_ci(0.95, "wilson")
    np.testing.assert_allclose(share_interval(correct, count), (theirs.low, theirs.high), atol=1e-12)


COUNTS = st.tuples(*[st.integers(0, 60)] * 4).filter(any)


@given(COUNTS)
def test_the_interval_of_a_difference_is_that_of_its_opposite(counts):
    both, first, second, neither = counts
    low, high = difference_interval(both, first, second, neither)
    found = (first - second) / sum(counts)
    assert -1 <= low <= found <= high <= 1
    np.testing.assert_allclose(difference_interval(both, second, first, neither), (-high, -low), atol=1e-12)
    np.testing.assert_allclose(difference_interval(neither, second, first, both), (-high, -low), atol=1e-12)  # errors


def test_models_that_agree_more_are_told_apart_better():
    """With the same two shares, 50 and 40 of 100."""
    widths = [np.ptp(difference_interval(both, 50 - both, 40 - both, 10 + both)) for both in (20, 25, 30, 40)]
    assert widths == sorted(widths, reverse=True)
    assert difference_interval(40, 10, 0, 50).low > 0 > difference_interval(20, 30, 20, 30).low


def test_it_is_that_of_two_samples_where_the_answers_have_nothing_to_do_with_each_other():
    """Newcombe's interval of two samples (1998, method 10 of the other paper), from Wilson's alone."""
    one, other = share_interval(50, 100), share_interval(40, 100)
    low = 0.1 - np.hypot(0.5 - one.low, other.high - 0.4)
    high = 0.1 + np.hypot(one.high - 0.5, 0.4 - other.low)
    np.testing.assert_allclose(difference_interval(20, 30, 20, 30), (low, high), atol=1e-12)


@pytest.mark.parametrize("probs", [(0.4, 0.15, 0.1, 0.35), (0.1, 0.05, 0.2, 0.65), (0.7, 0.1, 0.1, 0.1)])
def test_it_holds_the_true_difference_95_of_100_times(probs):
    """The probability of all results of 24 questions, added up where the interval has the truth inside."""
    count, truth, covered = 24, probs[1] - probs[2], 0.0
    for both, first, second in product(range(count + 1), repeat=3):
        neither = count - both - first - second
        if neither < 0:
            continue
        low, high = difference_interval(both, first, second, neither)
        if low <= truth <= high:
            ways = comb(count, both) * comb(count - both, first) * comb(count - both - first, second)
            covered += ways * np.prod(np.power(probs, (both, first, second, neither)))
    assert 0.93 < covered < 0.99
