"""The places of a mixture's sources, many at once: the order of ``grain.MapDataset.mix``, which finds one by one.

Shapes: N places.
"""

from collections.abc import Sequence

import numpy as np

_LEAST_SHARE = 100
"""Whole number that stands for the smallest weight; the others are in proportion, rounded down."""
_MOST_SQUARED = 2**31
"""Sum of the whole numbers below which products of two of them are exact."""


def mixed_places(places_N: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Finds the source of each place of a mixture, and the number of the place among those of the source, int64[2, N].

    The first source takes its share of all places, as evenly as whole places can be; the second its share of the rest,
    and so on.

    Args:
        places_N: int64, places from 0.
        weights: weight of each source.
    """
    scale = _LEAST_SHARE / min(weights)
    shares = [int(weight * scale) for weight in weights]
    left = sum(shares)
    found_2N = np.zeros((2, len(places_N)), np.int64)
    open_N = np.arange(len(places_N))
    rest_N = places_N if left < _MOST_SQUARED else places_N.astype(object)
    for source, share in enumerate(shares):
        after_N, after_next_N = (_left_over(one_N, share, left) for one_N in (rest_N, rest_N + 1))
        is_taken_N = after_N == after_next_N
        found_2N[0, open_N[is_taken_N]] = source
        found_2N[1, open_N[is_taken_N]] = (rest_N - after_N)[is_taken_N]
        open_N, rest_N, left = open_N[~is_taken_N], after_N[~is_taken_N], left - share
    return found_2N


def _left_over(num_N: np.ndarray, share: int, whole: int) -> np.ndarray:
    """Returns how many of the first places a share of the whole leaves to others; no product grows with the place."""
    return num_N // whole * (whole - share) + num_N % whole * (whole - share) // whole
