import dataclasses

import numpy as np
import pytest

from swift.errors import SettingError
from swift.record import running_mean, scalars
from swift.report.series import bin_steps, class_counts, shares, smooth, thin


def test_null_and_missing_values_are_nan(make_run):
    run = make_run(num_steps=3)
    run.metrics[1]["loss"] = None
    del run.metrics[2]["loss"]
    assert np.isnan(scalars(run, "loss")).tolist() == [False, True, True]


def test_class_counts_are_steps_by_layers_by_classes(make_run):
    run = make_run(num_steps=3, num_layers=2, num_classes=4)
    popularity_TLE, replicas_TLE, dropped_TLE = class_counts(run)
    assert popularity_TLE.shape == replicas_TLE.shape == dropped_TLE.shape == (3, 2, 4)
    assert popularity_TLE[2, 1, 3] == run.metrics[2]["popularity"][1][3]


def test_a_dense_run_has_no_class_counts(make_run):
    run = make_run(num_steps=3)
    for record in run.metrics:
        record["popularity"] = record["replicas"] = record["dropped"] = []
    assert [counts.size for counts in class_counts(run)] == [0, 0, 0]


@pytest.mark.parametrize("value", [[[1, 2]], [["many"] * 8] * 2, None])
def test_counts_of_another_shape_are_told(make_run, value):
    run = make_run(num_steps=3)
    run.metrics[1]["popularity"] = value
    with pytest.raises(SettingError, match=r"popularity.*one shape"):
        class_counts(run)


def test_counts_that_do_not_belong_together_are_told(make_run):
    run = make_run(num_steps=3)
    run = dataclasses.replace(run, metrics=[record | {"replicas": [[1]]} for record in run.metrics])
    with pytest.raises(SettingError, match="one shape"):
        class_counts(run)


def test_shares_of_nothing_are_nan():
    assert shares(np.array([[1.0, 3.0]])).tolist() == [[0.25, 0.75]]
    assert np.isnan(shares(np.zeros((2, 4)))).all()


def test_running_mean_begins_with_the_first_full_window():
    means = running_mean(np.array([1.0, 2.0, 3.0, np.nan, 5.0, 6.0]), 2)
    np.testing.assert_array_equal(means, [np.nan, 1.5, 2.5, np.nan, np.nan, 5.5])
    assert np.isnan(running_mean(np.ones(3), 4)).all()


def test_smoothing_keeps_a_line_as_it_is_up_to_its_ends():
    line = np.arange(200.0)
    np.testing.assert_allclose(smooth(line), line)


def test_smoothing_averages_and_leaves_out_nan():
    values = np.tile([0.0, 2.0], 100)
    values[100] = np.nan
    assert np.abs(smooth(values)[10:-10] - 1.0).max() < 0.2
    assert np.isnan(smooth(np.full(80, np.nan))).all()
    assert smooth(np.zeros(0)).size == 0


@pytest.mark.parametrize("num_steps", [1, 1000, 1001, 12345])
def test_thinning_keeps_few_points_and_every_spike(num_steps):
    values = np.sin(np.arange(float(num_steps)))
    values[num_steps // 3], values[num_steps // 2] = -9.0, 9.0
    values[num_steps // 4] = np.nan if num_steps > 1000 else 0.0
    points = thin(values)
    assert len(points) <= 1000
    assert (np.diff(points) > 0).all()
    assert np.nanmax(values[points]) == np.nanmax(values)
    assert np.nanmin(values[points]) == np.nanmin(values)


@pytest.mark.parametrize("num_steps", [1, 7, 300, 301, 10007])
def test_binning_loses_no_token(num_steps):
    counts = np.random.default_rng(0).integers(0, 9, (num_steps, 3)).astype(float)
    bins = bin_steps(counts)
    assert bins.shape == (min(num_steps, 300), 3)
    np.testing.assert_array_equal(bins.sum(axis=0), counts.sum(axis=0))
