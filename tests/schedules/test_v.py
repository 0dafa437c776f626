"""The planner of two runs a worker: valid, at most as long as published orders, and better than one run a worker.

The orders are restated in ``benchmarks/v_orders.py`` and share no code with the planner.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.schedules.bounds import lower_bound
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.v import v
from swift.schedules.problem import Costs, Problem
from swift.schedules.registry import with_chunk_shape
from swift.schedules.rules import violations
from swift.schedules.schedule import Schedule, peak_memory, period
from swift.schedules.sequences import time_round
from swift.topology import Topology

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import v_orders

UNEQUAL = Costs(1.0, 1.3, 0.8, 0.0, 0.1)


def timed(problem, order):
    executor_DMP = np.zeros((1, problem.most_microbatches, problem.num_chunks), np.int32)
    schedule = Schedule.from_round(problem, "", time_round(problem, executor_DMP, order))
    assert violations(schedule) == []
    return schedule


def orders(problem):
    """Published orders of a problem with one pipeline, by name."""
    P, M = problem.num_stages, problem.most_microbatches
    found = {name: order(P, M) for name, order in v_orders.ORDERS.items()}
    times = (*problem.time_4P[:3, 0].tolist(), problem.costs.t_comm)
    found["ZB-V by times"] = v_orders.zbv_by_times(P, M, times, (0.5, 0.5), P)
    return {name: timed(problem, order) for name, order in found.items() if order is not None}


@pytest.mark.parametrize("staggered", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("costs", [Costs(), UNEQUAL], ids=["unit", "unequal"])
@pytest.mark.parametrize(
    ("P", "times"),
    [(4, 1), (4, 2), *(pytest.param(P, times, marks=pytest.mark.slow) for P, times in ((4, 4), (8, 2), (16, 2)))],
)
def test_no_published_order_is_shorter_in_the_same_memory(P, times, costs, staggered):
    problem = with_chunk_shape("v", Problem(Topology(1, P), times * P, costs=costs, staggered=staggered))
    for name, theirs in orders(problem).items():
        ours = v(replace(problem, memory_limit=float(peak_memory(theirs).max())))
        assert violations(ours) == []
        assert period(ours) <= period(theirs) * (1 + 1e-9), name


def test_the_orders_are_those_that_were_published():
    """Bubbles, from the papers: none for ZB-V with M >= 2P; 1F1B's memory, about a half, and about a third."""
    problem = with_chunk_shape("v", Problem(Topology(1, 8), 16))
    found = {name: (period(one), float(peak_memory(one).max())) for name, one in orders(problem).items()}
    assert found == {
        "ZB-V": (48.0, 8.0),
        "ZB-V by times": (48.0, 8.0),
        "DualPipeV": (51.5, 8.5),
        "V-Half": (56.5, 5.0),
        "V-Min": (61.5, 4.0),
    }


@pytest.mark.parametrize("limit", [None, 4.0])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("costs", [Costs(), UNEQUAL], ids=["unit", "unequal"])
def test_with_a_failure_two_runs_are_no_worse_than_one(stage, costs, limit):
    plain = Problem(Topology(2, 4), 8, frozenset({(1, stage)}), costs, limit)
    schedule = v(with_chunk_shape("v", plain))
    assert violations(schedule) == []
    assert period(schedule) <= period(adaptive(plain)) * (1 + 1e-9)


def test_a_failure_costs_what_its_peer_has_to_do():
    schedule = v(with_chunk_shape("v", Problem(Topology(3, 4), 8, frozenset({(0, 2)}), memory_limit=4.0)))
    assert period(schedule) == lower_bound(schedule.problem) == 36.0


@settings(deadline=None, max_examples=12)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(2, 4), st.integers(1, 6)),
    limit=st.one_of(st.none(), st.floats(1.0, 5.0)),
    costs=st.sampled_from([Costs(), UNEQUAL, Costs(2.0, 1.0, 0.5, 0.7, 0.3, w_stash=0.4, inbox=0.1)]),
    flags=st.tuples(st.booleans(), st.booleans(), st.integers(1, 3)),
    data=st.data(),
)
def test_any_plan_is_valid(shape, limit, costs, flags, data):
    D, P, M = shape
    workers = data.draw(
        st.sets(st.tuples(st.integers(0, D - 2), st.integers(0, P - 1)), max_size=3) if D > 1 else st.just(set())
    )
    numbers = data.draw(st.one_of(st.just(M), st.tuples(*[st.integers(1, M)] * D)))
    decoupled, staggered, num_iterations = flags
    problem = with_chunk_shape(
        "v",
        Problem(
            Topology(D, P),
            numbers,
            frozenset(workers),
            costs,
            decoupled=decoupled,
            staggered=staggered,
            num_iterations=num_iterations,
        ),
    )
    if limit is not None:
        problem = replace(problem, memory_limit=limit * problem.microbatch_peak)
    schedule = v(problem)
    assert violations(schedule) == []
    assert (schedule.problem, schedule.solver) == (problem, "v")
    assert period(schedule) >= lower_bound(problem) * (1 - 1e-9)


def test_plans_are_the_same_again():
    problem = with_chunk_shape("v", Problem(Topology(2, 4), 4, frozenset({(0, 3)}), UNEQUAL, 2.0))
    one, other = v(problem), v(problem)
    np.testing.assert_array_equal(one.start, other.start)


def test_one_stage_has_one_run():
    problem = Problem(Topology(2, 1), 3)
    assert with_chunk_shape("v", problem) == problem
    assert period(v(problem)) == 9.0


def test_other_shapes_are_refused():
    with pytest.raises(SettingError, match="v plans chunks in a V"):
        v(Problem(Topology(1, 4), 8))


def test_a_stash_that_grows_in_b_stays_within_the_limit():
    costs = Costs(t_f=0.1, t_b=0.1, t_w=0.1, f_stash=0.25, w_stash=0.5)
    plain = Problem(Topology(1, 2), 2, costs=costs, memory_limit=0.5, num_iterations=1, staggered=False)
    assert violations(v(with_chunk_shape("v", plain))) == []
