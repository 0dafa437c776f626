"""Schedules: for every worker an ordered list of ops with start and end times.

D: pipelines, M: micro-batches of the pipeline with the most, P: chunks (one a stage unless the problem says otherwise),
3: the kinds F, B, W, n: ops.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from swift.schedules.ops import NO_MICROBATCH, Kind, Op, TimedOp
from swift.schedules.problem import Problem
from swift.topology import Worker


@dataclass(frozen=True, eq=False)
class Round:
    """One iteration of a repeating schedule: the decisions of a planner.

    Attributes:
        executor_DMP: pipeline whose worker of chunk p runs that chunk of micro-batch (d, m); -1 where pipeline d has no
            such micro-batch.
        start_3DMP: start of its F, B and W; NaN where there is none.
        update_P: start of a chunk's U, on all live workers that hold it at once.
        period: time after which the next iteration repeats the same ops.
    """

    executor_DMP: np.ndarray
    start_3DMP: np.ndarray
    update_P: np.ndarray
    period: float

    def repeated(self, num_pipelines: int) -> "Round":
        """Repeats a single pipeline's round for all pipelines, which are alike without failures."""
        _, M, P = self.executor_DMP.shape
        executor_DMP = np.broadcast_to(np.arange(num_pipelines, dtype=np.int32)[:, None, None], (num_pipelines, M, P))
        start_3DMP = np.broadcast_to(self.start_3DMP, (3, num_pipelines, M, P))
        return Round(executor_DMP, start_3DMP, self.update_P, self.period)


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """All ops of a window, one row each, sorted by worker, iteration and start: the order in which workers run them.

    Validity is not guaranteed: ``verify`` checks that the rows are a valid schedule of the problem.

    Attributes:
        problem: problem that is scheduled.
        solver: name of the planner.
        worker: int32[n], d * (number of stages) + p of the worker that runs the op.
        kind, iteration, pipeline, microbatch, chunk: int32[n], the fields of ``Op``.
        start, end: float64[n], in the unit of the costs.
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
        """Makes a schedule of the given ops, sorted."""
        rows = [(*worker, *op, start, end) for op, worker, start, end in ops]
        columns = np.array(rows, np.float64).reshape(len(rows), 9).T
        d, p, *names = columns[:7].astype(np.int32)
        return _ordered(problem, solver, [d * problem.num_stages + p, *names], columns[7], columns[8])

    @classmethod
    def from_round(cls, problem: Problem, solver: str, one: Round) -> "Schedule":
        """Makes a schedule that repeats ``one`` for every iteration of the window."""
        exists_DMP = one.executor_DMP >= 0
        kind, d, m, p = (axis[:, exists_DMP].ravel() for axis in np.indices((3, *exists_DMP.shape), np.int32))
        worker = problem.worker_DP[one.executor_DMP[d, m, p], p]
        start = one.start_3DMP[:, exists_DMP].ravel()
        updates = [(d, k) for d, stage in problem.live_workers for k in problem.held_by((d, stage))]
        update_d, update_p = np.array(updates, np.int32).reshape(-1, 2).T
        update_start = one.update_P[update_p]
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
        shift = iteration * one.period
        return _ordered(problem, solver, [worker, kind, iteration, d, m, p], start + shift, end + shift)

    @classmethod
    def planned(cls, problem: Problem, solver: str, plan: Callable[[Problem], Round]) -> "Schedule":
        """Makes a schedule of the round that ``plan`` finds; without failures, of one pipeline repeated for all."""
        if problem.failed or not problem.is_alike:
            return cls.from_round(problem, solver, plan(problem))
        return cls.from_round(problem, solver, plan(problem.single_pipeline()).repeated(problem.num_pipelines))

    @property
    def num_ops(self) -> int:
        """Number of ops, n."""
        return len(self.start)

    @cached_property
    def bounds(self) -> np.ndarray:
        """Row bounds, int64[D * P + 1]: the rows of worker w are ``bounds[w]:bounds[w + 1]``."""
        return np.searchsorted(self.worker, np.arange(self.problem.num_pipelines * self.problem.num_stages + 1))

    @cached_property
    def row_3KDMP(self) -> np.ndarray:
        """Row of every F, B and W, int64[3, K, D, M, P], P chunks; -1 where there is none."""
        problem, is_fbw = self.problem, self.kind != Kind.U
        shape = (problem.num_iterations, problem.num_pipelines, problem.most_microbatches, problem.num_chunks)
        row_3KDMP = np.full((3, *shape), -1, np.int64)
        names = (self.kind, self.iteration, self.pipeline, self.microbatch, self.chunk)
        row_3KDMP[tuple(name[is_fbw] for name in names)] = np.flatnonzero(is_fbw)
        return row_3KDMP

    @property
    def rows_of_microbatches(self) -> np.ndarray:
        """``row_3KDMP`` of the micro-batches that there are, int64[3, K, number of them, P]."""
        exists_DM = np.arange(self.problem.most_microbatches) < np.array(self.problem.microbatches)[:, None]
        return self.row_3KDMP[:, :, exists_DM]

    def ops(self) -> Iterator[TimedOp]:
        """Yields all ops, worker by worker, each worker's in its order."""
        P = self.problem.num_stages
        columns = (self.worker, self.kind, self.iteration, self.pipeline, self.microbatch, self.chunk)
        for (w, kind, *names), start, end in zip(
            np.stack(columns, axis=1).tolist(), self.start.tolist(), self.end.tolist(), strict=True
        ):
            yield TimedOp(Op(Kind(kind), *names), divmod(w, P), start, end)

    def ops_of(self, worker: Worker) -> list[TimedOp]:
        """Lists the ops of one worker, in its order."""
        return [timed for timed in self.ops() if timed.worker == worker]


def _ordered(problem: Problem, solver: str, names: list[np.ndarray], start: np.ndarray, end: np.ndarray) -> Schedule:
    # A U of zero duration starts when the previous W ends, and the next iteration's F starts at the same time.
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
