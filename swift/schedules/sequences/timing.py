"""Timing of ops whose order on every worker is given.

Shape suffixes: D pipelines, M micro-batches of the pipeline with the most, P chunks, L lines: workers that run
something.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from swift.schedules.problem import Problem
from swift.schedules.schedule import Round
from swift.schedules.sequences.graph import SequencedOp, SequenceGraph


def time_round(problem: Problem, executor_DMP: np.ndarray, sequences: Sequence[Sequence[SequencedOp]]) -> Round:
    """Finds the round with the shortest period that keeps the sequences, every op as early as that period allows.

    Without staggering, and in a window of one iteration, all workers begin together, and the period is the longest path
    through the ops. With staggering a worker may begin later than others: at the end of its last U of the previous
    iteration. Let a_pq be the longest path from the beginning of worker q to the end of worker p. A schedule with
    period T exists if and only if there are beginnings x with a_pq + x_q <= x_p + T for all p and q; the least such T
    is the largest cycle mean of a (its eigenvalue in max-plus algebra). It is approached from below: a worker that ends
    after x_p + T begins that much later, and the ops are timed again, until every worker keeps T, or workers that delay
    each other form a cycle, whose mean is the next T. A few passes over the ops suffice, and a is never built
    explicitly.

    The order alone decides which stashes a worker holds at once; how long messages occupy inboxes depends on the times.

    Args:
        problem: problem, for its costs and for being decoupled or staggered.
        executor_DMP: pipeline that runs each micro-batch at each chunk, as in ``Round``.
        sequences: ops of worker (d, p) at d * (number of stages) + p: F, B and W of every micro-batch and chunk that it
            runs, in its order, W directly after B if the problem is not decoupled; empty for a worker that runs
            nothing. A worker's Us come last, by chunk, unless the sequence has them.
    """
    graph = SequenceGraph.of(problem, executor_DMP, sequences)
    starts = graph.time([0.0] * graph.num_lines) if problem.begins_together else _settled(graph)
    ends_L, firsts_L = graph.line_ends(starts), graph.first_starts(starts)
    if problem.begins_together:
        ends_L, firsts_L = [max(ends_L)], [min(firsts_L)]
    offset, period = min(firsts_L), max(end - first for end, first in zip(ends_L, firsts_L, strict=True))
    start_3DMP = np.full((3, *executor_DMP.shape), np.nan)
    start_3DMP.reshape(-1)[graph.ids] = np.array(starts)[graph.op_nodes]
    update_P = np.array(starts)[graph.update_nodes]
    return Round(executor_DMP, start_3DMP - offset, update_P - offset, period)


def _settled(graph: SequenceGraph) -> list[float]:
    """Computes the starts of all nodes for the shortest period, with workers beginning as early as it allows."""
    L = graph.num_lines
    begins, period, delayed_by = [0.0] * L, 0.0, dict[int, tuple[int, float]]()
    at_once = starts = graph.time(begins)
    tolerance = 1e-12 * max(graph.line_ends(starts))
    while True:
        ends = graph.line_ends(starts)
        late = [p for p in range(L) if ends[p] > begins[p] + period + tolerance]
        if not late:
            return starts
        for p in late:
            q = graph.critical_line(starts, p)
            delayed_by[p] = q, ends[p] - begins[q]
        mean = _largest_mean(delayed_by)
        if mean > period + tolerance:
            begins, period, delayed_by, starts = [0.0] * L, mean, {}, at_once
        else:
            begins = [ends[p] - period if p in late else begins[p] for p in range(L)]
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
