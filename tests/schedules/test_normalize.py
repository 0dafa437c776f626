"""Normalization: the same plan for the same counts, failures spread over the stages, and how many plans there are."""

from functools import cache
from itertools import chain, combinations, permutations, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swift.errors import SettingError
from swift.schedules.bounds import tight_bound, tight_stage_bound
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.plans.normalize import (
    after_moves,
    canonical,
    denormalize,
    failure_counts,
    normalize,
    num_plans,
    plans_to_prepare,
    role_moves,
    spread,
)
from swift.schedules.problem import Costs, Problem
from swift.schedules.registry import PLANNERS
from swift.schedules.rules import verify
from swift.schedules.schedule import Schedule, period
from swift.topology import Topology

COLUMNS = ("worker", "kind", "iteration", "pipeline", "microbatch", "chunk", "start", "end")
QUARTERS = st.integers(1, 12).map(lambda number: number / 4)
MEASURED = Costs(t_f=1.0, t_b=1.3, t_w=0.8, t_u=0.5, t_comm=0.1)

plan = cache(PLANNERS["adaptive"])


def all_workers(topology):
    return set(product(range(topology.num_pipelines), range(topology.num_stages)))


def failure_sets(topology):
    """Every set of failures that leaves each stage a survivor."""
    workers = sorted(all_workers(topology))
    sets = chain.from_iterable(combinations(workers, size) for size in range(len(workers) + 1))
    for failed in map(frozenset, sets):
        if all(sum(p == stage for _, p in failed) < topology.num_pipelines for stage in range(topology.num_stages)):
            yield failed


@st.composite
def failures(draw, topology):
    """A set of failures that leaves each stage a survivor."""
    failed = set()
    for stage in range(topology.num_stages):
        pipelines = st.sets(st.integers(0, topology.num_pipelines - 1), max_size=topology.num_pipelines - 1)
        failed |= {(d, stage) for d in draw(pipelines)}
    return frozenset(failed)


@st.composite
def problems(draw, max_pipelines=4, max_stages=4):
    topology = Topology(draw(st.integers(1, max_pipelines)), draw(st.integers(1, max_stages)), draw(st.integers(1, 2)))
    return Problem(topology, draw(st.integers(1, 4)), draw(failures(topology)), MEASURED)


@given(problems(), st.data())
def test_problems_are_the_same_where_every_stage_has_as_many_failures(problem, data):
    other = Problem(Topology(problem.num_pipelines, problem.num_stages), problem.num_microbatches, costs=MEASURED)
    other = Problem(other.topology, other.num_microbatches, data.draw(failures(other.topology)), MEASURED)
    counts = [[sum(p == stage for _, p in a.failed) for stage in range(a.num_stages)] for a in (problem, other)]
    assert (normalize(problem).problem == normalize(other).problem) == (counts[0] == counts[1])
    assert normalize(problem).problem.failed == {(d, p) for p, count in enumerate(counts[0]) for d in range(count)}


@given(problems())
def test_nobody_changes_place_in_a_canonical_problem(problem):
    target = normalize(problem).problem
    again = normalize(target)
    assert again.problem == target
    assert again.pipeline_D == tuple(range(problem.num_pipelines))
    assert set(again.worker_PD) == {again.pipeline_D}


@given(problems())
@example(Problem(Topology(3, 4), 4, frozenset({(1, 2)}), MEASURED))
@example(Problem(Topology(4, 3), 3, frozenset({(3, 0), (1, 1), (2, 1), (0, 2)}), MEASURED))
@settings(deadline=None, max_examples=50)
def test_a_plan_of_the_canonical_problem_becomes_one_of_the_problem(problem):
    normalized = normalize(problem)
    made = plan(normalized.problem)
    schedule = denormalize(made, normalized)
    verify(schedule)
    assert schedule.problem == problem
    assert schedule.solver == made.solver
    assert period(schedule) == period(made)
    in_order = Schedule.from_ops(problem, made.solver, schedule.ops())
    for name in COLUMNS:
        column = getattr(schedule, name)
        assert column.dtype == getattr(made, name).dtype
        assert np.array_equal(column, getattr(in_order, name)), name


@given(problems())
def test_as_many_workers_as_possible_keep_their_pipelines_micro_batches(problem):
    normalized = normalize(problem)
    D, P, down, target_down = problem.num_pipelines, problem.num_stages, problem.failed, normalized.problem.failed

    def num_keeping(pipeline_D):
        places = product(range(D), range(P))
        return sum((e, p) not in target_down and (pipeline_D[e], p) not in down for e, p in places)

    for p, worker_D in enumerate(normalized.worker_PD):
        assert sorted(worker_D) == list(range(D))
        assert all(((e, p) in target_down) == ((d, p) in down) for e, d in enumerate(worker_D))
    kept = sum(
        (e, p) not in target_down and normalized.worker_PD[p][e] == normalized.pipeline_D[e]
        for e, p in product(range(D), range(P))
    )
    staying = sum(e == d for e, d in enumerate(normalized.pipeline_D))
    worth = [(num_keeping(way_D), sum(e == d for e, d in enumerate(way_D))) for way_D in permutations(range(D))]
    assert (kept, staying) == max(worth)


@given(st.integers(2, 5), st.sets(st.integers(0, 3)), st.data())
def test_failures_in_one_pipeline_only_rename_pipelines(num_pipelines, stages, data):
    pipeline = data.draw(st.integers(0, num_pipelines - 1))
    problem = Problem(Topology(num_pipelines, 4), 4, frozenset((pipeline, p) for p in stages))
    normalized = normalize(problem)
    assert set(normalized.worker_PD) == {normalized.pipeline_D}


def test_who_takes_whose_place_in_a_wide_topology():
    """More pipelines than all permutations could be tried for; failures of one pipeline stay together."""
    failed = frozenset({(30, 0), (30, 1), (17, 2), (30, 3), (4, 3)})
    normalized = normalize(Problem(Topology(40, 4), 4, failed))
    assert normalized.pipeline_D[0] == 30
    assert normalized.pipeline_D[1] == 4
    assert [sum(np.not_equal(worker_D, normalized.pipeline_D)) for worker_D in normalized.worker_PD] == [0, 0, 2, 0]


def test_a_schedule_of_another_problem_is_not_relabelled():
    made = plan(Problem(Topology(2, 2), 2))
    with pytest.raises(AssertionError, match="another problem"):
        denormalize(made, normalize(Problem(Topology(2, 2), 3)))


def count_vectors(topology, total):
    vectors = product(range(topology.num_pipelines), repeat=topology.num_stages)
    return [counts for counts in vectors if sum(counts) == total]


@given(
    st.builds(Topology, st.integers(1, 5), st.integers(1, 4)),
    st.integers(1, 30),
    st.builds(Costs, QUARTERS, QUARTERS, QUARTERS, QUARTERS, QUARTERS),
    st.none() | st.integers(1, 12),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_spread_failures_are_the_best_of_all(topology, num_microbatches, costs, limit, decoupled, staggered, data):
    """Costs in quarters are summed without rounding."""
    total = data.draw(st.integers(0, topology.num_stages * (topology.num_pipelines - 1)))
    failed = data.draw(failures(topology))
    problem = Problem(topology, num_microbatches, failed, costs, limit, decoupled=decoupled, staggered=staggered)

    def worth(counts):
        bounds = [tight_stage_bound(problem, p, topology.num_pipelines - count) for p, count in enumerate(counts)]
        return max(bounds), sum(bounds), [-count for count in counts]

    counts = spread(problem, total)
    assert counts == min(count_vectors(topology, total), key=worth)
    assert tight_bound(canonical(problem, counts)) == worth(counts)[0]


def test_ties_are_not_broken_by_rounding():
    """37 micro-batches hide every wait, so that all stages are the same; not so the last bits of their bounds' sum."""
    problem = Problem(Topology(2, 5), 37, costs=Costs(t_f=0.7, t_b=0.4, t_w=1.6))
    for total in range(6):
        assert spread(problem, total) == (1,) * total + (0,) * (5 - total)


@pytest.mark.parametrize("total", [9, 100, -1, 1.5])
def test_more_failures_than_can_be_survived_are_refused(total):
    with pytest.raises(SettingError, match="num_failures"):
        spread(Problem(Topology(3, 4), 4), total)


def test_paper_scale_failures_are_spread():
    problem = Problem(Topology(24, 64), 64)
    counts = spread(problem, 154)
    costs = sorted(tight_stage_bound(problem, p, 24 - count) for p in range(64) for count in range(1, 24))
    fault_free = tight_bound(problem)
    assert sum(counts) == 154
    assert tight_bound(canonical(problem, counts)) == max(fault_free, costs[153])


def fewest_moves(topology, start, goal):
    """Breadth-first over counts: a move takes a failure from one stage to another."""
    reached, distance = {start}, 0
    while goal not in reached:
        reached |= {
            tuple(count + (p == to) - (p == source) for p, count in enumerate(counts))
            for counts in reached
            for source, to in permutations(range(len(counts)), 2)
            if counts[source] > 0 and counts[to] < topology.num_pipelines - 1
        }
        distance += 1
    return distance


@given(problems(), st.data())
def test_moves_are_the_fewest_and_reach_the_counts(problem, data):
    counts = data.draw(st.sampled_from(count_vectors(problem.topology, len(problem.failed))))
    moved = role_moves(problem, counts)
    assert {move.role for move in moved} <= problem.failed
    assert {move.worker for move in moved} <= all_workers(problem.topology) - problem.failed
    assert len({move.worker for move in moved}) == len({move.role for move in moved}) == len(moved)
    assert failure_counts(after_moves(problem, moved)) == counts
    assert len(moved) == fewest_moves(problem.topology, failure_counts(problem), counts)


@pytest.mark.parametrize(
    ("failed", "move"),
    [({(1, 0), (2, 0), (2, 1)}, ((2, 2), (1, 0))), ({(1, 0), (2, 0), (1, 1)}, ((1, 2), (2, 0)))],
)
def test_moves_gather_failures_in_few_pipelines(failed, move):
    assert role_moves(Problem(Topology(4, 3), 4, frozenset(failed)), (1, 1, 1)) == (move,)


@pytest.mark.parametrize("counts", [(1, 0), (1, 1, 0), (2, 0, 0), (3, -2, 0)])
def test_moves_to_other_than_the_failures_there_are_are_refused(counts):
    with pytest.raises(SettingError, match=r"failed workers|failure counts"):
        role_moves(Problem(Topology(2, 3), 4, frozenset({(1, 0)})), counts)


@pytest.mark.parametrize(("D", "P"), [(1, 1), (1, 3), (2, 3), (3, 2), (3, 3), (4, 2)])
def test_plans_to_prepare_are_the_distinct_normalized_problems(D, P):
    topology = Topology(D, P, num_expert_ranks=2)
    problem = Problem(topology, 4, costs=MEASURED, memory_limit=6)
    normalized = {
        failed: normalize(Problem(topology, 4, failed, MEASURED, 6)).problem for failed in failure_sets(topology)
    }
    for most in range(P * (D - 1) + 2):
        distinct = {target for failed, target in normalized.items() if len(failed) <= most}
        prepared = list(plans_to_prepare(problem, most))
        assert set(prepared) == distinct
        assert len(prepared) == len(distinct) == num_plans(topology, most)
        sizes = [len(target.failed) for target in prepared]
        assert sizes == sorted(sizes)


@given(st.builds(Topology, st.integers(1, 5), st.integers(1, 5)), st.integers(0, 22))
def test_number_of_plans_without_moves_counts_the_vectors(topology, most):
    assert num_plans(topology, most) == sum(len(count_vectors(topology, total)) for total in range(most + 1))


@given(problems(), st.integers(0, 14))
def test_one_plan_for_each_number_of_failures_where_roles_move(problem, most):
    prepared = list(plans_to_prepare(problem, most, move_roles=True))
    survivable = min(most, problem.num_stages * (problem.num_pipelines - 1))
    assert [len(target.failed) for target in prepared] == list(range(survivable + 1))
    assert len(prepared) == num_plans(problem.topology, most, move_roles=True)
    assert all(failure_counts(target) == spread(problem, len(target.failed)) for target in prepared)


def test_number_of_plans_at_paper_scale():
    """64 stages, up to two failures: none, one of 64, and two in the same or in different stages."""
    assert num_plans(Topology(24, 64), 2) == 1 + 64 + 64 + 64 * 63 // 2


def test_different_bounds_of_the_same_sum_tie():
    costs = Costs(t_f=0.75, t_b=0.5, t_w=1.25, t_u=1.75, t_comm=0.25)
    assert spread(Problem(Topology(4, 3), 4, costs=costs), 4) == (2, 2, 0)


@pytest.mark.parametrize("num_microbatches", [8, 16])
def test_a_failure_moves_to_the_stage_whose_plan_is_shortest(num_microbatches):
    """In 1F1B's memory, where a failure at one end makes memory turn over slowly."""
    costs = Costs(1.0, 1.3, 0.8, t_comm=0.1)
    problem = Problem(Topology(4, 8), num_microbatches, costs=costs, memory_limit=8.0)
    everywhere = [canonical(problem, tuple(int(p == stage) for p in range(8))) for stage in (0, 3, 4, 5, 7)]
    chosen = period(adaptive(canonical(problem, spread(problem, 1))))
    assert chosen <= 1.01 * min(period(adaptive(each)) for each in everywhere)
