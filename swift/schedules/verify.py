"""Verification of schedules against the rules of their problem, independent of all planners and of ``memory``.

Shape suffixes: K iterations, D pipelines, M micro-batches of the pipeline with the most, P chunks, n ops.
"""

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np

from swift.schedules.ops import NO_MICROBATCH, Kind
from swift.schedules.rules import COLUMNS, RULES, OpTable, problem_shape
from swift.schedules.schedule import Schedule

MAX_LISTED = 20
MAX_OF_A_RULE = 4


class ScheduleError(ValueError):
    """A schedule breaks the rules of its problem; the message names the first ops that do."""


def verify(schedule: Schedule) -> None:
    """Checks a schedule against the rules of its problem.

    Raises:
        ScheduleError: the schedule breaks a rule (see ``violations``).
    """
    found = violations(schedule)
    if found:
        raise ScheduleError(f"the schedule of {schedule.solver} is not valid: {'; '.join(found[:3])}")


def violations(schedule: Schedule) -> list[str]:
    """Lists violations of the rules, one sentence each: at most 20, and at most 4 per rule; empty for a valid schedule.

    Every micro-batch has one F, B and W per iteration at every chunk, all three on one live worker that holds it; every
    live worker has one U for each of its chunks. Ops take their cost, a worker's ops do not overlap, it ends an
    iteration before it begins the next, and its rows are in order. F follows the F of the previous chunk and B the B of
    the next chunk by the message's time, if another worker ran that (without decoupling, B follows W, and W its own B
    immediately), B follows F, W follows B, U follows the last W of the chunk (without staggering, of all chunks), and
    the next iteration's F follows U. Peers update together, and no worker exceeds the memory limit. Times that differ
    by less than 1e-9 of the makespan are equal.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        malformed = list(_malformed_columns(schedule)) or list(islice(_unknown_rows(schedule), MAX_LISTED))
        if malformed:
            return malformed
        table = OpTable.of(schedule)
        found = (islice(rule(table), MAX_OF_A_RULE) for rule in RULES)
        return list(islice(chain.from_iterable(found), MAX_LISTED))


def _malformed_columns(schedule: Schedule) -> Iterator[str]:
    num_ops = np.size(schedule.start)
    for name in (*COLUMNS, "start", "end"):
        column = getattr(schedule, name)
        kind, what = ("i", "whole numbers") if name in COLUMNS else ("f", "times")
        if not isinstance(column, np.ndarray) or column.dtype.kind != kind or column.shape != (num_ops,):
            yield f"column {name} is not an array of {num_ops} {what}"


def _unknown_rows(schedule: Schedule) -> Iterator[str]:
    problem, is_u = schedule.problem, schedule.kind == Kind.U
    K, D, M, P = problem_shape(problem)
    known_n = np.isfinite(schedule.start) & np.isfinite(schedule.end)
    for name, size in zip(COLUMNS, (D * problem.num_stages, len(Kind), K, D, M, P), strict=True):
        column = getattr(schedule, name)
        known_n &= (column >= 0) & (column < size) | ((name == "microbatch") & is_u & (column == NO_MICROBATCH))
    known_n &= ~is_u | (schedule.microbatch == NO_MICROBATCH)
    known_n[known_n] &= schedule.microbatch[known_n] < np.array(problem.microbatches)[schedule.pipeline[known_n]]
    for row in np.flatnonzero(~known_n):
        fields = ", ".join(f"{name} {getattr(schedule, name)[row]}" for name in (*COLUMNS, "start", "end"))
        yield f"row {row} is not an op of the problem: {fields}"
