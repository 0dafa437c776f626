import dataclasses

import numpy as np
import pytest

from swift.draw.charts import bins_of, class_series, layer_maps, shares, smooth, thin
from swift.errors import SettingError
from swift.report.figures import sections_of
from swift.runlog.expert_counts import KINDS
from swift.runlog.reading import running_mean, scalars


def test_null_and_missing_values_are_nan(make_run, changed):
    values = {1: {}, 2: {"loss": None}}
    run = changed(make_run(num_steps=3), lambda record: record | values.get(record["step"], {}))
    assert np.isnan(scalars(run, "loss")).tolist() == [False, True, False]
    run = changed(run, lambda record: {n: v for n, v in record.items() if n != "loss" or record["step"] != 3})
    assert np.isnan(scalars(run, "loss")).tolist() == [False, True, True]
    assert [record.get("loss", "none") for record in run.metrics][1:] == [None, "none"]


def plain_series(run):
    """Computes from all counts in memory at once what is drawn, and what tables say."""
    counts = [np.array([record[kind] for record in run.metrics], float) for kind in KINDS]
    popularity_TLE, replicas_TLE, dropped_TLE = counts
    misplaced_TL = np.abs(shares(popularity_TLE) - shares(replicas_TLE)).sum(-1) / 2
    edges = np.linspace(0, len(popularity_TLE), min(300, len(popularity_TLE)) + 1).astype(int)[:-1]
    binned = [np.add.reduceat(counts_TLE, edges, axis=0) for counts_TLE in (popularity_TLE, replicas_TLE)]
    sums = [counts_TLE.sum(0) for counts_TLE in (popularity_TLE, replicas_TLE)]
    return [popularity_TLE.sum(-1), dropped_TLE.sum(-1), misplaced_TL, *binned, *sums]


@pytest.mark.parametrize("num_steps", [3, 300, 301, 700])
def test_counts_are_summed_some_at_a_time_as_all_at_once(make_run, monkeypatch, num_steps):
    monkeypatch.setattr("swift.runlog.expert_counts._BLOCK_BYTES", 2000)
    run = make_run(num_steps=num_steps)
    series = class_series(run)
    for found, expected in zip(dataclasses.astuple(series), [*plain_series(run), []], strict=True):
        np.testing.assert_array_equal(found, expected)


def test_steps_without_counts_are_left_out_and_known(make_run, changed):
    whole = make_run(num_steps=5)
    run = changed(
        whole, lambda record: {n: v for n, v in record.items() if record["step"] not in (2, 4) or n not in KINDS}
    )
    series, expected = class_series(run), class_series(whole)
    assert series.unknown == [range(2, 3), range(4, 5)]
    np.testing.assert_array_equal(series.popularity_BLE[[0, 2, 4]], expected.popularity_BLE[[0, 2, 4]])
    assert series.popularity_BLE[[1, 3]].sum() == series.routed_TL[[1, 3]].sum() == 0
    assert "or damaged: iterations 2, 4." in sections_of(run, 0)[0].note


def test_a_dense_run_has_no_class_counts(make_run, changed):
    assert class_series(changed(make_run(num_steps=3), lambda record: record | {kind: [] for kind in KINDS})) is None


@pytest.mark.parametrize("value", [[[1, 2]], [["many"] * 8] * 2, None, [[-1] * 8] * 2, [[0.5] * 8] * 2])
def test_counts_of_another_shape_are_told(make_run, changed, value):
    with pytest.raises(SettingError, match=r"runs/symi.*popularity.*of step 2.*one shape"):
        changed(make_run(num_steps=3), lambda record: record | ({"popularity": value} if record["step"] == 2 else {}))


def test_counts_that_do_not_belong_together_are_told(make_run, changed):
    shape = {kind: [[1]] for kind in KINDS}
    with pytest.raises(SettingError, match=r"2 layers of 8 classes.*must be 1 layers of 1 classes"):
        changed(make_run(num_steps=3), lambda record: record | (shape if record["step"] == 3 else {}))


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
def test_bins_are_as_equal_as_can_be(num_steps):
    sizes = np.bincount(bins_of(num_steps))
    assert (len(sizes), sizes.sum()) == (min(num_steps, 300), num_steps)
    assert np.ptp(sizes) <= 1
    assert (np.diff(bins_of(num_steps)) >= 0).all()


def test_merged_bins_have_the_shares_of_their_sums():
    counts = np.random.default_rng(0).integers(1, 100, (2, 7, 4))
    maps = layer_maps(np.arange(1.0, 8.0), *counts, num_merged=3)
    assert (maps.first_step, maps.last_step, maps.num_bins, maps.num_merged) == (1, 7, 7, 3)
    for found_BE, counts_BE in zip((maps.tokens_BE, maps.replicas_BE), counts, strict=True):
        sums = [counts_BE[:3].sum(0), counts_BE[3:6].sum(0), counts_BE[6]]
        np.testing.assert_allclose(found_BE, [100 * sum_E / sum_E.sum() for sum_E in sums])
