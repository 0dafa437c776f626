"""Rows of a drawing: one per worker, and only some workers of a large cluster.

n: ops of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swift.schedules.ops import Kind
from swift.schedules.problem import Problem
from swift.schedules.schedule import Schedule
from swift.topology import Worker

MAX_ROWS = 64
MAX_NAMED = 8

KIND_NAMES = {
    Kind.F: "forward",
    Kind.B: "input gradient",
    Kind.W: "weight gradient",
    Kind.U: "update",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """A worker and its ops, in order.

    Attributes:
        worker: worker of the row.
        is_live: False for a failed worker, which has no ops.
        kind_n, iteration_n, microbatch_n: int32[n], as in ``Op``.
        rerouted_n: bool[n], True if the micro-batch is another pipeline's.
        start_n, end_n: float64[n], times in the unit of the costs.
        labels: micro-batch of each op; with its chunk in letters, a for the first, if the worker holds several.
        blocks: blocks that the worker holds, where they are known, such as ``0-3 12-15``.
    """

    worker: Worker
    is_live: bool
    kind_n: np.ndarray
    iteration_n: np.ndarray
    microbatch_n: np.ndarray
    rerouted_n: np.ndarray
    start_n: np.ndarray
    end_n: np.ndarray
    labels: tuple[str, ...]
    blocks: str

    @property
    def title(self) -> str:
        """Name of the worker, and its blocks."""
        return f"{self.name} [{self.blocks}]" if self.blocks else self.name

    @property
    def name(self) -> str:
        """Name of the worker, ``d:p``."""
        return worker_name(self.worker)


def worker_name(worker: Worker) -> str:
    """Formats a worker as ``d:p``, as on the command line."""
    return f"{worker[0]}:{worker[1]}"


def blocks_name(problem: Problem, worker: Worker) -> str:
    """Formats the runs of blocks that a worker holds, such as ``0-3 12-15``; empty where they are not known."""
    return " ".join(f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in problem.runs_of(worker))


def microbatch_names(problem: Problem) -> str:
    """Formats the number of micro-batches of each pipeline."""
    if isinstance(problem.num_microbatches, int):
        return f"{counted(problem.num_microbatches, 'micro-batch')} per pipeline"
    return f"{', '.join(map(str, problem.num_microbatches))} micro-batches"


def chunk_letter(chunk: int) -> str:
    """Formats a chunk as letters: a to z, then aa.

    >>> chunk_letter(0), chunk_letter(27)
    ('a', 'ab')
    """
    later, last = divmod(chunk, 26)
    return (chunk_letter(later - 1) if later else "") + chr(ord("a") + last)


def describe(problem: Problem) -> str:
    """Describes the topology, the work and the failures in one line."""
    parts = (
        f"{counted(problem.num_pipelines, 'pipeline')} x {counted(problem.num_stages, 'stage')}",
        microbatch_names(problem),
        failures(problem),
    )
    return ", ".join(parts)


def failures(problem: Problem) -> str:
    """Lists the failed workers by name, or their number if there are many."""
    if not problem.failed:
        return "no failure"
    if len(problem.failed) > MAX_NAMED:
        return f"{len(problem.failed)} workers failed"
    return f"{' '.join(map(worker_name, sorted(problem.failed)))} failed"


def counted(number: int, name: str) -> str:
    """Formats a number with a noun, such as ``3 pipelines``."""
    plural = "es" if name.endswith("ch") else "s"
    return f"{number:,} {name}{plural if number != 1 else ''}"


def rows_of(schedule: Schedule, workers: Sequence[Worker]) -> list[Row]:
    """Makes the rows of the given workers."""
    return [_row(schedule, worker) for worker in workers]


def shown_workers(problem: Problem) -> list[Worker]:
    """Selects at most ``MAX_ROWS`` workers: failed ones, then their peers, then others; returned in mesh order."""
    failed_stages = {p for _, p in problem.failed}
    by_interest = sorted(
        problem.topology.workers, key=lambda worker: (worker not in problem.failed, worker[1] not in failed_stages)
    )
    return sorted(by_interest[:MAX_ROWS])


def left_out(problem: Problem, workers: Sequence[Worker]) -> str:
    """Describes in a sentence which workers are not shown; empty if all are."""
    num_workers = problem.num_pipelines * problem.num_stages
    if len(workers) == num_workers:
        return ""
    which = "failed workers, their peers, then pipeline by pipeline" if problem.failed else "the first pipelines'"
    return f"{num_workers - len(workers):,} of {num_workers:,} workers are left out; shown are {which}."


def _row(schedule: Schedule, worker: Worker) -> Row:
    d, p = worker
    index = d * schedule.problem.num_stages + p
    ops = slice(int(schedule.bounds[index]), int(schedule.bounds[index + 1]))
    has_several = len(schedule.problem.held_by(worker)) > 1
    names = zip(schedule.microbatch[ops].tolist(), schedule.chunk[ops].tolist(), strict=True)
    labels = tuple(f"{m}{chunk_letter(k) if has_several else ''}" for m, k in names)
    return Row(
        worker=worker,
        is_live=worker not in schedule.problem.failed,
        kind_n=schedule.kind[ops],
        iteration_n=schedule.iteration[ops],
        microbatch_n=schedule.microbatch[ops],
        rerouted_n=schedule.pipeline[ops] != d,
        start_n=schedule.start[ops],
        end_n=schedule.end[ops],
        labels=labels,
        blocks=blocks_name(schedule.problem, worker) if worker not in schedule.problem.failed else "",
    )
