"""A run's metrics as arrays over its steps, smoothed and thinned for drawing.

Shape suffixes: T steps, B bins of steps, L MoE layers, E expert classes.
"""

import itertools

import numpy as np

from swift.errors import SettingError
from swift.record import Run, ratio


def class_counts(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is counted per MoE layer and expert class over the run's steps.

    Returns:
        popularity, replicas and dropped tokens, each float64[T, L, E]; empty for a run without MoE layers.

    Raises:
        SettingError: the counts are not all there, or not of one shape in all steps.
    """
    counts = tuple(_class_counts(run, name) for name in ("popularity", "replicas", "dropped"))
    popularity_TLE, replicas_TLE, dropped_TLE = counts
    if not popularity_TLE.shape == replicas_TLE.shape == dropped_TLE.shape:
        shapes = [counts_TLE.shape[1:] for counts_TLE in counts]
        allowed = f"popularity, replicas and dropped must have one shape (layers, classes), in {run.path}"
        raise SettingError("metrics", shapes, allowed)
    return popularity_TLE, replicas_TLE, dropped_TLE


def _class_counts(run: Run, name: str) -> np.ndarray:
    values = [record.get(name) or [] for record in run.metrics]
    try:
        counts_TLE = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        allowed = f"must be numbers of one shape [layers][classes] in all steps, in {run.path}"
        raise SettingError("metrics", name, allowed) from error
    return counts_TLE if counts_TLE.ndim == 3 else np.zeros((len(values), 0, 0))


def shares(counts: np.ndarray) -> np.ndarray:
    """Counts as shares of their sum over the last dim; NaN where that is zero."""
    return ratio(counts, counts.sum(axis=-1, keepdims=True))


def smooth(values_T: np.ndarray) -> np.ndarray:
    """The mean around each step, over a twentieth of the steps: without lag, NaN left out, for the eye only."""
    num_steps = len(values_T)
    steps = np.arange(num_steps)
    # Towards the ends the window narrows on both sides, or a steep start would be drawn too low.
    half_T = np.minimum(num_steps // 40, np.minimum(steps, num_steps - 1 - steps))
    known_T = np.isfinite(values_T)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known_T, values_T, 0.0))])
    numbers = np.concatenate([[0], np.cumsum(known_T)])
    first, last = steps - half_T, steps + half_T + 1
    return ratio(sums[last] - sums[first], numbers[last] - numbers[first])


def thin(values_T: np.ndarray, num_points: int = 1000) -> np.ndarray:
    """Which of many points to draw, so that the line looks the same: the least and the largest of each bin.

    Returns:
        int[at most num_points], rising; all T where they are few.
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


def bin_steps(counts_T: np.ndarray, num_bins: int = 300) -> np.ndarray:
    """Sums over bins of consecutive steps, as equal as can be: what a heat map has columns for.

    Returns:
        float64[B, ...], B = min(num_bins, T).
    """
    num_steps = len(counts_T)
    if num_steps <= num_bins:
        return counts_T
    edges = np.linspace(0, num_steps, num_bins + 1).astype(int)[:-1]
    return np.add.reduceat(counts_T, edges, axis=0)
