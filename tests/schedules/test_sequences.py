"""The times of given sequences: valid, and with the shortest period there is, by all cycles of all longest paths."""

from dataclasses import replace
from functools import cache
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.schedules.problem import Costs, Kind, Problem
from swift.schedules.rules import verify
from swift.schedules.schedule import Schedule
from swift.schedules.sequences import time_round
from swift.topology import Topology


def slow_times(problem, executor_DMP, sequences):
    """The shortest period, and the earliest end of every stage's U at that period.

    The period is the largest mean of a cycle of stages, from each to the next by the longest path through an iteration.
    """
    P, costs = problem.num_stages, problem.costs
    cost = {Kind.F: costs.t_f, Kind.B: costs.t_b, Kind.W: costs.t_w}
    back = Kind.B if problem.decoupled else Kind.W

    def longest_from(begin):
        """Computes the longest path from the beginning of a stage to the end of every stage's U."""

        @cache
        def end(kind, d, m, p):
            w = executor_DMP[d, m, p] * P + p
            i = sequences[w].index((kind, d, m))
            starts = [end(*sequences[w][i - 1], p)] if i else [0.0 if p == begin else -np.inf]
            if kind == Kind.W or (kind == Kind.B and p == P - 1):
                starts.append(end(kind - 1, d, m, p))
            elif kind == Kind.B:
                starts.append(end(back, d, m, p + 1) + costs.t_comm)
            elif p > 0:
                starts.append(end(Kind.F, d, m, p - 1) + costs.t_comm)
            return max(starts) + cost[kind]

        return [max(end(*sequence[-1], p) for sequence in sequences[p::P] if sequence) + costs.t_u for p in range(P)]

    length = np.array([longest_from(q) for q in range(P)])
    if not problem.staggered:
        return length.max(), np.full(P, length.max())
    if problem.num_iterations == 1:  # all stages begin together, and nothing follows their ends
        return length.max(), length.max(axis=0)
    cycles = [cycle for n in range(1, P + 1) for cycle in permutations(range(P), n)]
    period = max(sum(length[q, p] for q, p in zip(c, c[1:] + c[:1], strict=True)) / len(c) for c in cycles)
    begins = np.zeros(P)
    for _ in range(P):
        begins = np.maximum(begins, (length + begins[:, None]).max(axis=0) - period)
    return period, (length + begins[:, None]).max(axis=0) - begins[0]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_the_shortest_period_and_the_earliest_times_that_keep_the_sequences(problems, random_sequences, data):
    problem = data.draw(problems(memory_limit=None))
    executor_DMP, sequences = random_sequences(problem, data.draw(st.randoms(use_true_random=False)))
    one = time_round(problem, executor_DMP, sequences)
    schedule = Schedule.from_round(problem, "sequences", one)
    verify(schedule)
    assert one.start_3DMP.min() == 0
    period, end_P = slow_times(problem, executor_DMP, sequences)
    np.testing.assert_allclose(one.period, period)
    np.testing.assert_allclose(one.update_P + problem.costs.t_u, end_P)
    for worker, sequence in zip(problem.topology.workers, sequences, strict=True):
        ops = [op for op, *_ in schedule.ops_of(worker) if op.iteration == 0 and op.kind != Kind.U]
        assert [(op.kind, op.pipeline, op.microbatch) for op in ops] == sequence


def test_a_stage_begins_later_where_that_shortens_the_period():
    """The second forward of stage 1 arrives at 3: a first one at 1 would be followed by a bubble."""
    problem = Problem(Topology(2, 2), 3, frozenset({(1, 1)}))
    executor_DMP = np.array([[[0, 0]] * 3, [[1, 0]] * 3])
    every = [(d, m) for d in range(2) for m in range(3)]
    forwards = [(0, 0), (0, 2), (0, 1), (1, 0), (1, 1), (1, 2)]
    sequences = [[(kind, d, m) for kind in (Kind.F, Kind.B, Kind.W) for m in range(3)] for d in range(2)]
    sequences[1:1] = [[(Kind.F, *x) for x in forwards] + [(kind, *x) for kind in (Kind.B, Kind.W) for x in every]]
    one = time_round(problem, executor_DMP, [*sequences, []])
    assert one.start_3DMP[Kind.F, 0, :, 1].tolist() == [2, 4, 3]
    assert one.period == 18
    assert one.update_P.tolist() == [18, 20]
    barrier = time_round(replace(problem, staggered=False), executor_DMP, [*sequences, []])
    assert barrier.start_3DMP[Kind.F, 0, :, 1].tolist() == [1, 4, 3]
    assert barrier.period == 20
    assert barrier.update_P.tolist() == [20, 20]


def test_sequences_that_wait_for_each_other_are_refused():
    problem, executor_DMP = Problem(Topology(1, 2), 2), np.zeros((1, 2, 2), int)
    turn = [[(kind, 0, m) for m in order for kind in (Kind.F, Kind.B, Kind.W)] for order in ([0, 1], [1, 0])]
    with pytest.raises(AssertionError, match="in a cycle"):
        time_round(problem, executor_DMP, turn)
    for first, second in ((Kind.F, Kind.B), (Kind.B, Kind.W)):
        back_to_front = [[(second, 0, 0), (first, 0, 0), (3 - first - second, 0, 0)]]
        with pytest.raises(AssertionError, match="in a cycle"):
            time_round(Problem(Topology(), 1), np.zeros((1, 1, 1), int), back_to_front)


def test_sequences_that_are_not_the_problem_s_are_refused():
    problem, executor_DMP = Problem(Topology(2, 1), 1), np.array([[[0]], [[1]]])
    whole = [[(kind, d, 0) for kind in (Kind.F, Kind.B, Kind.W)] for d in range(2)]
    time_round(problem, executor_DMP, whole)
    with pytest.raises(AssertionError, match="every op is in one sequence"):
        time_round(problem, executor_DMP, [whole[0], whole[1][:2]])
    with pytest.raises(AssertionError, match="every op is in a sequence"):
        time_round(problem, executor_DMP, [whole[0], [whole[1][0]] * 3])
    with pytest.raises(AssertionError, match="its executor's sequence"):
        time_round(problem, executor_DMP, whole[::-1])
    twice = [[(Kind.F, 0, 0), (Kind.F, 0, 1), (Kind.B, 0, 0), (Kind.B, 0, 1), (Kind.W, 0, 0), (Kind.W, 0, 1)]]
    with pytest.raises(AssertionError, match="directly after its B"):
        time_round(Problem(Topology(), 2, decoupled=False), np.zeros((1, 2, 1), int), twice)


def test_a_live_worker_without_work_only_updates():
    problem = Problem(Topology(2, 1), 1, costs=Costs(t_u=0.5), num_iterations=1)
    sequences = [[(kind, d, 0) for d in range(2) for kind in (Kind.F, Kind.B, Kind.W)], []]
    schedule = Schedule.from_round(problem, "one", time_round(problem, np.zeros((2, 1, 1), int), sequences))
    verify(schedule)
    assert [(row.op.kind, row.start, row.end) for row in schedule.ops_of((1, 0))] == [(Kind.U, 6, 6.5)]
