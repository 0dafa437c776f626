"""Properties of every strategy and trace, and the answer of each strategy to a failure."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.plans.normalize import canonical
from swift.schedules.problem import Costs, Problem
from swift.schedules.schedule import period
from swift.simulate.engine import simulate
from swift.simulate.job import DETECTION_S, MEASURED_JOIN_S, MEASURED_RECOVERY_S, Job, Periods
from swift.simulate.published import MODELS, published
from swift.simulate.registry import STRATEGIES, CannotRun, strategies
from swift.simulate.restarting import PartialCheckpoints, PartialExperts
from swift.simulate.traces import Event, Trace, poisson
from swift.topology import Topology
from tests.simulate.conftest import draw_traces

OF_JOB = STRATEGIES[:6]
JOB = Job(Problem(Topology(2, 2, 8), 4))


def all_that_run(job, trace, model="bert-large"):
    found = strategies(job, trace, published(model))
    return [one for one in found if not isinstance(one, CannotRun)]


def named(name, job=JOB, trace=None):
    (one,) = strategies(job, trace or poisson(4, 600, 60, 3600), names=[name])
    return one


FLAT = Job(Problem(Topology(4, 1), 4))
"""One stage: no schedule has a bubble. Two stages and 4 micro-batches: 1F1B has, and the planner's schedule has not."""


@given(draw_traces(), st.sampled_from([JOB, FLAT, Job(Problem(Topology(3, 3), 2), checkpoint_every=4)]))
@settings(max_examples=80, deadline=None)
def test_the_time_of_every_strategy_adds_up_and_its_goodput_has_a_ceiling(trace, job):
    outcomes = {one.name: simulate(one, trace) for one in all_that_run(job, trace)}
    assert set(outcomes) == set(STRATEGIES)
    for outcome in outcomes.values():
        assert sum(outcome.spent_s.values()) == pytest.approx(trace.horizon_s)
        assert min(outcome.spent_s.values()) >= 0
        assert -1e-9 <= outcome.ettr <= 1 + 1e-9
        _, goodput = outcome.goodput(7)
        assert goodput.mean() == pytest.approx(outcome.ettr, abs=1e-9)
        assert goodput.max() <= 1 + 1e-9
    # Where there are bubbles the work of failed workers may fit into them, and the ideal is no bound.
    for name in OF_JOB if job is FLAT else ("swift", "recycle") if job is JOB else ():
        assert outcomes[name].ettr <= outcomes["ideal"].ettr + 1e-9, name


@given(draw_traces(), st.data())
@settings(max_examples=60, deadline=None)
def test_more_failures_never_help_the_ideal(trace, data):
    """One more failure of a node, which does not return."""
    live = set(trace.initial)
    moments = [change.time_s for change in trace.changes]
    for change in trace.changes:
        live = live - set(change.removed) | set(change.added)
    if not live:
        return
    node = data.draw(st.sampled_from(sorted(live)))
    since_s = max(event.time_s for event in trace.events if event.node == node)
    time_s = data.draw(st.sampled_from([*(m for m in moments if m > since_s), (since_s + trace.horizon_s) / 2]))
    events = sorted([*trace.events, Event(time_s, "remove", node)], key=lambda event: event.time_s)
    fewer, more = (simulate(named("ideal"), one) for one in (trace, Trace(tuple(events), trace.horizon_s)))
    assert more.ettr <= fewer.ettr + 1e-9


@given(draw_traces())
@settings(max_examples=60, deadline=None)
def test_the_ideal_is_the_share_of_live_workers_at_every_moment(trace):
    live, since_s, worker_s, is_empty = len(trace.initial), 0.0, 0.0, not trace.initial
    for time_s, removed, added in trace.changes:
        worker_s, since_s = worker_s + min(live, 4) * (time_s - since_s), time_s
        live += len(added) - len(removed)
        is_empty |= not live
    expected = (worker_s + min(live, 4) * (trace.horizon_s - since_s)) / 4 / trace.horizon_s
    found = simulate(named("ideal"), trace).ettr
    # Where nobody is left, the iteration under way is lost.
    assert found <= expected + 1e-9 if is_empty else found == pytest.approx(expected)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_seed_gives_the_same_outcome(name):
    def outcome(seed):
        trace = poisson(30, 600, 3000, 36000, seed)
        return [simulate(one, trace) for one in all_that_run(JOB, trace) if one.name == name]

    assert outcome(3) == outcome(3)
    assert outcome(3) != outcome(4)


@pytest.mark.parametrize("name", OF_JOB)
def test_without_a_failure_only_saves_take_time(name):
    trace = Trace(tuple(Event(0.0, "add", f"n{i}") for i in range(4)), 7200.0)
    outcome = simulate(named(name, trace=trace), trace)
    assert {cause for cause, seconds in outcome.spent_s.items() if seconds} <= {"useful", "saving"}


def one_failure(back_s=None, horizon_s=1000.0):
    events = [Event(0.0, "add", f"n{i}") for i in range(4)] + [Event(101.0, "remove", "n3")]
    return Trace((*events, *([] if back_s is None else [Event(back_s, "add", "n3")])), horizon_s)


def test_swift_goes_on_with_the_planners_period_and_takes_back_who_returns():
    outcome = simulate(named("swift"), one_failure(500.0))
    ratio = period(adaptive(canonical(JOB.problem, (0, 1)))) / period(adaptive(JOB.problem))
    assert ratio > 1.3
    assert {round(stretch.iteration_s / 2, 6) for stretch in outcome.stretches} == {1.0, round(ratio, 6)}
    recovery_s = MEASURED_RECOVERY_S + JOB.per_worker_s
    join_s = MEASURED_JOIN_S + JOB.per_worker_s + JOB.stage_copy_s
    assert outcome.spent_s["detection"] == DETECTION_S
    assert outcome.spent_s["reconfiguration"] == pytest.approx(recovery_s + join_s)
    assert 0 < outcome.spent_s["lost"] < 2.0


def test_swift_goes_back_to_storage_where_a_stage_is_lost():
    """n1 and n3 are the workers of stage 1."""
    trace = one_failure()
    events = (*trace.events, Event(400.0, "remove", "n1"), Event(500.0, "add", "n1"))
    outcome = simulate(named("swift"), replace(trace, events=events))
    assert outcome.spent_s["waiting"] == pytest.approx(100 - DETECTION_S)
    # Writing 26 GB takes 13 s, or 4 iterations: between one and two such times are lost.
    assert 13 < outcome.spent_s["lost"] < 2 * 16 + 4
    assert outcome.spent_s["reconfiguration"] > JOB.restart_s + JOB.stored_s
    assert simulate(named("recycle"), replace(trace, events=events)).spent_s["waiting"] == 0


def test_roles_move_to_where_the_planner_spreads_failures():
    """Two failures of one stage of 3 pipelines become one of each; without moves the stage has one survivor."""
    job = Job(Problem(Topology(3, 2), 6))
    events = [Event(0.0, "add", f"n{i}") for i in range(6)] + [Event(10.0, "remove", "n1"), Event(20.0, "remove", "n3")]
    trace = Trace(tuple(events), 1000.0)
    swift, recycle = (simulate(named(name, job, trace), trace) for name in ("swift", "recycle"))
    periods = Periods(job.problem)
    assert swift.stretches[-1].iteration_s == pytest.approx(2 * periods.ratio((0, 2)))
    assert recycle.stretches[-1].iteration_s == pytest.approx(2 * periods.ratio((1, 1)))
    assert periods.ratio((1, 1)) < periods.ratio((0, 2))


def test_a_large_problem_has_bounds_for_periods_and_says_so():
    large = Job(Problem(Topology(64, 32), 64))
    swift = named("swift", large)
    assert not swift.periods.are_planned
    assert "bounds" in swift.source
    assert "planner" in named("swift").source
    assert swift.periods.ratio((1,) + (0,) * 31) == pytest.approx(66 / 64, rel=0.02)


def test_elastic_restarts_use_whole_pipelines():
    outcome = simulate(named("full"), one_failure(500.0))
    # One pipeline of two has all 8 micro-batches: 1F1B takes 3 (8 + 1) instead of 3 (4 + 1).
    assert {round(stretch.iteration_s / 2, 6) for stretch in outcome.stretches} == {1.0, round(27 / 15, 6)}
    restart_s = JOB.restart_s + JOB.per_worker_s + JOB.stored_s
    assert outcome.spent_s["reconfiguration"] == pytest.approx(2 * restart_s)


def test_youngs_interval():
    trace = poisson(4, 600, 60, 86400)
    _, turn = named("full", trace=trace).start(trace.initial)
    young_s = math.sqrt(2 * 13 * trace.mean_time_between_failures_s)
    assert turn.pace.saves.every == math.ceil(young_s / 2)
    assert turn.pace.saves.stall_s == 13


def test_buddies_that_are_lost_together_cost_what_storage_does_not_have():
    def lost(*nodes):
        events = [Event(0.0, "add", f"n{i}") for i in range(4)] + [Event(101.0, "remove", node) for node in nodes]
        return simulate(named("memory"), Trace(tuple(events), 400.0)).spent_s["lost"]

    assert lost("n1") == lost("n1", "n2") == 2 + 1.0  # the newest state is not with the buddy yet
    assert 13 < lost("n2", "n3") < 30


def test_partial_checkpoints_are_as_large_as_the_formula_has_it():
    partial = PartialCheckpoints()
    saves = partial.saves(JOB, PartialExperts(1), 2.0)
    assert saves.every == math.ceil(13 * (0.14 + 0.86 / 16) / 2) == 2
    assert partial.saves(replace(JOB, checkpoint_every=1), PartialExperts(16), 2.0).stall_s == pytest.approx(13 - 2)
    assert partial.saves(replace(JOB, checkpoint_every=7), PartialExperts(16), 2.0).stall_s == 0


def test_k_doubles_while_too_many_tokens_are_lost():
    partial = PartialCheckpoints()
    few = partial.after_loss(JOB, PartialExperts(1), iterations=100)
    assert (few.k, few.lost_iterations) == (2, 2 * 15 / 2)
    assert partial.after_loss(JOB, PartialExperts(1), iterations=1000).k == 1
    assert partial.after_loss(JOB, PartialExperts(12, 100.0), iterations=10).k == 16


def test_more_memory_or_bandwidth_never_hurts():
    trace = poisson(4, 300, 60, 20000)
    for name in ("memory", "moc", "full"):
        slow, fast = (
            simulate(named(name, replace(JOB, storage_bandwidth=bandwidth), trace), trace).ettr
            for bandwidth in (2e8, 2e10)
        )
        assert slow < fast, name


def test_who_cannot_run_says_why():
    trace = poisson(64, 600, 60, 3600)
    found = {one.name: one for one in strategies(JOB, trace, published("gpt3-6.7b"))}
    assert found["oobleck"].reason == "figures are of 15 to 30 nodes, and the trace has up to 64"
    small = poisson(30, 600, 60, 3600)
    found = {one.name: one for one in strategies(JOB, small, published("gpt3-6.7b"))}
    assert found["bamboo"].out_of_memory
    assert not isinstance(found["oobleck"], CannotRun)
    assert [one.reason for one in strategies(JOB, small, names=["varuna"])] == [
        "uses published figures of a model, and none is given"
    ]
    with pytest.raises(SettingError, match=r"strategy = 'x': must be one of ideal, swift, "):
        strategies(JOB, small, names=["x"])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("iteration_s", 0),
        ("state_bytes", -1),
        ("expert_share", 1.5),
        ("num_experts", 0),
        ("experts_per_checkpoint", 17),
        ("checkpoint_every", 0),
        ("restart_s", -1),
    ],
)
def test_a_job_that_cannot_be_is_refused(setting, value):
    with pytest.raises(SettingError) as told:
        replace(JOB, **{setting: value})
    assert (told.value.setting, told.value.value) == (f"Job.{setting}", value)
    with pytest.raises(SettingError, match="without a failure"):
        Job(Problem(Topology(2, 2), 4, frozenset({(0, 0)})))


def test_a_period_with_failures_is_never_below_that_without():
    periods = Periods(Problem(Topology(3, 5), 5, costs=Costs(t_b=1.3, t_w=0.8)))
    assert periods.ratio((0,) * 5) == 1.0
    assert all(periods.ratio((0,) * p + (1,) + (0,) * (4 - p)) >= 1 for p in range(5))


def test_all_models_have_tables_of_all_nodes():
    assert set(MODELS) == {"bert-large", "gpt-2", "gpt3-medium", "gpt3-2.7b", "gpt3-6.7b"}
