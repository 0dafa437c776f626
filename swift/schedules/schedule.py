"""Schedules (for every worker an ordered list of timed ops) and their measures: period, makespan, bubbles, peak memory.

Memory model: F allocates the F-stash. B turns the F-stash into the W-stash and holds the larger of the two while it
runs. W frees the W-stash. A message occupies its reader's inbox from the end of the sending op to the end of the
reading op. An output that is read on the same worker is not a message.

Shape suffixes: K iterations, D pipelines, M micro-batches (the maximum over pipelines), P chunks (equal to stages in a
plain problem), 3 the kinds F, B, W, n ops.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from swift.schedules.problem import NO_MICROBATCH, Kind, Op, Problem, TimedOp
from swift.topology import Worker


@dataclass(frozen=True, eq=False)
class Round:
    """One iteration of a periodic schedule, as decided by a planner.

    Attributes:
        executor_DMP: int, pipeline whose worker runs chunk p for micro-batch (d, m); -1 as padding if pipeline d has no
            micro-batch m.
        start_3DMP: start times of F, B and W for each micro-batch and chunk; NaN as padding.
        update_P: start time of each chunk's U, which all live workers that hold the chunk run at the same time.
        period: time between the starts of consecutive iterations, which repeat the same ops.
    """

    executor_DMP: np.ndarray
    start_3DMP: np.ndarray
    update_P: np.ndarray
    period: float

    def repeated(self, num_pipelines: int) -> "Round":
        """Copies the round of a single pipeline to ``num_pipelines`` identical pipelines."""
        _, M, P = self.executor_DMP.shape
        executor_DMP = np.broadcast_to(np.arange(num_pipelines, dtype=np.int32)[:, None, None], (num_pipelines, M, P))
        start_3DMP = np.broadcast_to(self.start_3DMP, (3, num_pipelines, M, P))
        return Round(executor_DMP, start_3DMP, self.update_P, self.period)


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """All ops of a window as columns, sorted by worker, iteration and start: the order in which workers run them.

    A schedule is not necessarily valid: ``verify`` checks its rows against the problem.

    Attributes:
        problem: problem that the schedule is for.
        solver: name of the planner that found it.
        worker: int32[n], index of the worker (d, p) that runs the op, as d * (number of stages) + p.
        kind, iteration, pipeline, microbatch, chunk: int32[n], the fields of ``Op``.
        start, end: float64[n], in the time unit of the costs.
    """

    problem: Problem
    solver: str
    worker: np.ndarray
    kind: np.ndarray
    iteration: np.ndarray
    pipeline: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @classmethod
    def from_ops(cls, problem: Problem, solver: str, ops: Iterable[TimedOp]) -> "Schedule":
        """Builds a schedule from ops in any order."""
        rows = [(*worker, *op, start, end) for op, worker, start, end in ops]
        columns = np.array(rows, np.float64).reshape(len(rows), 9).T
        d, p, *names = columns[:7].astype(np.int32)
        return _ordered(problem, solver, [d * problem.num_stages + p, *names], columns[7], columns[8])

    @classmethod
    def from_round(cls, problem: Problem, solver: str, iteration_plan: Round) -> "Schedule":
        """Builds a schedule that repeats ``iteration_plan`` in every iteration of the window."""
        exists_DMP = iteration_plan.executor_DMP >= 0
        kind, d, m, p = (axis[:, exists_DMP].ravel() for axis in np.indices((3, *exists_DMP.shape), np.int32))
        worker = problem.worker_DP[iteration_plan.executor_DMP[d, m, p], p]
        start = iteration_plan.start_3DMP[:, exists_DMP].ravel()
        updates = [(d, k) for d, stage in problem.live_workers for k in problem.held_by((d, stage))]
        update_d, update_p = np.array(updates, np.int32).reshape(-1, 2).T
        update_start = iteration_plan.update_P[update_p]
        fixed = [np.full(len(updates), value, np.int32) for value in (Kind.U, NO_MICROBATCH)]
        columns = [
            np.concatenate(pair)
            for pair in (
                (worker, problem.worker_DP[update_d, update_p]),
                (kind, fixed[0]),
                (d, update_d),
                (m, fixed[1]),
                (p, update_p),
                (start, update_start),
                (start + problem.time_4P[kind, p], update_start + problem.time_4P[Kind.U, update_p]),
            )
        ]
        K, n = problem.num_iterations, len(columns[0])
        worker, kind, d, m, p, start, end = (np.tile(column, K) for column in columns)
        iteration = np.repeat(np.arange(K, dtype=np.int32), n)
        shift = iteration * iteration_plan.period
        return _ordered(problem, solver, [worker, kind, iteration, d, m, p], start + shift, end + shift)

    @classmethod
    def planned(cls, problem: Problem, solver: str, plan: Callable[[Problem], Round]) -> "Schedule":
        """Builds a schedule from the round that ``plan`` finds.

        Without failures and with uniform pipelines, ``plan`` is called for one pipeline, and its round is copied to all
        pipelines.
        """
        if problem.failed or not problem.is_uniform:
            return cls.from_round(problem, solver, plan(problem))
        return cls.from_round(problem, solver, plan(problem.single_pipeline()).repeated(problem.num_pipelines))

    @property
    def num_ops(self) -> int:
        """Number of ops, n."""
        return len(self.start)

    @cached_property
    def bounds(self) -> np.ndarray:
        """Row offsets, int64[D * (number of stages) + 1]: worker w has the rows ``bounds[w]:bounds[w + 1]``."""
        return np.searchsorted(self.worker, np.arange(self.problem.num_pipelines * self.problem.num_stages + 1))

    @cached_property
    def row_3KDMP(self) -> np.ndarray:
        """Row index of every F, B and W, int64[3, K, D, M, P]; -1 as padding."""
        problem, is_fbw = self.problem, self.kind != Kind.U
        shape = (problem.num_iterations, problem.num_pipelines, problem.most_microbatches, problem.num_chunks)
        row_3KDMP = np.full((3, *shape), -1, np.int64)
        names = (self.kind, self.iteration, self.pipeline, self.microbatch, self.chunk)
        row_3KDMP[tuple(name[is_fbw] for name in names)] = np.flatnonzero(is_fbw)
        return row_3KDMP

    @property
    def rows_of_microbatches(self) -> np.ndarray:
        """``row_3KDMP`` without the padding, int64[3, K, micro-batches of all pipelines, P]."""
        exists_DM = np.arange(self.problem.most_microbatches) < np.array(self.problem.microbatches)[:, None]
        return self.row_3KDMP[:, :, exists_DM]

    def ops(self) -> Iterator[TimedOp]:
        """Yields all ops, worker by worker, in execution order."""
        P = self.problem.num_stages
        columns = (self.worker, self.kind, self.iteration, self.pipeline, self.microbatch, self.chunk)
        for (w, kind, *names), start, end in zip(
            np.stack(columns, axis=1).tolist(), self.start.tolist(), self.end.tolist(), strict=True
        ):
            yield TimedOp(Op(Kind(kind), *names), divmod(w, P), start, end)

    def ops_of(self, worker: Worker) -> list[TimedOp]:
        """Lists one worker's ops in execution order."""
        return [timed for timed in self.ops() if timed.worker == worker]


def _ordered(problem: Problem, solver: str, names: list[np.ndarray], start: np.ndarray, end: np.ndarray) -> Schedule:
    # Ends break ties: a U of zero duration and the op after it start at the same time.
    worker, kind, iteration, _, _, chunk = names
    order = np.lexsort((chunk, kind, end, start, iteration, worker))
    worker, kind, iteration, pipeline, microbatch, chunk = (
        np.ascontiguousarray(name[order], np.int32) for name in names
    )
    return Schedule(
        problem=problem,
        solver=solver,
        worker=worker,
        kind=kind,
        iteration=iteration,
        pipeline=pipeline,
        microbatch=microbatch,
        chunk=chunk,
        start=start[order],
        end=end[order],
    )


def iteration_ends(schedule: Schedule) -> np.ndarray:
    """Returns the end time of each iteration's last op, float64[K]."""
    ends = np.zeros(schedule.problem.num_iterations)
    np.maximum.at(ends, schedule.iteration, schedule.end)
    return ends


def makespan(schedule: Schedule) -> float:
    """Returns the end time of the window's last op, where the first op starts at 0."""
    return float(schedule.end.max())


def period(schedule: Schedule) -> float:
    """Returns the mean time per iteration in steady state, measured from the first iteration's end to the last one's.

    For a window of a single iteration, returns the makespan.
    """
    ends = iteration_ends(schedule)
    return float(ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else float(ends[0])


def window_period(schedule: Schedule) -> float:
    """Returns the mean time per iteration if the pipeline drains between windows."""
    return makespan(schedule) / schedule.problem.num_iterations


def bubble_share(schedule: Schedule) -> float:
    """Returns the fraction of the live workers' time that is idle in steady state."""
    busy = float((schedule.end - schedule.start).sum()) / schedule.problem.num_iterations
    return max(0.0, 1.0 - busy / (len(schedule.problem.live_workers) * period(schedule)))


def peak_memory(schedule: Schedule) -> np.ndarray:
    """Computes each worker's peak memory.

    Returns:
        float64[D * (number of stages)], in the unit of the costs' stashes; 0 for a worker that runs nothing.
    """
    problem, kind = schedule.problem, schedule.kind
    f_stash_n, w_stash_n = problem.stash_2P[:, schedule.chunk]
    grown_n, shrunk_n = np.maximum(0.0, w_stash_n - f_stash_n), np.maximum(0.0, f_stash_n - w_stash_n)
    is_f, is_b, is_w = (np.flatnonzero(kind == each) for each in (Kind.F, Kind.B, Kind.W))
    # Changes of memory, as (worker, time, change). A stash grows at the start of B or shrinks at its end, so that B
    # holds the larger one while it runs.
    events = [
        (schedule.worker[is_f], schedule.start[is_f], f_stash_n[is_f]),
        (schedule.worker[is_b], schedule.start[is_b], grown_n[is_b]),
        (schedule.worker[is_b], schedule.end[is_b], -shrunk_n[is_b]),
        (schedule.worker[is_w], schedule.end[is_w], -w_stash_n[is_w]),
    ]
    if problem.costs.inbox:
        events += _inbox_events(schedule)
    worker = np.concatenate([event[0] for event in events])
    # Times are rounded to the tolerance: an op may reuse memory that the op before it frees at the same moment, and
    # lexsort puts negative deltas first among equal times.
    time = np.round(np.concatenate([event[1] for event in events]) / _time_tolerance(schedule))
    delta = np.concatenate([event[2] for event in events])
    order = np.lexsort((delta, time, worker))
    worker, delta = worker[order], delta[order]
    live_memory = np.cumsum(delta)
    peaks = np.zeros(schedule.problem.num_pipelines * schedule.problem.num_stages)
    # The cumulative sum runs over all workers: subtract what previous workers never freed (zero in a valid schedule).
    before = np.concatenate([[0.0], live_memory])[np.searchsorted(worker, worker)]
    np.maximum.at(peaks, worker, live_memory - before)
    return peaks


def fits(problem: Problem, iteration_plan: Round) -> bool:
    """Checks that a schedule that repeats a round stays within the memory limit, including messages."""
    if problem.memory_limit is None:
        return True
    return float(peak_memory(Schedule.from_round(problem, "", iteration_plan)).max()) <= problem.memory_limit * (
        1 + 1e-9
    )


def _time_tolerance(schedule: Schedule) -> float:
    """Returns the tolerance within which times are equal, since float sums depend on the order of their terms."""
    # Positive even for an empty schedule, since times are divided by it.
    return 1e-9 * max(1e-300, float(schedule.end.max(initial=0.0)))


def _inbox_events(schedule: Schedule) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    inbox, (f_KDMP, b_KDMP, w_KDMP) = schedule.problem.costs.inbox, schedule.row_3KDMP
    sent_back_KDMP = b_KDMP if schedule.problem.decoupled else w_KDMP
    events = []
    for senders, readers in ((f_KDMP[..., :-1], f_KDMP[..., 1:]), (sent_back_KDMP[..., 1:], b_KDMP[..., :-1])):
        # Between chunks of one worker there is no message: the output is part of the stash.
        both = (senders >= 0) & (readers >= 0) & (schedule.worker[senders] != schedule.worker[readers])
        sender, reader = senders[both], readers[both]
        worker, size = schedule.worker[reader], np.full(len(reader), inbox)
        events += [(worker, schedule.end[sender], size), (worker, schedule.end[reader], -size)]
    return events


def round_of(schedule: Schedule) -> Round:
    """Extracts the iteration that a valid schedule repeats: the inverse of ``Schedule.from_round``.

    The result is bit-exact if the first op starts at 0. A window of one iteration does not determine the period, so the
    makespan is used instead.
    """
    problem = schedule.problem
    K, rows_3KDMP = problem.num_iterations, schedule.row_3KDMP
    is_u, update_KP = schedule.kind == Kind.U, np.full((K, problem.num_chunks), np.nan)
    executor_3KDMP = np.where(rows_3KDMP < 0, -1, schedule.worker[rows_3KDMP] // problem.num_stages)
    start_3KDMP = np.where(rows_3KDMP < 0, np.nan, schedule.start[rows_3KDMP])
    update_KP[schedule.iteration[is_u], schedule.chunk[is_u]] = schedule.start[is_u]
    starts_K = np.nanmin(start_3KDMP, (0, 2, 3, 4))
    period = float(starts_K[1] - starts_K[0]) if K > 1 else makespan(schedule)
    shift_K, tolerance = period * np.arange(K), _time_tolerance(schedule)
    repeats = (
        np.all(executor_3KDMP == executor_3KDMP[0, 0])
        and np.allclose(
            start_3KDMP, start_3KDMP[:, :1] + shift_K[:, None, None, None], rtol=0, atol=tolerance, equal_nan=True
        )
        and np.allclose(update_KP, update_KP[0] + shift_K[:, None], rtol=0, atol=tolerance, equal_nan=True)
    )
    assert repeats, "the schedule does not repeat one iteration"
    return Round(executor_3KDMP[0, 0], start_3KDMP[:, 0], update_KP[0], period)
