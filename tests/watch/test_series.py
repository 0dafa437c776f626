"""Means over bins, compared with those of all values at once."""

import numpy as np
import pytest

from swift.watch.series import BinnedSeries, fitted_series


@pytest.mark.parametrize("num_steps", [1, 7, 8, 9, 1000])
def test_bins_have_the_means_of_their_steps(num_steps):
    values_T = np.random.default_rng(num_steps).normal(size=num_steps)
    values_T[3::5] = np.nan
    series = BinnedSeries(8)
    for steps_n in np.array_split(np.arange(1, num_steps + 1), 3):
        series.add(steps_n, values_T[steps_n - 1])
    width = 1
    while -(-num_steps // width) > 8:
        width *= 2
    expected = [np.nanmean(part) if np.isfinite(part).any() else np.nan for part in split(values_T, width)]
    np.testing.assert_allclose(series.means_B, expected)


def split(values_T, width):
    return [values_T[start : start + width] for start in range(0, len(values_T), width)]


def test_a_step_in_the_far_future_costs_no_memory():
    series = BinnedSeries(8)
    series.add(np.array([1, 2**53 - 1]), np.array([1.0, 3.0]))
    assert len(series.means_B) == 8
    assert np.nansum(series.means_B) == 4.0


def test_a_series_is_fitted_to_a_width():
    np.testing.assert_array_equal(fitted_series(np.array([1.0, 2.0]), 4), [1, 1, 2, 2])
    np.testing.assert_array_equal(fitted_series(np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan]), 3), [2, 5, np.nan])
    assert not len(fitted_series(np.zeros(0), 4))
    assert not len(fitted_series(np.ones(3), 0))
