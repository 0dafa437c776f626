"""The adaptive planner against the bounds, the paper's example and the gaps that are asked of it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swift.schedules.bounds import lower_bound, tight_bound
from swift.schedules.milp.proof import milp_proof
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.problem import Costs, Problem
from swift.schedules.rules import verify
from swift.schedules.schedule import makespan, peak_memory, period
from swift.topology import Topology

MEASURED = Costs(t_f=1.0, t_b=1.3, t_w=0.8, t_u=0.4, t_comm=0.1)


def one_failure_or_none(pipelines: tuple, stages: tuple, factor: int, limit: float | None) -> Iterator[Problem]:
    """Problems of D pipelines, P stages and M = factor * P micro-batches under a limit of so many times P."""
    for D in pipelines:
        for P in stages:
            for failed in [frozenset(), *(frozenset({(0, p)}) for p in range(P))]:
                memory_limit = None if limit is None else limit * P
                yield Problem(Topology(D, P), factor * P, failed, memory_limit=memory_limit)


GAPS = [  # limit over P, M over P, the mean gap asked for, the worst gap asked for
    (None, 2, 0.0, 0.0),
    (1.5, 2, 0.005, 0.03),
    (1.0, 2, 0.04, 0.08),
    (None, 1, 0.01, 0.09),
    (1.5, 1, 0.012, 0.09),
    pytest.param(1.0, 1, 0.07, 0.15, marks=pytest.mark.slow),  # the oracle has to prove several of them
]


def check_gaps(problems: list[Problem], mean: float, worst: float) -> None:
    gaps = []
    for problem in problems:
        found = period(adaptive(problem))
        gaps.append(found / lower_bound(problem) - 1)
        # The figures are whole per cents.
        assert round(gaps[-1], 2) <= worst or is_near_an_optimum_above(problem, found, worst), problem
    assert round(np.mean(gaps), 3) <= mean


def is_near_an_optimum_above(problem: Problem, found: float, gap: float) -> bool:
    """Whether it is proved that no schedule keeps to the gap, and that none is better by more than 3 %."""
    refused = (1 + gap) * lower_bound(problem)
    bound = tight_bound(problem)
    if bound <= refused:
        bound = milp_proof(problem).bound
    return bound > refused and found <= 1.03 * bound


@pytest.mark.parametrize(("limit", "factor", "mean", "worst"), GAPS)
def test_gaps(limit, factor, mean, worst):
    check_gaps(list(one_failure_or_none((2, 3, 4), (2, 4, 8), factor, limit)), mean, worst)


@pytest.mark.parametrize("D", [2, 3])
@pytest.mark.parametrize("factor", [1, 2])
def test_near_the_proven_optimum(D, factor):
    """A limit of P, where tight_bound and the planner differ: 20 where it says 19, and 38 where it says 37."""
    for problem in one_failure_or_none((D,), (2, 4), factor, 1.0):
        proof = milp_proof(problem)
        assert proof.proven
        assert period(adaptive(problem)) <= 1.03 * proof.bound


def test_the_search_goes_on_where_a_proven_optimum_is_far():
    """Two stashes for three stages: 34.6 is the optimum, proved by ``milp``, and 36.1 what the first policies reach."""
    costs = Costs(t_f=2, t_b=1.3, t_w=1.5, t_u=0.4)
    problem = Problem(Topology(5, 3), 4, frozenset({(3, 0)}), costs=costs).limited(2.0)
    assert period(adaptive(problem)) <= 1.01 * 34.6


@pytest.mark.parametrize("pipeline", range(3))
@pytest.mark.parametrize("stage", range(4))
def test_the_papers_example(pipeline, stage):
    """ReCycle, section 3: 27 slots with any one of 12 workers lost, as many as 1F1B needs without a failure."""
    problem = Problem(Topology(3, 4), 6, frozenset({(pipeline, stage)}))
    assert period(adaptive(problem)) == lower_bound(problem) == 27


@pytest.mark.parametrize(
    ("decoupled", "staggered", "by_stage"),
    [(False, False, [29, 30, 33, 36]), (True, False, [27, 28, 29, 30]), (True, True, [27, 27, 27, 27])],
)
def test_ablations_of_the_papers_example(decoupled, staggered, by_stage):
    problem = Problem(Topology(3, 4), 6, decoupled=decoupled, staggered=staggered)
    assert [period(adaptive(replace(problem, failed=frozenset({(1, p)})))) for p in range(4)] == by_stage


@pytest.mark.parametrize("P", [2, 4, 8])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_one_iteration_is_as_short_as_zb_h1(P, factor):
    M = factor * P + factor // 2
    assert makespan(adaptive(Problem(Topology(2, P), M, memory_limit=P + 2, num_iterations=1))) <= 3 * M + P - 1


TURNS = [  # D, P, M, failed, costs, the gap to the tight bound
    (1, 8, 9, (), Costs(1.0, 1.08, 1.07, t_comm=0.1), 0.0),
    (6, 12, 12, ((0, 0),), Costs(1.0, 1.3, 0.8, t_comm=0.1), 0.0),
    (4, 8, 8, ((0, 0),), Costs(1.0, 1.3, 0.8, t_comm=0.1), 0.015),
    (4, 8, 16, ((0, 3),), Costs(1.0, 1.3, 0.8, t_comm=0.1), 0.015),
    pytest.param(16, 32, 32, ((0, 0),), Costs(1.0, 1.3, 0.8, t_comm=0.1), 0.01, marks=pytest.mark.slow),
    pytest.param(24, 64, 64, ((0, 0),), Costs(1.0, 1.3, 0.8, t_comm=0.1), 0.005, marks=pytest.mark.slow),
    pytest.param(24, 64, 128, ((0, 0),), Costs(1.0, 1.3, 0.8, t_comm=0.1), 0.03, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("D", "P", "M", "failed", "costs", "gap"), TURNS)
def test_more_microbatches_than_fit_at_once(D, P, M, failed, costs, gap):
    """Stashes for as many micro-batches as there are stages, as 1F1B needs."""
    problem = Problem(Topology(D, P), M, frozenset(failed), costs, float(P))
    schedule = adaptive(problem)
    verify(schedule)
    assert period(schedule) <= (1 + gap) * tight_bound(problem) * (1 + 1e-9)


PROVED = [  # D, P, M, failed, costs, limit, the optimum by CP-SAT
    (3, 5, 5, ((0, 1), (1, 4), (2, 0)), Costs(t_b=2.0, t_comm=0.1), 3.0, 54.4),
    (3, 4, 5, (), Costs(t_w=1.5, t_comm=0.1), 4.0, 21.1),
]


@pytest.mark.parametrize(("D", "P", "M", "failed", "costs", "limit", "optimum"), PROVED)
def test_near_an_optimum_that_another_solver_proved(D, P, M, failed, costs, limit, optimum):
    found = period(adaptive(Problem(Topology(D, P), M, frozenset(failed), costs, limit)))
    assert optimum * (1 - 1e-9) <= found <= 1.03 * optimum


@st.composite
def several_failures(draw) -> Problem:
    """Two to D - 1 failures in one stage or in different ones, measured costs, M of any remainder."""
    D, P = draw(st.integers(3, 5)), draw(st.integers(2, 5))
    M = draw(st.integers(2 * P, 3 * P))
    workers = [(d, p) for d in range(D) for p in range(P)]
    stage = draw(st.one_of(st.none(), st.integers(0, P - 1)))
    candidates = workers if stage is None else [(d, stage) for d in range(D)]
    failed = draw(st.sets(st.sampled_from(candidates), min_size=2, max_size=D - 1))
    costs = [draw(st.integers(low, high)) / 100 for low, high in ((80, 160), (50, 120), (5, 100), (2, 30))]
    return Problem(Topology(D, P), M, frozenset(failed), Costs(1.0, *costs))


FAR_FROM_THE_SIMPLE_BOUND = Problem(
    Topology(5, 5), 14, frozenset({(0, 0), (2, 4), (4, 2)}), Costs(1.0, 1.07, 0.51, 0.05, 0.28), num_iterations=3
)
"""6 % over it; the tight bound is 4 % over it."""


@settings(deadline=None, max_examples=15)
@given(several_failures())
@example(FAR_FROM_THE_SIMPLE_BOUND)
def test_several_failures_stay_near_the_bound(problem):
    schedule = adaptive(problem)
    verify(schedule)
    found = period(schedule)
    # With failures in late stages behind a slow network no schedule is within 5 % of the simple bound.
    assert found <= 1.05 * lower_bound(problem) or found <= 1.03 * tight_bound(problem)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.data())
def test_never_below_the_tight_bound(D, P, M, data):
    failed = frozenset(data.draw(st.sets(st.tuples(st.integers(0, D - 1), st.integers(0, P - 1)), max_size=D - 1)))
    limit = data.draw(st.sampled_from([None, 1.0, 2.0, float(P), 1.5 * P + 1]))
    problem = Problem(
        Topology(D, P),
        M,
        failed,
        data.draw(st.sampled_from([Costs(), MEASURED])),
        limit,
        num_iterations=data.draw(st.integers(1, 3)),
        decoupled=data.draw(st.booleans()),
        staggered=data.draw(st.booleans()),
    )
    schedule = adaptive(problem)
    verify(schedule)
    assert tight_bound(problem) >= lower_bound(problem) - 1e-9
    assert period(schedule) >= tight_bound(problem) * (1 - 1e-9)


def test_inboxes_count_within_the_limit():
    problem = Problem(Topology(2, 3), 6, frozenset({(1, 1)}), Costs(inbox=0.25), memory_limit=4.0)
    schedule = adaptive(problem)
    verify(schedule)
    assert 2.0 < peak_memory(schedule).max() <= 4.0


@pytest.mark.parametrize(
    ("D", "P", "M", "failed", "inbox", "limit"),
    [(2, 4, 8, (1, 3), 1.0, 8.0), (2, 2, 6, (0, 1), 1.0, 6.0), (2, 4, 8, (0, 1), 0.5, 8.0)],
)
def test_messages_that_take_memory_leave_a_good_plan(D, P, M, failed, inbox, limit):
    problem = Problem(Topology(D, P), M, frozenset({failed}), Costs(inbox=inbox), limit)
    assert period(adaptive(problem)) <= 1.15 * tight_bound(problem)


def test_more_memory_with_messages_never_makes_a_plan_longer():
    """With stashes for two or three micro-batches no plan fits beside its messages; with one, one does."""
    problem = Problem(Topology(4, 4), 8, frozenset({(1, 2)}), Costs(inbox=0.5))
    periods = [period(adaptive(replace(problem, memory_limit=limit))) for limit in (2.0, 2.5, 3.0, 3.5, 4.5)]
    assert periods == sorted(periods, reverse=True)
    assert periods[2] < 80


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.25, 0.5, 1.0]), st.data())
def test_a_plan_with_messages_for_less_memory_is_one_for_more(D, P, M, inbox, data):
    failed = frozenset(data.draw(st.sets(st.tuples(st.integers(0, D - 1), st.integers(0, P - 1)), max_size=D - 1)))
    problem = Problem(Topology(D, P), M, failed, Costs(1.0, 1.3, 0.8, inbox=inbox))
    limits = sorted(data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=3, unique=True)))
    plans = [adaptive(replace(problem, memory_limit=1.0 + inbox + more / 4)) for more in limits]
    for plan, later in pairwise(plans):
        assert period(later) <= period(plan) * (1 + 1e-9)
        verify(later)


@pytest.mark.parametrize("costs", [Costs(inbox=0.5), Costs(0.1, 0.1, 0.1, 0.3, 0.2, 0.25, 0.0, 0.25)])
@pytest.mark.parametrize(("decoupled", "staggered"), [(True, True), (False, True), (True, False), (False, False)])
def test_a_limit_of_a_single_microbatch_and_its_message(costs, decoupled, staggered):
    failed = frozenset({(0, 1), (1, 1), (2, 1)})
    limit = costs.microbatch_peak
    problem = Problem(Topology(4, 3), 3, failed, costs, limit, decoupled=decoupled, staggered=staggered)
    schedule = adaptive(problem)
    verify(schedule)
    assert peak_memory(schedule).max() == limit


def test_the_same_plan_every_time():
    problem = Problem(Topology(3, 4), 8, frozenset({(0, 2)}), memory_limit=4.0)
    one, other = adaptive(problem), adaptive(problem)
    np.testing.assert_array_equal(one.start, other.start)
    np.testing.assert_array_equal(one.worker, other.worker)
