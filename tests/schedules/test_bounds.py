"""No formula is above an optimum that the MILP proves without any, nor above a period that is told of a plan."""

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from swift.schedules.bounds import lower_bound, tight_bound
from swift.schedules.lowering.ticks import lockstep_period
from swift.schedules.milp.proof import milp_proof
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.lockstep import lockstep
from swift.schedules.problem import Costs, Kind, Problem
from swift.schedules.schedule import period
from swift.topology import Topology

TIMES = st.sampled_from([1.0, 2.0, 3.0])
TIMES_OR_NONE = st.sampled_from([0.0, 1.0, 2.0])
SIZES = st.sampled_from([0.5, 1.0, 2.0])
COSTS = st.just(Costs()) | st.builds(Costs, TIMES, TIMES, TIMES, TIMES_OR_NONE, TIMES_OR_NONE, SIZES, SIZES)
UP_TO_3 = st.integers(1, 3)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_never_above_the_proven_optimum(problems, data):
    sizes = {"num_microbatches": data.draw(UP_TO_3), "costs": data.draw(COSTS)}
    problem = data.draw(problems(UP_TO_3, UP_TO_3, 3, **sizes))
    proof = milp_proof(problem, use_bound=False)
    assume(proof.proven)
    optimum = period(proof.schedule) * (1 + 1e-9)
    assert lower_bound(problem) <= tight_bound(problem) * (1 + 1e-9)
    assert tight_bound(problem) <= optimum
    assert proof.bound <= period(adaptive(problem)) * (1 + 1e-9)


@pytest.mark.parametrize("P", [1, 2, 4, 8])
@pytest.mark.parametrize("M", [1, 4, 16])
def test_unit_times_without_failure(P, M):
    problem = Problem(Topology(3, P), M)
    assert lower_bound(problem) == max(3 * M, 2 * P - 1 + 2 * M)


def test_the_paper_s_example():
    for worker in Topology(3, 4).workers:
        assert lower_bound(Problem(Topology(3, 4), 6, frozenset({worker}))) == 27.0


TURNS = [  # D, P, M, failed, costs, limit: more micro-batches than fit at once
    (1, 3, 4, (), Costs(1, 1, 2, 0, 1), 3.0),
    (2, 2, 2, ((0, 0),), Costs(2, 1, 1, 1, 1), 2.0),
    (1, 3, 3, (), Costs(1, 2, 1), 1.0),
    (1, 3, 3, (), Costs(1, 2, 1, 1, 0.5), 2.0),
]


@pytest.mark.parametrize(("D", "P", "M", "failed", "costs", "limit"), TURNS)
def test_memory_that_turns_over_sets_the_optimum(D, P, M, failed, costs, limit):
    problem = Problem(Topology(D, P), M, frozenset(failed), costs, limit)
    proof = milp_proof(problem, use_bound=False)
    assert proof.proven
    assert lower_bound(problem) < tight_bound(problem) == pytest.approx(period(proof.schedule))


def reached(problem):
    """The periods that are told of plans of a problem, at the workers' own pace and in lockstep."""
    plans = [planner(problem) for planner in (adaptive, lockstep)]
    return [measure(plan) for plan in plans for measure in (period, lockstep_period)]


@pytest.mark.parametrize("num_iterations", [2, 3, 6])
def test_a_window_that_drains_is_no_shorter_than_what_repeats(num_iterations):
    problem = Problem(Topology(3, 7), 9, num_iterations=num_iterations)
    assert reached(problem) == pytest.approx([31.0] * 4)
    assert lower_bound(problem) == 31.0


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_never_above_a_period_that_is_told(problems, data):
    sizes = {"num_microbatches": data.draw(st.integers(1, 9)), "costs": data.draw(COSTS)}
    problem = data.draw(problems(UP_TO_3, st.integers(1, 7), 3, **sizes))
    assert lower_bound(problem) <= tight_bound(problem) * (1 + 1e-9)
    assert tight_bound(problem) <= min(reached(problem)) * (1 + 1e-9)


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_never_above_a_period_of_chunks_that_is_told(chunk_problems, data):
    problem = data.draw(chunk_problems())
    assert lower_bound(problem) <= min(reached(problem)) * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_stage_s_work_and_its_wait_as_a_lone_micro_batch_measures_them(problems, data):
    """The bound's terms, read off the times of a schedule of one micro-batch in one pipeline, where nobody waits."""
    sizes = {"num_microbatches": data.draw(st.integers(1, 9)), "costs": data.draw(COSTS)}
    settings_ = {"staggered": True, "decoupled": True, "memory_limit": None}
    problem = data.draw(problems(UP_TO_3, st.integers(1, 7), 3, **sizes, **settings_))
    alone = adaptive(replace(problem, topology=Topology(1, problem.num_stages), num_microbatches=1, failed=frozenset()))
    first = {(op.kind, op.chunk): (start, end) for op, _, start, end in alone.ops() if op.iteration == 0}
    found = []
    for stage in range(problem.num_stages):
        (f, f_end), (b, b_end), (w, w_end), (u, u_end) = (first[kind, stage] for kind in Kind)
        survivors = sum((d, stage) not in problem.failed for d in range(problem.num_pipelines))
        most = math.ceil(problem.num_microbatches * problem.num_pipelines / survivors)
        wait = max(0.0, b - f - most * (f_end - f))
        found.append(most * (f_end - f + b_end - b + w_end - w) + u_end - u + wait)
    assert lower_bound(problem) == pytest.approx(max(found))
