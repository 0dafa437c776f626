"""Verification of schedules; each rule is a generator that yields violations.

This module deliberately shares no code with the planners or with ``peak_memory``, so that a mistake there is not
repeated here.

Shape suffixes: 3 the kinds F, B, W, K iterations, D pipelines, M micro-batches (the maximum over pipelines), P chunks,
n ops.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from swift.schedules.problem import NO_MICROBATCH, Kind, Problem
from swift.schedules.schedule import Schedule

COLUMNS = ("worker", "kind", "iteration", "pipeline", "microbatch", "chunk")

MAX_LISTED = 20
MAX_OF_A_RULE = 4


@dataclass(frozen=True, eq=False)
class OpTable:
    """Times and workers of a schedule's ops, as arrays indexed by op.

    Missing ops have NaN as times and -1 as worker. If an op occurs several times, the last row counts.
    """

    schedule: Schedule
    tolerance: float
    start_3KDMP: np.ndarray
    end_3KDMP: np.ndarray
    worker_3KDMP: np.ndarray
    update_start_KDP: np.ndarray
    update_end_KDP: np.ndarray

    @classmethod
    def of(cls, schedule: Schedule) -> "OpTable":
        """Builds the table; the schedule's columns must be well-formed (see ``_malformed_columns``)."""
        shape = K, D, _, P = _problem_shape(schedule.problem)
        is_u = schedule.kind == Kind.U
        ops = tuple(getattr(schedule, name)[~is_u] for name in COLUMNS[1:])
        updates = tuple(getattr(schedule, name)[is_u] for name in ("iteration", "pipeline", "chunk"))
        start_3KDMP, end_3KDMP = np.full((2, 3, *shape), np.nan)
        worker_3KDMP = np.full((3, *shape), -1, np.int32)
        update_start_KDP, update_end_KDP = np.full((2, K, D, P), np.nan)
        start_3KDMP[ops], end_3KDMP[ops] = schedule.start[~is_u], schedule.end[~is_u]
        worker_3KDMP[ops] = schedule.worker[~is_u]
        update_start_KDP[updates], update_end_KDP[updates] = schedule.start[is_u], schedule.end[is_u]
        return cls(
            schedule, _tolerance(schedule), start_3KDMP, end_3KDMP, worker_3KDMP, update_start_KDP, update_end_KDP
        )

    @property
    def problem(self) -> Problem:
        """Problem that the schedule is for."""
        return self.schedule.problem

    def row(self, row: np.integer) -> str:
        """Describes the op in a row of the schedule, for messages."""
        return self.name(*(int(getattr(self.schedule, name)[row]) for name in COLUMNS[1:]))

    def name(self, kind: int, k: int, d: int, m: int, p: int) -> str:
        """Describes an op for messages, by stage in a plain problem and by chunk otherwise."""
        is_plain, where = self.problem.is_plain, f"at {'stage' if self.problem.is_plain else 'chunk'} {p}"
        if kind == Kind.U:
            chunk_text = "" if is_plain else f" for chunk {p}"
            return f"U of worker {d}:{self.problem.stage_DP[d, p]}{chunk_text}, iteration {k}"
        return f"{Kind(kind).name} of micro-batch {d}:{m} {where}, iteration {k}"


def _problem_shape(problem: Problem) -> tuple[int, int, int, int]:
    """Returns (iterations, pipelines, micro-batches, chunks): K, D, M, P."""
    return problem.num_iterations, problem.num_pipelines, problem.most_microbatches, problem.num_chunks


def _tolerance(schedule: Schedule) -> float:
    # Capped by a fraction of the shortest op: in a very long schedule 1e-9 of the makespan may exceed a whole op.
    shortest = float(schedule.problem.time_4P[: Kind.U].min())
    return min(1e-9 * float(schedule.end.max(initial=0.0)), 1e-3 * shortest)


def _counts(table: OpTable) -> Iterator[str]:
    schedule, is_fbw = table.schedule, table.schedule.kind != Kind.U
    count_3KDMP = np.zeros((3, *_problem_shape(table.problem)), np.int32)
    np.add.at(count_3KDMP, tuple(getattr(schedule, name)[is_fbw] for name in COLUMNS[1:]), 1)
    exists_DM = np.arange(table.problem.most_microbatches) < np.array(table.problem.microbatches)[:, None]
    for op in np.argwhere((count_3KDMP != 1) & exists_DM[:, :, None]):
        yield f"{table.name(*op)} {_times(count_3KDMP[tuple(op)])}"


def _update_counts(table: OpTable) -> Iterator[str]:
    schedule, is_u, (K, D, _, P) = table.schedule, table.schedule.kind == Kind.U, _problem_shape(table.problem)
    count_KDP = np.zeros((K, D, P), np.int32)
    np.add.at(count_KDP, tuple(getattr(schedule, name)[is_u] for name in ("iteration", "pipeline", "chunk")), 1)
    live_DP = _live(table.problem)[table.problem.worker_DP]
    for k, d, p in np.argwhere((count_KDP > 1) | ((count_KDP == 0) & live_DP)):
        yield f"{table.name(Kind.U, k, d, NO_MICROBATCH, p)} {_times(count_KDP[k, d, p])}"


def _times(count: int) -> str:
    return f"occurs {count} times" if count else "is missing"


def _live(problem: Problem) -> np.ndarray:
    live = np.ones(problem.num_pipelines * problem.num_stages, bool)
    live[[d * problem.num_stages + p for d, p in problem.failed]] = False
    return live


def _workers(table: OpTable) -> Iterator[str]:
    schedule, P = table.schedule, table.problem.num_stages
    d_n, p_n = np.divmod(schedule.worker, P)
    down_n = ~_live(table.problem)[schedule.worker]
    other_n = (p_n != table.problem.stage_DP[d_n, schedule.chunk]) | (
        (schedule.kind == Kind.U) & (d_n != schedule.pipeline)
    )
    for row in np.flatnonzero(down_n | other_n):
        where = f"{table.row(row)} runs on worker {d_n[row]}:{p_n[row]}"
        yield f"{where}, which has failed" if down_n[row] else f"{where}, not its own"


def _same_workers(table: OpTable) -> Iterator[str]:
    # F, B and W share a stash, which stays on the worker where F wrote it.
    for kind in (Kind.B, Kind.W):
        worker_KDMP, previous_KDMP = table.worker_3KDMP[kind], table.worker_3KDMP[kind - 1]
        for op in np.argwhere((worker_KDMP != previous_KDMP) & (worker_KDMP >= 0) & (previous_KDMP >= 0)):
            d, p = divmod(int(worker_KDMP[tuple(op)]), table.problem.num_stages)
            yield f"{table.name(kind, *op)} runs on worker {d}:{p}, its {Kind(kind - 1).name} on another"


def _durations(table: OpTable) -> Iterator[str]:
    schedule = table.schedule
    cost_n = table.problem.time_4P[schedule.kind, schedule.chunk]
    wrong_n = np.abs(schedule.end - schedule.start - cost_n) > table.tolerance
    for row in np.flatnonzero(wrong_n):
        duration = schedule.end[row] - schedule.start[row]
        yield f"{table.row(row)} takes {duration:.9g} instead of {cost_n[row]:.9g}"
    for row in np.flatnonzero(schedule.start < -table.tolerance):
        yield f"{table.row(row)} starts at {schedule.start[row]:.9g}, before 0"


def _order(table: OpTable) -> Iterator[str]:
    worker, iteration, start = (np.diff(getattr(table.schedule, name)) for name in ("worker", "iteration", "start"))
    within = (iteration < 0) | ((iteration == 0) & (start < 0))
    for row in np.flatnonzero((worker < 0) | ((worker == 0) & within)):
        yield f"{table.row(row + 1)} is listed after {table.row(row)}, out of its worker's order"


def _overlap(table: OpTable) -> Iterator[str]:
    # A U of zero duration does not occupy its worker: it may fall inside another chunk's op.
    schedule, start, end = table.schedule, table.schedule.start, table.schedule.end
    busy = np.flatnonzero((schedule.kind != Kind.U) | (table.problem.time_4P[Kind.U, schedule.chunk] > 0))
    order = busy[np.lexsort((start[busy], schedule.worker[busy]))]
    same = np.diff(schedule.worker[order]) == 0
    for i in np.flatnonzero(same & (end[order][:-1] > start[order][1:] + table.tolerance)):
        first, second = order[i], order[i + 1]
        yield (
            f"{table.row(second)} starts at {start[second]:.9g} on the same worker as {table.row(first)}, "
            f"which ends at {end[first]:.9g}"
        )


def _iterations_apart(table: OpTable) -> Iterator[str]:
    schedule, K = table.schedule, table.problem.num_iterations
    index = schedule.worker.astype(np.int64) * K + schedule.iteration
    size = table.problem.num_pipelines * table.problem.num_stages * K
    first, last = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(first, index, schedule.start)
    np.maximum.at(last, index, schedule.end)
    first_wK, last_wK = first.reshape(-1, K), last.reshape(-1, K)
    for w, k in np.argwhere(first_wK[:, 1:] < last_wK[:, :-1] - table.tolerance):
        d, p = divmod(int(w), table.problem.num_stages)
        yield (
            f"worker {d}:{p} begins iteration {k + 1} at {first_wK[w, k + 1]:.9g}, before it ends iteration {k} "
            f"at {last_wK[w, k]:.9g}"
        )


def _precedence(table: OpTable) -> Iterator[str]:
    problem, P, lag = table.problem, table.problem.num_chunks, table.problem.costs.t_comm
    back = Kind.B if problem.decoupled else Kind.W
    # (kind to wait for, kind that waits, chunk of the former minus chunk of the latter, message time between workers)
    for first, second, shift, gap in (
        (Kind.F, Kind.F, -1, lag),
        (Kind.F, Kind.B, 0, 0.0),
        (back, Kind.B, 1, lag),
        (Kind.B, Kind.W, 0, 0.0),
    ):
        from_stage, to_stage = max(0, -shift), P - max(0, shift)
        read, reads = slice(from_stage + shift, to_stage + shift), slice(from_stage, to_stage)
        is_sent_KDMP = table.worker_3KDMP[first][..., read] != table.worker_3KDMP[second][..., reads]
        ready_KDMP = table.end_3KDMP[first][..., read] + gap * is_sent_KDMP
        start_KDMP = table.start_3KDMP[second][..., reads]
        for k, d, m, i in np.argwhere(start_KDMP < ready_KDMP - table.tolerance):
            p = from_stage + i
            yield (
                f"{table.name(second, k, d, m, p)} starts at {start_KDMP[k, d, m, i]:.9g}, before the output of "
                f"{table.name(first, k, d, m, p + shift)} arrives at {ready_KDMP[k, d, m, i]:.9g}"
            )


def _fused_backward(table: OpTable) -> Iterator[str]:
    if not table.problem.decoupled:
        wait_KDMP = table.start_3KDMP[Kind.W] - table.end_3KDMP[Kind.B]
        for op in np.argwhere(np.abs(wait_KDMP) > table.tolerance):
            yield f"{table.name(Kind.W, *op)} does not follow its B immediately, which only a decoupled backward allows"


def _updates(table: OpTable) -> Iterator[str]:
    last_W_KP = np.fmax.reduce(table.end_3KDMP[Kind.W], axis=(1, 2), initial=-np.inf)
    if not table.problem.staggered:
        last_W_KP = np.broadcast_to(last_W_KP.max(axis=1, keepdims=True), last_W_KP.shape)
    subject = ("its stage" if table.problem.is_plain else "its chunk") if table.problem.staggered else "all stages"
    starts = table.update_start_KDP
    for k, d, p in np.argwhere(starts < last_W_KP[:, None] - table.tolerance):
        yield (
            f"{table.name(Kind.U, k, d, NO_MICROBATCH, p)} starts at {starts[k, d, p]:.9g}, before the last W of "
            f"{subject} ends at {last_W_KP[k, p]:.9g}"
        )


def _peers(table: OpTable) -> Iterator[str]:
    # Peers reduce their gradients in one collective, so none can update alone.
    starts = table.update_start_KDP
    first_KP = np.fmin.reduce(starts, axis=1)
    for k, d, p in np.argwhere(starts > first_KP[:, None] + table.tolerance):
        yield (
            f"{table.name(Kind.U, k, d, NO_MICROBATCH, p)} starts at {starts[k, d, p]:.9g}, "
            f"that of a peer at {first_KP[k, p]:.9g}"
        )


def _next_iteration(table: OpTable) -> Iterator[str]:
    updated_KP = np.fmax.reduce(table.update_end_KDP, axis=1)
    start_KDMP = table.start_3KDMP[Kind.F][1:]
    for k, d, m, p in np.argwhere(start_KDMP < updated_KP[:-1, None, None] - table.tolerance):
        yield (
            f"{table.name(Kind.F, k + 1, d, m, p)} starts at {start_KDMP[k, d, m, p]:.9g}, before U of iteration {k} "
            f"ends at {updated_KP[k, p]:.9g}"
        )


def _memory(table: OpTable) -> Iterator[str]:
    limit, P = table.problem.memory_limit, table.problem.num_stages
    if limit is None:
        return
    worker, since, until, size = (np.concatenate(column) for column in zip(*_holdings(table), strict=True))
    # At equal times, memory is freed before it is allocated: an op may reuse memory of an op that ends as it starts.
    time = np.concatenate([since, until - table.tolerance])
    worker, change = np.tile(worker, 2), np.concatenate([size, -size])
    order = np.lexsort((time, worker))
    # Each holding adds and subtracts the same size on one worker, so the cumulative sum returns to 0 between workers.
    live_memory = np.cumsum(change[order])
    above = order[live_memory > limit * (1 + 1e-9)]
    for w in np.unique(worker[above]):
        t = time[above][worker[above] == w].min()
        yield f"worker {w // P}:{w % P} exceeds the memory limit of {limit:g} at {t:.9g}"


def _holdings(table: OpTable) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the intervals during which memory is held, as arrays: worker, start, end, size."""
    problem, start, end, worker = table.problem, table.start_3KDMP, table.end_3KDMP, table.worker_3KDMP
    F, B, W = Kind.F, Kind.B, Kind.W
    sent = end[B] if problem.decoupled else end[W]
    (f_stash_P, w_stash_P), inbox_P = problem.stash_2P, np.full(problem.num_chunks - 1, problem.costs.inbox)
    nobody = np.full_like(worker[F], -1)
    for size_P, sender, reader, since, until in (
        (f_stash_P, nobody, worker[F], start[F], start[B]),
        (np.maximum(f_stash_P, w_stash_P), nobody, worker[B], start[B], end[B]),
        (w_stash_P, nobody, worker[W], end[B], end[W]),
        (inbox_P, worker[F][..., :-1], worker[F][..., 1:], end[F][..., :-1], end[F][..., 1:]),
        (inbox_P, worker[B][..., 1:], worker[B][..., :-1], sent[..., 1:], end[B][..., :-1]),
    ):
        # Missing ops, and ops that run before their input arrives, are reported by other rules.
        known = (reader >= 0) & (reader != sender) & (until > since)
        yield reader[known], since[known], until[known], np.broadcast_to(size_P, known.shape)[known]


RULES: tuple[Callable[[OpTable], Iterator[str]], ...] = (
    _counts,
    _update_counts,
    _workers,
    _same_workers,
    _durations,
    _order,
    _overlap,
    _iterations_apart,
    _precedence,
    _fused_backward,
    _updates,
    _peers,
    _next_iteration,
    _memory,
)


class ScheduleError(ValueError):
    """A schedule violates the rules of its problem; the message lists the first violations."""


def verify(schedule: Schedule) -> None:
    """Checks a schedule against the rules of its problem.

    Raises:
        ScheduleError: the schedule violates a rule; see ``violations`` for the rules.
    """
    broken_rules = violations(schedule)
    if broken_rules:
        raise ScheduleError(f"the schedule of {schedule.solver} is not valid: {'; '.join(broken_rules[:3])}")


def violations(schedule: Schedule) -> list[str]:
    """Lists the rules that a schedule violates: at most 20 violations, at most 4 per rule, one sentence each.

    The list of a valid schedule is empty. The rules are:

    - Each micro-batch has one F, B and W per iteration at each chunk, all on one live worker that holds the chunk. Each
      live worker has one U per iteration for each of its chunks.
    - The duration of an op is exactly its cost, a worker's ops do not overlap, its iterations do not overlap, and its
      rows are in order.
    - F waits for the F of the previous chunk, B for the B of the next chunk and for its own F, and W for its B. Between
      different workers the message time is added. Without decoupling, B waits for the next chunk's W, and W follows its
      own B immediately.
    - U waits for the chunk's last W (without staggering, for the last W of all chunks), and the next iteration's F
      waits for U. Peers update at the same time.
    - No worker exceeds the memory limit.

    Times that differ by at most 1e-9 of the makespan, or 1e-3 of the shortest op if that is less, count as equal.
    """
    # Finite but huge times, as in a damaged file, may overflow in differences; the rules then report them.
    with np.errstate(over="ignore", invalid="ignore"):
        malformed = list(_malformed_columns(schedule)) or list(islice(_unknown_rows(schedule), MAX_LISTED))
        if malformed:
            return malformed
        table = OpTable.of(schedule)
        rule_violations = (islice(rule(table), MAX_OF_A_RULE) for rule in RULES)
        return list(islice(chain.from_iterable(rule_violations), MAX_LISTED))


def _malformed_columns(schedule: Schedule) -> Iterator[str]:
    num_ops = np.size(schedule.start)
    for name in (*COLUMNS, "start", "end"):
        column = getattr(schedule, name)
        kind, type_text = ("i", "whole numbers") if name in COLUMNS else ("f", "times")
        if not isinstance(column, np.ndarray) or column.dtype.kind != kind or column.shape != (num_ops,):
            yield f"column {name} is not an array of {num_ops} {type_text}"


def _unknown_rows(schedule: Schedule) -> Iterator[str]:
    problem, is_u = schedule.problem, schedule.kind == Kind.U
    K, D, M, P = _problem_shape(problem)
    known_n = np.isfinite(schedule.start) & np.isfinite(schedule.end)
    for name, size in zip(COLUMNS, (D * problem.num_stages, len(Kind), K, D, M, P), strict=True):
        column = getattr(schedule, name)
        known_n &= (column >= 0) & (column < size) | ((name == "microbatch") & is_u & (column == NO_MICROBATCH))
    known_n &= ~is_u | (schedule.microbatch == NO_MICROBATCH)
    # Only for rows that passed so far, since their pipeline is used as an index.
    known_n[known_n] &= schedule.microbatch[known_n] < np.array(problem.microbatches)[schedule.pipeline[known_n]]
    for row in np.flatnonzero(~known_n):
        fields = ", ".join(f"{name} {getattr(schedule, name)[row]}" for name in (*COLUMNS, "start", "end"))
        yield f"row {row} is not an op of the problem: {fields}"
