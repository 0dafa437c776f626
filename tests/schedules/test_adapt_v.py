"""Plans after a failure where stages hold two runs of blocks, in a V."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from swift.errors import SettingError
from swift.schedules.adapt.choice import adapt, fault_free, recut, rerouted
from swift.schedules.adapt.layouts import BlockOrder, BlockProblem
from swift.schedules.planners.v import v
from swift.schedules.plans.normalize import role_moves
from swift.schedules.problem import Chunk, Costs, Problem
from swift.schedules.registry import with_chunk_shape
from swift.schedules.rules import violations
from swift.schedules.schedule import period
from swift.topology import Topology
from tests.schedules.adapt_checks import UNSHRUNK, check_choice


def in_v(D, P, a_run, M, costs=None, limit=None):
    """A problem of stages with two runs of equally many blocks."""
    blocks = tuple(Chunk.of_size(0.5 / a_run, 1) for _ in range(2 * P * a_run))
    chunks = tuple(Chunk.of_size(0.5, a_run) for _ in range(2 * P))
    shape = (*range(P), *reversed(range(P)))
    problem = Problem(
        Topology(D, P), M, costs=costs or Costs(), chunks=chunks, num_iterations=2, stage_of_chunk=(shape,) * D
    )
    return BlockProblem(problem.limited(limit), blocks, (a_run,) * (2 * P))


@settings(max_examples=50)
@given(some.integers(1, 5).flatmap(lambda P: some.lists(some.integers(1, 5), min_size=2 * P, max_size=2 * P)))
def test_in_the_order_of_a_v_each_stage_has_one_run(cut):
    P = len(cut) // 2
    order = BlockOrder.of(cut, (*range(P), *reversed(range(P))))
    assert sorted(order.blocks) == list(range(sum(cut)))
    begin = 0
    for p in range(P):
        end = begin + cut[p] + cut[-1 - p]
        first, last = sum(cut[:p]), sum(cut[: len(cut) - 1 - p])
        assert order.runs((begin, end)) == ((first, first + cut[p]), (last, last + cut[-1 - p]))
        begin = end
    for begin in range(sum(cut)):
        for end in range(begin + 1, sum(cut) + 1):
            taken = [block for run in order.runs((begin, end)) for block in range(*run)]
            assert sorted(order.blocks[begin:end]) == taken


def test_one_failure_costs_hardly_more_than_the_worker():
    work, failed = in_v(4, 4, 2, 8), frozenset({(1, 2)})
    plan, without = adapt(work, failed), fault_free(work).period
    assert plan.mode == "recut"
    assert not violations(plan.schedule)
    assert without / plan.period >= 0.94 * plan.ideal_throughput
    assert without / rerouted(work, failed).period < 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "cut_anew", "stayed"), [(None, 0.941, 0.727), (8, 0.881, 0.727), (4, 0.824, 0.804)])
def test_what_one_failure_of_32_workers_leaves(limit, cut_anew, stayed):
    """The figures of docs/blocks.md, and those with memory for P stages' stashes."""
    work, failed = in_v(4, 8, 2, 16, limit=limit), frozenset({(1, 2)})
    plan, without = recut(work, failed), fault_free(work).period
    assert not violations(plan.schedule)
    assert without / plan.period >= cut_anew - 0.001
    assert without / rerouted(work, failed).period <= stayed + 0.001


def test_a_worker_holds_a_run_before_those_of_later_stages_and_one_behind():
    work, failed = in_v(3, 4, 2, 8), frozenset({(1, 2)})
    plan = recut(work, failed)
    held = {worker: [block for run in runs for block in range(*run)] for worker, runs in plan.blocks_of_worker.items()}
    assert set(held) == set(work.problem.topology.without(failed))
    for d in range(3):
        mine = [held[d, p] for p in range(4) if (d, p) in held]
        assert sorted(block for blocks in mine for block in blocks) == list(range(16))
        for outer, inner in pairwise(mine):
            assert all(one < min(inner) or one > max(inner) for one in outer)
    before = {(d, p): {2 * p, 2 * p + 1, 14 - 2 * p, 15 - 2 * p} for d, p in held}
    got = {worker: set() for worker in held}
    for block, giver, taker in plan.relocation.transfers:
        assert block in before[giver]
        assert block not in before[taker] | got[taker]
        got[taker].add(block)
    place_of = plan.relocation.place_of
    assert set(place_of) == set(held)
    assert all(set(held[worker]) <= before[worker] | got[worker] for worker in held)


def random_problem(seed):
    draw = random.Random(seed)
    D, P, a_run = draw.choice(((2, 2, 2), (3, 2, 1), (2, 3, 2), (4, 2, 1), (3, 3, 1)))
    costs = Costs(
        t_b=draw.choice((1.0, 1.3)),
        t_w=draw.choice((1.0, 0.7)),
        t_u=draw.choice((0.0, 0.4)),
        t_comm=draw.choice((0.0, 0.1)),
    )
    work = in_v(D, P, a_run, draw.randint(P, 2 * P), costs, draw.choice((None, P + 1.0, P / 2 + 1)))
    while True:
        failed = frozenset(draw.sample(work.problem.topology.workers, draw.randint(1, min(3, D * P - P))))
        if all(any((d, p) not in failed for d in range(D)) for p in range(P)):
            return work, failed


def check_random(seed):
    """That the choice is a valid plan of the same work, and no worse than each other way."""
    work, failed = random_problem(seed)
    check_choice(work, failed, lambda whole: period(v(whole)), seed)


@pytest.mark.long
@settings(max_examples=5, phases=UNSHRUNK)
@given(some.integers(0, 10_000))
def test_the_choice_is_never_worse_than_another_way(seed):
    check_random(seed)


def test_roles_move_where_a_stage_holds_two_runs():
    problem = in_v(3, 2, 1, 4).problem
    failed = frozenset({(0, 0), (1, 0)})
    (move,) = role_moves(BlockProblem.of_stages(problem).with_failures(failed), (1, 1))
    assert (move.worker[1], move.role[1]) == (1, 0)


def test_in_lockstep_it_gains_as_much():
    work, failed = in_v(3, 4, 2, 8), frozenset({(1, 2)})
    plan = recut(work, failed, in_lockstep=True, in_run=True)
    assert not violations(plan.schedule)
    assert plan.period <= 27
    assert rerouted(work, failed, in_lockstep=True).period >= 36


def test_stages_in_another_order_are_refused():
    problem = Problem(Topology(2, 2), 4, stage_of_chunk=((0, 1, 0, 1),) * 2)
    with pytest.raises(SettingError, match="must be one run a stage, or two runs in a V"):
        BlockProblem.of_stages(problem)


def test_runs_are_blocks_where_nothing_is_said():
    work = BlockProblem.of_stages(with_chunk_shape("v", Problem(Topology(3, 4), 6, num_iterations=2)))
    plan = adapt(work, frozenset({(1, 2)}))
    assert plan.period < rerouted(work, frozenset({(1, 2)})).period
