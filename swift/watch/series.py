"""A metric over a run's iterations in bounded memory, for curves a few hundred columns wide.

Shape suffixes: n new values, B bins, C columns.
"""

import numpy as np


class BinnedSeries:
    """Means of a metric over bins of consecutive steps; bins become wider as the run becomes longer.

    Args:
        most_bins: maximum number of bins; even.
    """

    def __init__(self, most_bins: int = 2048):
        self._most, self._width = most_bins, 1
        self._sums_B, self._counts_B = np.zeros(most_bins), np.zeros(most_bins)
        self._last_step = 0

    @np.errstate(over="ignore", invalid="ignore")
    def add(self, steps_n: np.ndarray, values_n: np.ndarray) -> None:
        """Adds values of later steps; values that are not finite are left out.

        Args:
            steps_n: int64[n], steps from 1.
            values_n: float64[n].
        """
        if not len(steps_n):
            return
        self._last_step = max(self._last_step, int(steps_n[-1]))
        while (self._last_step - 1) // self._width >= self._most:
            self._width *= 2
            for bins_B in (self._sums_B, self._counts_B):
                bins_B[: self._most // 2] = bins_B[0::2] + bins_B[1::2]
                bins_B[self._most // 2 :] = 0
        is_finite_n = np.isfinite(values_n)
        bin_n = (steps_n[is_finite_n] - 1) // self._width
        np.add.at(self._sums_B, bin_n, values_n[is_finite_n])
        np.add.at(self._counts_B, bin_n, 1)

    @property
    def means_B(self) -> np.ndarray:
        """Means over the bins so far, float64[B]; NaN where a bin has no value."""
        counts_B = self._counts_B[: -(-self._last_step // self._width)]
        return np.divide(
            self._sums_B[: len(counts_B)], counts_B, out=np.full(len(counts_B), np.nan), where=counts_B > 0
        )


@np.errstate(over="ignore", invalid="ignore")
def fitted_series(values_B: np.ndarray, num_columns: int) -> np.ndarray:
    """Fits a series to a width: averages ranges of about equal length, or repeats values; ignores NaN.

    Args:
        values_B: float64[B].
        num_columns: width C.

    Returns:
        float64[C]; NaN where a range has no value; empty without values.
    """
    if not len(values_B) or num_columns <= 0:
        return np.zeros(0)
    starts_C = np.arange(num_columns) * len(values_B) // num_columns
    counts_C = np.add.reduceat(np.isfinite(values_B).astype(float), starts_C)
    sums_C = np.add.reduceat(np.nan_to_num(values_B), starts_C)
    return np.divide(sums_C, counts_C, out=np.full(num_columns, np.nan), where=counts_C > 0)
