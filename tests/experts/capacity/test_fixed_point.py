"""Products and quotients beyond 32 bits, against Python's integers, which have no end."""

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swift.experts.capacity.token_split import ONE, cumulated, divide_exactly, times

pytestmark = pytest.mark.usefixtures("strict_types")

ROWS = 16
NUMBERS = st.one_of(st.integers(0, 2**30), st.sampled_from([0, 1, 2**15 - 1, 2**15, 2**30 - 2**15, 2**30 - 1, 2**30]))
MANY = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=ROWS, max_size=ROWS)

CARRIED = [(ROWS, 2**15 - 1), (ROWS, 2**30 - 2**15 + 1), *[(0, 0)] * (ROWS - 2)]
"""Two fractions that add up to 1 only if the sum of the lower halves of their bits carries."""

product = jax.jit(times)
quotient = jax.jit(divide_exactly, static_argnums=2)
sums = jax.jit(lambda numbers, fractions: cumulated(times(numbers, fractions)))


def int32(*columns):
    return [np.array(column, np.int32) for column in columns]


@settings(deadline=None, max_examples=60)
@given(MANY)
def test_a_product_is_exact(pairs):
    whole, rest = product(*int32(*zip(*pairs, strict=True)))
    assert whole.tolist() == [a * b >> 30 for a, b in pairs]
    assert rest.tolist() == [(a * b) % ONE for a, b in pairs]


@settings(deadline=None, max_examples=60)
@given(MANY)
@example(CARRIED)
def test_sums_of_products_lose_nothing_behind_the_point(pairs):
    numbers, fractions = zip(*((a // ROWS, b) for a, b in pairs), strict=True)
    expected = np.cumsum([a * b for a, b in zip(numbers, fractions, strict=True)], dtype=object) // ONE
    assert sums(*int32(numbers, fractions)).tolist() == expected.tolist()


@settings(deadline=None, max_examples=60)
@given(MANY, st.sampled_from([2**4 - 1, 2**15, 2**22 + 77, 2**30 - 1]))
def test_a_fraction_has_thirty_bits_whatever_the_total(pairs, most):
    totals = [max(a % (most + 1), 1) for a, _ in pairs]
    parts = [b % (total + 1) for total, (_, b) in zip(totals, pairs, strict=True)]
    found = quotient(*int32(parts, totals), most)
    assert found.tolist() == [part * ONE // total for part, total in zip(parts, totals, strict=True)]
