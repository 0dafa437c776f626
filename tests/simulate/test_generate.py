"""Traces that are made up: their means, their seeds, and that they are traces."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.simulate.traces import evenly_spaced, poisson, weibull

HORIZON_S = 3000 * 600.0


@pytest.mark.parametrize("shape", [None, 0.7, 1.0, 2.0])
def test_the_mean_time_between_failures_is_what_was_asked_for(shape):
    trace = weibull(64, 600, shape, 0, HORIZON_S) if shape else poisson(64, 600, 0, HORIZON_S)
    assert trace.mean_time_between_failures_s == pytest.approx(600, rel=0.1)


def test_who_is_down_does_not_fail():
    """A repair takes one mean time of 4 nodes' failures, and 1 in 5 is down: so many failures are missing."""
    trace = poisson(4, 600, 600, HORIZON_S)
    assert trace.num_failures == pytest.approx(HORIZON_S / 600 * 4 / 5, rel=0.07)


def test_a_small_shape_comes_in_bursts():
    def variation(shape):
        times = [change.time_s for change in weibull(64, 600, shape, 0, HORIZON_S).changes if change.removed]
        gaps = [after - before for before, after in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return sum((gap - mean) ** 2 for gap in gaps) ** 0.5 / len(gaps) ** 0.5 / mean

    assert variation(0.5) > 1.5
    assert variation(3.0) < 0.5


@given(st.integers(1, 5), st.integers(0, 3), st.sampled_from([0.0, 5.0, 1000.0]))
@settings(max_examples=30, deadline=None)
def test_the_same_seed_gives_the_same_trace_and_everybody_comes_back(num_nodes, seed, repair_s):
    trace = poisson(num_nodes, 50, repair_s, 4000, seed)
    assert trace == poisson(num_nodes, 50, repair_s, 4000, seed)
    assert trace != poisson(num_nodes, 50, repair_s, 4000, seed + 1)
    live, gone_s = set(trace.initial), {}
    for time_s, removed, added in trace.changes:
        for node in removed:
            gone_s[node] = time_s
        for node in added:
            assert time_s == pytest.approx(gone_s[node] + repair_s)
        live = live - set(removed) | set(added)
    assert all(gone_s[f"node{n}"] + repair_s > 4000 for n in range(1, num_nodes + 1) if f"node{n}" not in live)


def test_evenly_spaced_removals():
    trace = evenly_spaced(30, 1800, 15, seed=3)
    assert (len(trace.initial), trace.num_failures, trace.horizon_s) == (30, 15, 15 * 1800)
    assert len({node for change in trace.changes for node in change.removed}) == 15


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: poisson(0, 600, 0, 10), "nodes"),
        (lambda: poisson(4, 0, 0, 10), "mtbf (s)"),
        (lambda: poisson(4, 600, -1, 10), "repair (s)"),
        (lambda: poisson(4, 600, 0, 0), "trace horizon (s)"),
        (lambda: poisson(4, 600, 0, 10, seed=-1), "seed"),
        (lambda: weibull(4, 600, 0.01, 0, 10), "shape"),
        (lambda: evenly_spaced(4, 0, 2), "period (s)"),
        (lambda: evenly_spaced(4, 60, 0), "num_failures"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(make, setting):
    with pytest.raises(SettingError) as told:
        make()
    assert told.value.setting == setting
