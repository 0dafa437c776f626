"""The planner for execution: valid plans, and what they cost where every tick takes as long as its longest op."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swift.schedules.bounds import tight_bound
from swift.schedules.lowering.ticks import assign_ticks, lockstep_period
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.lockstep import lockstep
from swift.schedules.problem import Costs, Problem
from swift.schedules.rules import verify
from swift.schedules.schedule import Schedule, period
from swift.topology import Topology

COSTS = Costs(t_f=1, t_b=1.3, t_w=0.8, t_comm=0.1)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_plan_is_valid_and_no_worse_than_adaptive(problems, data):
    problem = data.draw(problems())
    plan = lockstep(problem)
    verify(plan)
    assert lockstep_period(plan) <= lockstep_period(adaptive(problem)) * (1 + 1e-9)


def test_shorter_in_lockstep_than_adaptive_where_ops_differ():
    problems = [Problem(Topology(3, 4), 8, frozenset({(0, p)}), COSTS) for p in range(4)]
    found, plain = (sum(lockstep_period(planner(problem)) for problem in problems) for planner in (lockstep, adaptive))
    assert found < 0.99 * plain


def check_costs(D, P, M, limit, failed):
    problem = Problem(Topology(D, P), M, frozenset(failed), COSTS, limit and max(1, limit * P))
    plan = lockstep(problem)
    verify(plan)
    silent = replace(COSTS, t_comm=0.0)
    ops = lockstep_period(replace(plan, problem=replace(problem, costs=silent)), assign_ticks(plan))
    assert ops <= 1.1 * period(plan)
    # A stash is held for longer where its micro-batch waits for the ends of ticks: with little memory that costs much.
    best = period(adaptive(problem))
    assert max(ops, period(plan)) <= (1.1 if limit is None else 1.14) * best
    # All wait for the messages of nearly every tick: 3.1 of ops and 0.3 of messages for each micro-batch.
    assert tight_bound(problem) <= lockstep_period(plan) <= 1.15 * period(plan)


@pytest.mark.parametrize("limit", [None, 1.5, 1])
@pytest.mark.parametrize(("D", "P", "M", "failed"), [(1, 4, 8, []), (3, 4, 8, [(0, 0)])])
def test_costs_of_unequal_ops(D, P, M, failed, limit):
    check_costs(D, P, M, limit, failed)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 1.5, 1])
@pytest.mark.parametrize(("D", "P"), [(1, 2), (1, 4), (1, 8), (2, 4), (3, 2), (3, 4), (4, 4)])
def test_costs_of_unequal_ops_everywhere(D, P, limit):
    for num_per_stage in (1, 2, 4):
        for failed in [[(0, p)] for p in range(P)] if D > 1 else [[]]:
            check_costs(D, P, num_per_stage * P, limit, failed)


def test_all_pipelines_do_the_same_without_a_failure():
    one, three = (lockstep(Problem(Topology(D, 4), 4, costs=COSTS)) for D in (1, 3))
    assert lockstep_period(three) == lockstep_period(one)
    assert period(three) == period(one)


def test_a_lone_iteration_is_planned_to_end_early():
    problem = Problem(Topology(1, 4), 8, costs=COSTS, num_iterations=1)
    steady = lockstep(replace(problem, num_iterations=3))
    first = Schedule.from_ops(problem, "lockstep", [timed for timed in steady.ops() if timed.op.iteration == 0])
    assert lockstep_period(lockstep(problem)) < lockstep_period(first)


@pytest.mark.parametrize("changes", [{"decoupled": False}, {"staggered": False}])
def test_ablations(changes):
    problem = replace(Problem(Topology(2, 3), 4, frozenset([(0, 1)]), COSTS), **changes)
    verify(lockstep(problem))


@pytest.mark.parametrize("limit", [3, 4])
@pytest.mark.parametrize("inbox", [0.25, 0.5, 1])
def test_messages_and_stashes_fit_into_memory_together(inbox, limit):
    verify(lockstep(Problem(Topology(1, 3), 6, costs=replace(COSTS, inbox=inbox), memory_limit=limit)))
