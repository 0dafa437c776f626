"""Timing of ops whose order on every worker is given.

Shape suffixes: D pipelines, M micro-batches of a pipeline, P stages, n ops of one iteration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from swift.schedules.ops import Kind
from swift.schedules.problem import Problem
from swift.schedules.schedule import Round

SequencedOp = tuple[int, int, int]
"""(kind, pipeline, micro-batch) of an op; its stage is that of the worker in whose sequence it stands."""


def time_round(problem: Problem, executor_DMP: np.ndarray, sequences: Sequence[Sequence[SequencedOp]]) -> Round:
    """Finds the round with the shortest period that keeps the sequences, every op as early as that period allows.

    Without staggering all stages begin together, and the period is the longest path through the ops. With staggering a
    stage may begin later than others: at the end of its U of the previous iteration. Let a_pq be the longest path from
    the beginning of stage q to the end of the U of stage p. A schedule with period T exists if and only if there are
    beginnings x with a_pq + x_q <= x_p + T for all p and q; the least such T is the largest cycle mean of a (its
    eigenvalue in max-plus algebra). It is approached from below: a stage whose U ends after x_p + T begins that much
    later, and the ops are timed again, until every stage keeps T, or stages that delay each other form a cycle, whose
    mean is the next T. A few passes over the ops suffice, and a is never built explicitly.

    The order alone decides which stashes a worker holds at once; how long messages occupy inboxes depends on the times.

    Args:
        problem: problem, for its costs and for being decoupled or staggered.
        executor_DMP: pipeline that runs each micro-batch at each stage, as in ``Round``.
        sequences: ops of worker (d, p) at d * P + p: F, B and W of every micro-batch that it runs, in its order, W
            directly after B if the problem is not decoupled; empty for a worker that runs nothing.
    """
    P, graph = problem.num_stages, _Graph.of(problem, executor_DMP, sequences)
    starts = _settled(graph) if problem.staggered else graph.time([0.0] * P)
    ends_P, firsts_P = graph.update_ends(starts), graph.first_starts(starts)
    if not problem.staggered:
        ends_P, firsts_P = [max(ends_P)] * P, [min(firsts_P)] * P
    start_n = np.empty(len(graph.ids))
    start_n[graph.ids] = starts[P:]
    offset, period = min(firsts_P), max(end - first for end, first in zip(ends_P, firsts_P, strict=True))
    start_3DMP = start_n.reshape(3, *executor_DMP.shape) - offset
    return Round(executor_DMP, start_3DMP, np.array(ends_P) - problem.costs.t_u - offset, period)


def _settled(graph: "_Graph") -> list[float]:
    """Computes the starts of all nodes for the shortest period, with stages beginning as early as it allows."""
    P = len(graph.firsts)
    begins, period, delayed_by = [0.0] * P, 0.0, dict[int, tuple[int, float]]()
    at_once = starts = graph.time(begins)
    tolerance = 1e-12 * max(graph.update_ends(starts))
    while True:
        ends = graph.update_ends(starts)
        late = [p for p in range(P) if ends[p] > begins[p] + period + tolerance]
        if not late:
            return starts
        for p in late:
            q = graph.critical_stage(starts, p)
            delayed_by[p] = q, ends[p] - begins[q]
        mean = _largest_mean(delayed_by)
        if mean > period + tolerance:
            begins, period, delayed_by, starts = [0.0] * P, mean, {}, at_once
        else:
            begins = [ends[p] - period if p in late else begins[p] for p in range(P)]
            starts = graph.time(begins)


def _largest_mean(delayed_by: Mapping[int, tuple[int, float]]) -> float:
    """Finds the largest cycle mean of a graph in which each node has at most one edge, as node -> (node, length).

    >>> _largest_mean({2: (2, 3.0), 0: (1, 2.0), 1: (0, 5.0), 3: (0, 9.0)})
    3.5
    """
    largest, seen = 0.0, set[int]()
    for p in delayed_by:
        path = []
        while p in delayed_by and p not in seen:
            seen.add(p)
            path.append(p)
            p = delayed_by[p][0]
        if p in path:
            cycle = path[path.index(p) :]
            largest = max(largest, sum(delayed_by[q][1] for q in cycle) / len(cycle))
    return largest


@dataclass(frozen=True, eq=False)
class _Graph:
    """Dependency graph of the ops of one iteration, in topological order.

    Node p is the beginning of stage p, node P + i the i-th op. An op waits for the previous op on its worker or, if it
    is the first there, for the beginning of its stage; and for the op whose output it reads. A gap is the time from the
    start of a node to the earliest start of an op that waits for it.

    Attributes:
        ids: int[n], ((kind * D + d) * M + m) * P + p of the i-th op.
        waits: four lists over ops: the previous node, its gap, the node that is read, its gap.
        firsts: first nodes of each stage's workers.
        lasts: last nodes of each stage's workers, which are Ws.
        end_gap: time from the start of the last W to the end of U.
    """

    ids: np.ndarray
    waits: tuple[list[int], list[float], list[int], list[float]]
    firsts: list[list[int]]
    lasts: list[list[int]]
    end_gap: float

    @classmethod
    def of(cls, problem: Problem, executor_DMP: np.ndarray, sequences: Sequence[Sequence[SequencedOp]]) -> "_Graph":
        P, costs, n = problem.num_stages, problem.costs, 3 * executor_DMP.size
        bounds = np.cumsum([0, *map(len, sequences)])
        assert bounds[-1] == n, "every op is in one sequence"
        flat = np.fromiter(chain.from_iterable(chain.from_iterable(sequences)), np.int64, 3 * n)
        kind, d, m = flat.reshape(n, 3).T
        worker = np.repeat(np.arange(len(sequences)), np.diff(bounds))
        assert (executor_DMP[d, m, worker % P] == worker // P).all(), "every op is in its executor's sequence"
        ids = np.ravel_multi_index((kind, d, m, worker % P), (3, *executor_DMP.shape))
        place = np.full(n, -1)
        place[ids] = np.arange(n)
        assert (place >= 0).all(), "every op is in a sequence"
        reads, sent = _reads(problem, kind, ids, worker % P)
        order = np.array(_topological(bounds.tolist(), np.where(reads < 0, -1, place[reads]).tolist()))
        node = np.empty(n, np.int64)
        node[order] = np.arange(P, P + n)

        duration = np.array(costs.op_times)
        begins = np.isin(np.arange(n), bounds)
        before = np.where(begins, worker % P, np.roll(node, 1))
        assert problem.decoupled or (np.roll(ids, 1) == reads)[kind == Kind.W].all(), "W is directly after its B"
        before_gap = np.where(begins, 0.0, np.roll(duration[kind], 1))
        read = np.where(reads < 0, worker % P, node[place[reads]])
        read_gap = np.where(reads < 0, 0.0, duration[reads * 3 // n] + np.where(sent, costs.t_comm, 0.0))
        columns = (before, before_gap, read, read_gap)
        busy = [w for w in range(len(sequences)) if sequences[w]]
        return cls(
            ids[order],
            tuple(column[order].tolist() for column in columns),
            [[int(node[bounds[w]]) for w in busy if w % P == p] for p in range(P)],
            [[int(node[bounds[w + 1] - 1]) for w in busy if w % P == p] for p in range(P)],
            costs.t_w + costs.t_u,
        )

    def time(self, begins: Sequence[float]) -> list[float]:
        """Computes the earliest start of every node, given the beginnings of the stages."""
        starts = list(begins)
        append = starts.append
        for before, before_gap, read, read_gap in zip(*self.waits, strict=True):
            free = starts[before] + before_gap
            ready = starts[read] + read_gap
            append(free if free > ready else ready)
        return starts

    def first_starts(self, starts: Sequence[float]) -> list[float]:
        """Start of every stage's first op."""
        return [min(starts[node] for node in nodes) for nodes in self.firsts]

    def update_ends(self, starts: Sequence[float]) -> list[float]:
        """End of every stage's U, which follows the last W of its workers."""
        return [max(starts[node] for node in nodes) + self.end_gap for nodes in self.lasts]

    def critical_stage(self, starts: Sequence[float], stage: int) -> int:
        """Finds the stage from whose beginning the longest path to the U of ``stage`` starts."""
        node, P = max(self.lasts[stage], key=starts.__getitem__), len(self.firsts)
        while node >= P:
            before, before_gap, read, _ = self.waits
            i, start = node - P, starts[node]
            node = before[i] if starts[before[i]] + before_gap[i] == start else read[i]
        return node


def _reads(problem: Problem, kind: np.ndarray, ids: np.ndarray, stage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds the id of the op whose output each op reads, -1 for none, and whether it is sent between stages."""
    size = problem.num_pipelines * problem.num_microbatches * problem.num_stages
    forward = (kind == Kind.F) & (stage > 0)
    backward = (kind == Kind.B) & (stage < problem.num_stages - 1)
    reads = np.where(kind == Kind.F, -1, ids - size)
    reads = np.where(forward, ids - 1, reads)
    reads = np.where(backward, ids + 1 if problem.decoupled else ids + 1 + size, reads)
    return reads, forward | backward


def _topological(bounds: Sequence[int], reads: Sequence[int]) -> list[int]:
    """Sorts ops so that each follows ``reads[i]`` and the earlier ops of its worker, ``bounds[w]:bounds[w + 1]``."""
    following, done, reader, order = list(bounds[:-1]), [False] * len(reads), [-1] * len(reads), []
    awake = list(range(len(following)))
    while awake:
        w = awake.pop()
        i, end = following[w], bounds[w + 1]
        while i < end:
            read = reads[i]
            if read >= 0 and not done[read]:
                reader[read] = w
                break
            done[i] = True
            order.append(i)
            if reader[i] >= 0:
                awake.append(reader[i])
            i += 1
        following[w] = i
    assert len(order) == len(reads), "the sequences wait for each other in a cycle"
    return order
