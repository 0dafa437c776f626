"""The strategy that cuts pipelines anew: its choice, and what it does where a whole stage is lost."""

from dataclasses import replace

import pytest

from swift.schedules.problem import Costs, Problem
from swift.simulate.engine import simulate
from swift.simulate.job import Job, Periods
from swift.simulate.registry import strategies
from swift.simulate.strategies import Adapting, Gaps
from swift.simulate.traces import Event, Trace, poisson
from swift.topology import Topology

JOB = Job(Problem(Topology(3, 4), 8))
PERIODS = Periods(JOB.problem)
HOUR_S = 3600.0


def of_each_way(job, mtbf_s, repair_s):
    trace = poisson(12, mtbf_s, repair_s, 10 * mtbf_s, seed=3)
    gaps = Gaps.of(trace)
    return [simulate(Adapting(job, PERIODS, gaps, way), trace).ettr for way in ("auto", "reroute", "recut")]


@pytest.mark.parametrize("mtbf_s", [600.0, 6 * HOUR_S])
@pytest.mark.parametrize("repair_s", [60.0, 600.0, 2 * HOUR_S])
def test_the_choice_is_within_a_hundredth_of_the_best_fixed_one(mtbf_s, repair_s):
    chosen, *fixed = of_each_way(JOB, mtbf_s, repair_s)
    assert chosen >= 0.99 * max(fixed)


@pytest.mark.parametrize("repair_s", [60.0, 600.0])
def test_where_a_copy_takes_longer_than_a_downtime_it_chooses_case_by_case(repair_s):
    chosen, *fixed = of_each_way(replace(JOB, network_bandwidth=1e8), 600.0, repair_s)
    assert chosen > 1.01 * max(fixed)


def test_it_is_ahead_of_rerouting_and_behind_the_ideal():
    trace = poisson(12, 1800.0, 2 * HOUR_S, 12 * HOUR_S, seed=1)
    found = {one.name: simulate(one, trace).ettr for one in strategies(JOB, trace, names=("adapt", "swift", "ideal"))}
    assert found["swift"] < found["adapt"] < found["ideal"]


def test_a_run_goes_on_where_all_workers_of_a_stage_are_lost_at_once():
    nodes = [f"n{number:02}" for number in range(12)]
    lost = [node for number, node in enumerate(nodes) if number % 4 == 1]
    events = [*(Event(0.0, "add", node) for node in nodes), *(Event(HOUR_S, "remove", node) for node in lost)]
    trace = Trace(tuple(events), 2 * HOUR_S)
    adapting, swift = (simulate(one, trace) for one in strategies(JOB, trace, names=("adapt", "swift")))
    assert swift.iterations < adapting.iterations
    # Nine of twelve workers are left: a restore from storage, then their share.
    assert adapting.ettr > 0.5 + 0.5 * 0.75 * 0.9


def test_gaps_are_the_means_after_a_loss_and_after_a_return():
    nodes = [Event(0.0, "add", "a"), Event(0.0, "add", "b")]
    changes = [Event(10.0, "remove", "a"), Event(30.0, "add", "a"), Event(100.0, "remove", "b")]
    assert Gaps.of(Trace((*nodes, *changes), 200.0)) == Gaps((20 + 100) / 2, 70.0)
    assert Gaps.of(Trace(tuple(nodes), 200.0)) == Gaps(float("inf"), float("inf"))


@pytest.mark.parametrize(
    ("costs", "stashes"), [(Costs(), None), (Costs(), 8.0), (Costs(t_b=1.3, t_w=0.8, t_u=2.0), None)]
)
@pytest.mark.parametrize("num_workers", [29, 24])
def test_a_recut_that_is_not_planned_is_bounded_by_what_counts_without_a_failure(
    monkeypatch, costs, stashes, num_workers
):
    """Divides bounds that both know of memory, of waiting and that an update is one an iteration."""
    periods = [Periods(Problem(Topology(4, 8), 8, costs=costs, num_iterations=2).limited(stashes)) for _ in range(2)]
    planned = periods[0].recut_ratio(num_workers)
    monkeypatch.setattr("swift.simulate.job.MAX_PLANNED_OPS", 0)
    assert not periods[1].are_planned
    assert periods[1].recut_ratio(32) == 1.0
    assert 0.88 * planned <= periods[1].recut_ratio(num_workers) <= planned * (1 + 1e-9)
