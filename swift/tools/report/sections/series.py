"""Metrics of a run as arrays over its steps, smoothed and thinned for drawing.

Shape suffixes: T steps, N runs, B bins of steps, R rows at a time, K kinds of counts, L MoE layers, E experts.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from swift.runlog.analysis.measures import ratio
from swift.runlog.metrics import ranges_of
from swift.runlog.reading import Run

NUM_POINTS = 1000
"""Largest number of points of a drawn line."""
MANY_LINES = 20
"""Number of lines of a picture from which on each has fewer points, so that all together have no more."""


@dataclass(frozen=True, kw_only=True)
class ClassSeries:
    """Summaries of a run's counts by expert, in arrays that grow with its steps or with its experts.

    Attributes:
        routed_TL, dropped_TL: tokens of a layer in a step; 0 in both where a step's counts are unknown.
        misplaced_TL: share of the replicas that would have to be another expert's to follow the tokens; NaN where
            nothing was routed.
        popularity_BLE, replicas_BLE: sums over the steps of a bin, see ``bins_of``.
        popularity_LE, replicas_LE: sums over all steps.
        unknown: ranges of steps that are recorded without valid counts.
    """

    routed_TL: np.ndarray
    dropped_TL: np.ndarray
    misplaced_TL: np.ndarray
    popularity_BLE: np.ndarray
    replicas_BLE: np.ndarray
    popularity_LE: np.ndarray
    replicas_LE: np.ndarray
    unknown: list[range]


def class_series(run: Run) -> ClassSeries | None:
    """Reads the counts by expert, some megabytes at a time; None for a run without MoE layers."""
    counts, steps_T = run.metrics.counts, run.metrics.steps_T
    if counts is None or not len(steps_T) or not counts.num_entries:
        return None
    bin_T, (num_layers, num_classes) = bins_of(len(steps_T)), counts.shape
    routed_TL, dropped_TL = (np.zeros((len(steps_T), num_layers)) for _ in range(2))
    misplaced_TL = np.full((len(steps_T), num_layers), np.nan)
    sums_KBLE = np.zeros((2, bin_T[-1] + 1, num_layers, num_classes))
    is_known_T = np.zeros(len(steps_T), bool)
    for steps_R, counts_RKLE in counts.blocks():
        at_R = np.minimum(np.searchsorted(steps_T, steps_R), len(steps_T) - 1)
        has_record_R = steps_T[at_R] == steps_R
        at_R, counts_RKLE = at_R[has_record_R], counts_RKLE[has_record_R].astype(np.float64)
        popularity_RLE, replicas_RLE, dropped_RLE = (counts_RKLE[:, kind] for kind in range(3))
        is_known_T[at_R] = True
        routed_TL[at_R], dropped_TL[at_R] = popularity_RLE.sum(-1), dropped_RLE.sum(-1)
        misplaced_TL[at_R] = np.abs(shares(popularity_RLE) - shares(replicas_RLE)).sum(-1) / 2
        for index in np.unique(bin_T[at_R]):
            of_bin_R = bin_T[at_R] == index
            sums_KBLE[0, index] += popularity_RLE[of_bin_R].sum(0)
            sums_KBLE[1, index] += replicas_RLE[of_bin_R].sum(0)
    (popularity_BLE, replicas_BLE), (popularity_LE, replicas_LE) = sums_KBLE, sums_KBLE.sum(1)
    unknown = ranges_of(steps_T[~is_known_T].tolist())
    return ClassSeries(
        routed_TL=routed_TL,
        dropped_TL=dropped_TL,
        misplaced_TL=misplaced_TL,
        popularity_BLE=popularity_BLE,
        replicas_BLE=replicas_BLE,
        popularity_LE=popularity_LE,
        replicas_LE=replicas_LE,
        unknown=unknown,
    )


def shares(counts: np.ndarray) -> np.ndarray:
    """Divides counts by their sum over the last dim; NaN where that is zero."""
    return ratio(counts, counts.sum(axis=-1, keepdims=True))


def mean_and_range(values_NT: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes what an error bar or band shows: mean, smallest and largest value over the first dim.

    Not an interval of confidence: runs are repeated a few times, and their range says no more than was seen.

    Returns:
        (mean, smallest, largest), each float64[T]; NaN where one of the values is.
    """
    return values_NT.mean(axis=0), values_NT.min(axis=0), values_NT.max(axis=0)


def smooth(values_T: np.ndarray) -> np.ndarray:
    """Centred moving average over a twentieth of the steps, ignoring NaN; for display only."""
    num_steps = len(values_T)
    steps = np.arange(num_steps)
    # Near the ends the window narrows on both sides; otherwise a steep start would be drawn too low.
    half_T = np.minimum(num_steps // 40, np.minimum(steps, num_steps - 1 - steps))
    known_T = np.isfinite(values_T)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known_T, values_T, 0.0))])
    numbers = np.concatenate([[0], np.cumsum(known_T)])
    first, last = steps - half_T, steps + half_T + 1
    return ratio(sums[last] - sums[first], numbers[last] - numbers[first])


def points_of_a_line(num_lines: int, most: int = NUM_POINTS) -> int:
    """Number of points that each line has at most where so many are drawn together, an even number."""
    return 2 * (most * MANY_LINES // max(num_lines, MANY_LINES) // 2)


def thin(values_T: np.ndarray, num_points: int = NUM_POINTS) -> np.ndarray:
    """Selects points so that a line looks the same: the minimum and maximum of each bin.

    Returns:
        int[at most num_points], ascending; all T if they are few.
    """
    if len(values_T) <= num_points:
        return np.arange(len(values_T))
    edges = np.linspace(0, len(values_T), num_points // 2 + 1).astype(int)
    low_T, high_T = np.nan_to_num(values_T, nan=np.inf), np.nan_to_num(values_T, nan=-np.inf)
    points = {
        start + offset
        for start, end in itertools.pairwise(edges)
        for offset in (int(low_T[start:end].argmin()), int(high_T[start:end].argmax()))
    }
    return np.array(sorted(points))


def bins_of(num_steps: int, num_bins: int = 300) -> np.ndarray:
    """Assigns consecutive steps to bins of nearly equal size, the columns of a heat map.

    Returns:
        int[T], ascending from 0; all different if the steps are few.
    """
    if num_steps <= num_bins:
        return np.arange(num_steps)
    edges = np.linspace(0, num_steps, num_bins + 1).astype(int)[:-1]
    return np.searchsorted(edges, np.arange(num_steps), side="right") - 1
