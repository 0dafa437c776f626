"""Confidence intervals of 95 %: of a share, and of the difference of two shares of the same questions."""

import math
from typing import NamedTuple

_QUANTILE = 1.959963984540054
"""97.5 % of a normal distribution lie below it."""


class Interval(NamedTuple):
    """Both ends of an interval."""

    low: float
    high: float


def share_interval(correct: int, count: int) -> Interval:
    """Computes Wilson's score interval of a share; it is right for few questions and for shares near 0 and 1, too.

    Args:
        correct: questions that were answered correctly.
        count: all questions, at least one.
    """
    square = _QUANTILE**2
    middle = (correct + square / 2) / (count + square)
    half = _QUANTILE / (count + square) * math.sqrt(correct * (count - correct) / count + square / 4)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Interval(low if correct else 0.0, high if correct < count else 1.0)


def difference_interval(both: int, only_first: int, only_second: int, neither: int) -> Interval:
    """Computes the interval of the first share less the second, of two models that were asked the same questions.

    Questions that are hard for one are mostly hard for the other, so it is narrower than that of two samples. It is
    Newcombe's square-and-add interval from Wilson's (Statistics in Medicine 17, 1998, pages 2635 to 2650, method 10).

    Args:
        both: questions that both have answered correctly.
        only_first: those that only the first has.
        only_second: those that only the second has.
        neither: those that neither has; together there is at least one.
    """
    count = both + only_first + only_second + neither
    first, second = (both + only_first) / count, (both + only_second) / count
    one, other = share_interval(both + only_first, count), share_interval(both + only_second, count)
    correlation = _correlation(both, only_first, only_second, neither)

    def distance(of_first: float, of_second: float) -> float:
        square = of_first**2 - 2 * correlation * of_first * of_second + of_second**2
        return math.sqrt(max(0.0, square))

    difference = first - second
    low = difference - distance(first - one.low, other.high - second)
    high = difference + distance(one.high - first, second - other.low)
    return Interval(max(-1.0, low), min(1.0, high))


def _correlation(both: int, only_first: int, only_second: int, neither: int) -> float:
    """Estimates the correlation of both models' answers, with a correction for continuity."""
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    if margins == 0:
        return 0.0
    count = both + only_first + only_second + neither
    excess = float(both * neither - only_first * only_second)
    if excess > 0:
        excess = max(0.0, excess - count / 2)
    return excess / math.sqrt(margins)
