"""Start times for ops whose order on every worker is given.

``time_round`` finds the shortest period at which every op can start after the ops that it depends on, from a
dependency graph of one iteration.

Shape suffixes: D pipelines, M micro-batches (the maximum over pipelines), P chunks, L lines (workers that run
something), n items (the ops of all lines in order, and a U for each line and chunk).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from swift.schedules.problem import NO_MICROBATCH, Kind, Problem
from swift.schedules.schedule import Round

SequencedOp = tuple[int, int, int] | tuple[int, int, int, int]
"""(kind, pipeline, micro-batch, chunk) of an op; the chunk may be omitted if the worker holds only one."""

_NONE = -1


@dataclass(frozen=True, eq=False)
class SequenceGraph:
    """Dependency graph of one iteration's ops, in topological order.

    A line is a worker that has ops. The first L nodes are the beginnings of the lines; every other node is an op. A
    node waits for at most two others: the node before it on its worker (the line's beginning for the first op), and the
    op whose output it reads. The Us of one chunk on all lines form a chain; the chain's last node is the time at which
    all of them start. A gap is the least time between the starts of a node and of a node that waits for it.

    Attributes:
        num_lines: number of lines, L.
        waits: four lists over all nodes except the first L: the previous node, its gap, the node that is read, its gap.
        ids: ((kind * D + d) * M + m) * P + p for every F, B and W.
        op_nodes: node of each id.
        update_nodes: node at which each chunk's Us start.
        firsts: first op node of each line.
        lasts: (node of the last U, duration of that U) of each line.
    """

    num_lines: int
    waits: tuple[list[int], list[float], list[int], list[float]]
    ids: np.ndarray
    op_nodes: np.ndarray
    update_nodes: np.ndarray
    firsts: list[int]
    lasts: list[tuple[int, float]]

    @classmethod
    def of(
        cls, problem: Problem, executor_DMP: np.ndarray, sequences: Sequence[Sequence[SequencedOp]]
    ) -> "SequenceGraph":
        """Builds the graph; see ``time_round`` for the arguments."""
        lines = _Lines.of(problem, executor_DMP, sequences)
        before, before_gap, read, read_gap = _edges(problem, executor_DMP, lines)
        L, total = len(lines.workers), len(before)
        order = _topological(L, before, read)
        node = np.empty(L + total, np.int64)
        node[:L], node[L + order] = np.arange(L), np.arange(L, L + total)
        is_u = lines.kind == Kind.U
        update_P = node[L + lines.joint_P]
        columns = (node[before[order]], before_gap[order], node[read[order]], read_gap[order])
        last_chunks = lines.chunk[lines.bounds[1:] - 1]
        u_P = problem.time_4P[Kind.U]
        return cls(
            L,
            tuple(column.tolist() for column in columns),
            lines.ids[~is_u],
            node[L + np.flatnonzero(~is_u)],
            update_P,
            node[L + lines.bounds[:-1]].tolist(),
            [(int(update_P[k]), float(u_P[k])) for k in last_chunks],
        )

    def time(self, begins: Sequence[float]) -> list[float]:
        """Computes every node's earliest start in one pass, given when each line begins."""
        # Lists instead of arrays: every node depends on earlier ones, so the loop cannot be vectorized.
        starts = list(begins)
        append = starts.append
        for before, before_gap, read, read_gap in zip(*self.waits, strict=True):
            free = starts[before] + before_gap
            ready = starts[read] + read_gap
            append(free if free > ready else ready)
        return starts

    def first_starts(self, starts: Sequence[float]) -> list[float]:
        """Returns the start of each line's first op."""
        return [starts[node] for node in self.firsts]

    def line_ends(self, starts: Sequence[float]) -> list[float]:
        """Returns the end of each line's last U."""
        return [starts[node] + time for node, time in self.lasts]

    def critical_line(self, starts: Sequence[float], line: int) -> int:
        """Finds the line whose beginning starts the longest path to the end of ``line``, by walking back."""
        node, L = self.lasts[line][0], self.num_lines
        before, before_gap, read, _ = self.waits
        while node >= L:
            # Exact comparison: ``time`` set the start to one of these two sums.
            i, start = node - L, starts[node]
            node = before[i] if starts[before[i]] + before_gap[i] == start else read[i]
        return node


@dataclass(frozen=True, eq=False)
class _Lines:
    """All lines' items, concatenated: line by line, each in execution order.

    Attributes:
        workers: worker of each line.
        bounds: int64[L + 1], offset of each line's items.
        line, kind, chunk: int64[n].
        ids: int64[n], id of every F, B and W as in ``SequenceGraph``; -1 for a U.
        place: item of each id; -1 for padding.
        joint_P: for each chunk, the item at which all its Us start: the U on the first line.
        before_u: int64[n], for a U, the same chunk's U on the next line; -1 for the last line's U and for other ops.
    """

    workers: list[int]
    bounds: np.ndarray
    line: np.ndarray
    kind: np.ndarray
    chunk: np.ndarray
    ids: np.ndarray
    place: np.ndarray
    joint_P: np.ndarray
    before_u: np.ndarray

    @classmethod
    def of(cls, problem: Problem, executor_DMP: np.ndarray, sequences: Sequence[Sequence[SequencedOp]]) -> "_Lines":
        S, parts = problem.num_stages, []
        for d, p in problem.live_workers:
            chunks, sequence = problem.held_by((d, p)), sequences[d * S + p]
            # In a plain problem nothing waits for a worker that only updates.
            if sequence or (chunks and not problem.is_plain):
                parts.append((d * S + p, _items(chunks, d, sequence)))
        assert sum(map(len, sequences)) == sum(map(len, (sequences[w] for w, _ in parts))), "a failed worker runs an op"
        kind, d, m, k = np.concatenate([items for _, items in parts]).T
        workers, sizes = [w for w, _ in parts], [len(items) for _, items in parts]
        line = np.repeat(np.arange(len(parts)), sizes)
        is_u, worker = kind == Kind.U, np.array(workers)[line]
        ids = np.where(is_u, _NONE, ((kind * executor_DMP.shape[0] + d) * executor_DMP.shape[1] + m))
        ids = np.where(is_u, _NONE, ids * executor_DMP.shape[2] + k)
        ops = np.flatnonzero(~is_u)
        assert len(ops) == problem.num_ops, "every op is in one sequence"
        ran_by = problem.worker_DP[executor_DMP[d[ops], m[ops], k[ops]], k[ops]]
        assert (ran_by == worker[ops]).all(), "every op is in its executor's sequence"
        place = np.full(3 * executor_DMP.size, _NONE)
        place[ids[ops]] = ops
        assert (place >= 0).sum() == len(ops), "every op is in a sequence"
        joint_P, before_u = np.full(problem.num_chunks, _NONE), np.full(len(kind), _NONE)
        for item in reversed(np.flatnonzero(is_u).tolist()):
            before_u[item], joint_P[k[item]] = joint_P[k[item]], item
        return cls(workers, np.cumsum([0, *sizes]), line, kind, k, ids, place, joint_P, before_u)


def _items(chunks: tuple[int, ...], d: int, sequence: Sequence[SequencedOp]) -> np.ndarray:
    """Builds the rows (kind, pipeline, micro-batch, chunk) of a worker's ops, and appends missing Us, int64[n, 4]."""
    width = len(sequence[0]) if sequence else 4
    flat = np.fromiter(chain.from_iterable(sequence), np.int64, width * len(sequence)).reshape(-1, width)
    if width == 3:
        assert len(chunks) == 1, "the chunks of the ops of a worker that holds several are not said"
        flat = np.insert(flat, 3, chunks[0], axis=1)
    updated_chunks = flat[flat[:, 0] == Kind.U, 3].tolist()
    more = [(Kind.U, d, NO_MICROBATCH, k) for k in chunks if k not in updated_chunks]
    assert len(updated_chunks) == len(set(updated_chunks).intersection(chunks)), "a U that is not the worker's own"
    return np.concatenate([flat, np.array(more, np.int64).reshape(-1, 4)])


def _edges(
    problem: Problem, executor_DMP: np.ndarray, lines: _Lines
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Computes what each item waits for, as four arrays: previous node, its gap, node that is read, its gap.

    Without staggering, the nodes of a barrier are appended.
    """
    L, n = len(lines.workers), len(lines.line)
    worker, duration = np.array(lines.workers)[lines.line], problem.time_4P[lines.kind, lines.chunk]
    is_u, begins = lines.kind == Kind.U, np.isin(np.arange(n), lines.bounds)
    # Peers update together: a U, and the op after it, start relative to the node at which all Us of its chunk start.
    node = np.where(is_u, lines.joint_P[lines.chunk], np.arange(n)) + L
    before = np.where(begins, lines.line, np.roll(node, 1))
    before_gap = np.where(begins, 0.0, np.roll(duration, 1))
    sender = _senders(problem, executor_DMP, lines)
    w = lines.kind == Kind.W
    assert problem.decoupled or (np.arange(n)[w] - 1 == sender[w]).all(), "W is directly after its B"
    is_sent = (sender >= 0) & (worker[sender] != worker)
    read = np.where(sender < 0, lines.line, sender + L)
    read_gap = np.where(sender < 0, 0.0, duration[sender] + np.where(is_sent, problem.costs.t_comm, 0.0))
    joined = lines.before_u >= 0
    read, read_gap = np.where(joined, lines.before_u + L, read), np.where(joined, 0.0, read_gap)
    if not problem.staggered:
        first_u = np.flatnonzero(is_u & (begins | ~np.roll(is_u, 1)))
        assert len(first_u) == L, "without staggering, Us are last"
        # Barrier nodes form a chain: each waits for the one before it and for the last op of its line.
        barrier, before_barrier = L + n + np.arange(L), np.roll(L + n + np.arange(L), 1)
        before_barrier[0] = before[first_u[0]]
        gap_barrier, read_barrier, read_gap_barrier = before_gap[first_u] * 0.0, before[first_u], before_gap[first_u]
        gap_barrier[0] = before_gap[first_u[0]]
        before = np.append(before, before_barrier)
        before_gap = np.append(before_gap, gap_barrier)
        before[first_u], before_gap[first_u] = barrier[-1], 0.0
        read, read_gap = np.append(read, read_barrier), np.append(read_gap, read_gap_barrier)
    return before, before_gap, read, read_gap


def _senders(problem: Problem, executor_DMP: np.ndarray, lines: _Lines) -> np.ndarray:
    """Finds the item whose output each item reads; -1 for an item that reads none."""
    size, kind, k, ids = executor_DMP.size, lines.kind, lines.chunk, lines.ids
    reads = np.where((kind == Kind.B) | (kind == Kind.W), ids - size, _NONE)
    reads = np.where((kind == Kind.F) & (k > 0), ids - 1, reads)
    is_back = (kind == Kind.B) & (k < problem.num_chunks - 1)
    reads = np.where(is_back, ids + 1 if problem.decoupled else ids + 1 + size, reads)
    return np.where(reads < 0, _NONE, lines.place[reads])


def _topological(num_lines: int, before: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Sorts items topologically (Kahn's algorithm)."""
    total = len(before)
    waits = np.concatenate([before, read]) - num_lines
    waiter = np.tile(np.arange(total), 2)[waits >= 0]
    waits = waits[waits >= 0]
    left = np.bincount(waiter, minlength=total).tolist()
    by_wait = np.argsort(waits, kind="stable")
    waiter, bounds = waiter[by_wait].tolist(), np.searchsorted(waits[by_wait], np.arange(total + 1)).tolist()
    order = [item for item in range(total) if not left[item]]
    for item in order:
        for other in waiter[bounds[item] : bounds[item + 1]]:
            left[other] -= 1
            if not left[other]:
                order.append(other)
    assert len(order) == total, "the sequences wait for each other in a cycle"
    return np.array(order)


def time_round(problem: Problem, executor_DMP: np.ndarray, sequences: Sequence[Sequence[SequencedOp]]) -> Round:
    """Computes the round with the shortest period that keeps the given order; every op runs as early as possible.

    Without staggering, and in a window of one iteration, all workers begin together, and the period is the longest path
    through the ops. With staggering a worker begins when its last U of the previous iteration ends, which may be later
    than on other workers. Let a_pq be the longest path from the beginning of worker q to the end of worker p. A
    schedule with period T exists if and only if there are beginnings x with a_pq + x_q <= x_p + T for all p and q. The
    least such T is the largest cycle mean of a, its eigenvalue in max-plus algebra. The search approaches T from below:
    it delays every worker that ends after x_p + T and times the ops again, until all workers end in time, or until
    workers that delay each other form a cycle, whose mean is the next T. A few passes over the ops suffice, and a is
    never built explicitly.

    Stash memory depends on the order alone; how long messages occupy inboxes depends on the times.

    Args:
        problem: problem that the ops belong to, which determines their costs, and whether B and W are decoupled and
            updates are staggered.
        executor_DMP: pipeline that runs each micro-batch at each chunk, as in ``Round``.
        sequences: for each worker (d, p), at index d * (number of stages) + p, its ops in execution order; empty for a
            worker that runs nothing. W must directly follow B if the problem is not decoupled. Us may be omitted; they
            then come last, in the order of chunks.
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
    """Computes the start of every node at the shortest period, where every worker begins as early as it can."""
    L = graph.num_lines
    begins, period, delayed_by = [0.0] * L, 0.0, dict[int, tuple[int, float]]()
    at_once = starts = graph.time(begins)
    tolerance = 1e-12 * max(graph.line_ends(starts))
    while True:
        ends = graph.line_ends(starts)
        late = [p for p in range(L) if ends[p] > begins[p] + period + tolerance]
        if not late:
            return starts
        # Worker p is late because of the path from the beginning of worker q: an edge of a graph of delays.
        for p in late:
            q = graph.critical_line(starts, p)
            delayed_by[p] = q, ends[p] - begins[q]
        mean = _largest_mean(delayed_by)
        # Workers that delay each other in a cycle prove that the period is longer; restart the search from that period.
        if mean > period + tolerance:
            begins, period, delayed_by, starts = [0.0] * L, mean, {}, at_once
        else:
            begins = [ends[p] - period if p in late else begins[p] for p in range(L)]
            starts = graph.time(begins)


def _largest_mean(delayed_by: Mapping[int, tuple[int, float]]) -> float:
    """Returns the largest cycle mean of a graph that maps each node to its only edge, (other node, length).

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
