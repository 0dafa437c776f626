"""GPipe and 1F1B: the known periods, what they hold, and that they are valid schedules."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.schedules.bounds import lower_bound
from swift.schedules.planners.baselines import gpipe, one_f_one_b
from swift.schedules.problem import Costs, Kind, Problem
from swift.schedules.rules import verify
from swift.schedules.schedule import makespan, peak_memory, period
from swift.topology import Topology

every_baseline = pytest.mark.parametrize("baseline", [gpipe, one_f_one_b], ids=lambda baseline: baseline.__name__)
SIZES = [(P, M) for P in (1, 2, 3, 4, 8) for M in (1, 2, 3, 5, 8, 16)]


@every_baseline
@pytest.mark.parametrize(("P", "M"), SIZES)
def test_unit_times(baseline, P, M):
    schedule = baseline(Problem(Topology(2, P), M))
    assert period(schedule) == 3 * M + 3 * (P - 1)
    assert makespan(schedule) == 3 * period(schedule)
    held_DP = peak_memory(schedule).reshape(2, P)
    ahead = [M] * P if baseline is gpipe else [min(P - p, M) for p in range(P)]
    assert held_DP.tolist() == [ahead] * 2


@pytest.mark.parametrize(("P", "M"), SIZES)
def test_one_f_one_b_keeps_its_period_in_memory_for_p_microbatches(P, M):
    unlimited = one_f_one_b(Problem(Topology(1, P), M))
    limited = one_f_one_b(Problem(Topology(1, P), M, memory_limit=min(P, M)))
    np.testing.assert_array_equal(limited.start, unlimited.start)


@pytest.mark.parametrize(("P", "M"), SIZES)
@pytest.mark.parametrize("limit", [1, 2.5, 4])
def test_gpipe_flushes_when_the_memory_is_full(P, M, limit):
    most = math.floor(limit)
    flushes = [len(range(M)[i : i + most]) for i in range(0, M, most)]
    schedule = gpipe(Problem(Topology(1, P), M, memory_limit=limit))
    assert period(schedule) == sum(3 * size + 3 * (P - 1) for size in flushes)
    assert peak_memory(schedule).max() == min(most, M)


@every_baseline
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_costs_and_limits(problems, baseline, data):
    problem = data.draw(problems(most_failed=0))
    schedule = baseline(problem)
    assert schedule.problem == replace(problem, decoupled=False, staggered=False)
    assert schedule.solver == baseline.__name__
    verify(schedule)
    assert period(schedule) >= lower_bound(schedule.problem) * (1 - 1e-9)


@every_baseline
def test_all_pipelines_do_the_same(baseline):
    schedule = baseline(Problem(Topology(3, 4), 6, costs=Costs(1, 1.3, 0.8, 2, 0.1), memory_limit=3))
    of_pipeline = [
        [(op._replace(pipeline=0), start, end) for p in range(4) for op, _, start, end in schedule.ops_of((d, p))]
        for d in range(3)
    ]
    assert of_pipeline[0] == of_pipeline[1] == of_pipeline[2]
    assert all(timed.worker == (timed.op.pipeline, timed.op.chunk) for timed in schedule.ops())


def test_less_memory_never_makes_one_f_one_b_faster():
    for M in (3, 8, 24):
        periods = [period(one_f_one_b(Problem(Topology(1, 8), M, memory_limit=limit))) for limit in range(1, 10)]
        assert periods == sorted(periods, reverse=True)
        # One micro-batch at a time.
        assert periods[0] == 24 * M


@pytest.mark.parametrize(("P", "limit"), [(2, 1), (4, 2), (6, 2), (6, 3), (8, 2), (8, 4)])
def test_in_little_memory_one_f_one_b_is_no_slower_than_gpipe(P, limit):
    for M in (3, 8, 24):
        problem = Problem(Topology(1, P), M, memory_limit=limit)
        assert period(one_f_one_b(problem)) <= period(gpipe(problem))


@pytest.mark.parametrize(
    ("baseline", "orders"),
    [(gpipe, ["FFBWBWFBW", "FFBWBWFBW"]), (one_f_one_b, ["FFBWFBWBW", "FBWFBWFBW"])],
    ids=["gpipe", "one_f_one_b"],
)
def test_orders_by_hand(baseline, orders):
    schedule = baseline(Problem(Topology(1, 2), 3, memory_limit=2, num_iterations=1))
    for p, order in enumerate(orders):
        assert "".join(timed.op.kind.name for timed in schedule.ops_of((0, p)) if timed.op.kind != Kind.U) == order


@every_baseline
def test_inboxes_count(baseline):
    """A message to read beside one stash: one micro-batch at a time, though two stashes would fit."""
    costs = Costs(inbox=1.0)
    least = baseline(Problem(Topology(1, 3), 4, costs=costs, memory_limit=2))
    assert peak_memory(least).max() == 2
    more = baseline(Problem(Topology(1, 3), 4, costs=costs, memory_limit=4))
    assert 2 < peak_memory(more).max() <= 4
    assert period(more) < period(least) == 9 * 4


@every_baseline
def test_plans_for_no_failure(baseline):
    with pytest.raises(
        SettingError, match=rf"Problem\.failed = \[\(1, 0\)\]: {baseline.__name__} cannot plan for failures"
    ):
        baseline(Problem(Topology(2, 2), 4, frozenset({(1, 0)})))
