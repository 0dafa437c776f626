"""Exact planner for problems where stages hold several chunks, chunks differ in costs, or pipelines differ.

Here neither micro-batches nor workers are interchangeable. For each op, each worker that could run it and each slot, a
column therefore tells whether the op has started by that slot. This is exact, but far larger than the models in
``model``. It suits small problems, as an oracle for other planners.

Shape suffixes: D pipelines, M micro-batches (the maximum over pipelines), P chunks, T slots, 4 the kinds F, B, W, U.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from swift.errors import SettingError
from swift.schedules.milp.model import ONE, MixedIntegerProgram, Refuted, Terms, Undecided, at
from swift.schedules.planners.list_scheduling import microbatch_ids
from swift.schedules.problem import NO_MICROBATCH, Kind, Problem
from swift.schedules.schedule import Round, Schedule, period
from swift.schedules.sequences import SequencedOp, time_round

F, B, W, U = Kind
_MAX_COLUMNS, _LARGEST_DENOMINATOR, _SAME = 30_000, 100, 1e-9

_Ran = tuple[Kind, int, int, int]
"""(kind, micro-batch, chunk, pipeline whose worker runs the op)."""


@dataclass(frozen=True, eq=False)
class ChunkGrid:
    """Costs in whole slots.

    Attributes:
        slot: length of a slot, in the time unit of the costs.
        time_4P: op times in slots, by kind and chunk, int64[4, P].
        comm: time of a message in slots.
    """

    slot: float
    time_4P: np.ndarray
    comm: int

    @classmethod
    def of(cls, problem: Problem) -> "ChunkGrid":
        """Finds the longest slot that divides all costs.

        Raises:
            SettingError: the costs are not multiples of a common slot that is long enough.
        """
        times = np.append(problem.time_4P.ravel(), problem.costs.t_comm)
        unit = times[times > 0].min()
        shares = [Fraction(time / unit).limit_denominator(_LARGEST_DENOMINATOR) for time in times]
        if any(abs(share * unit - time) > 1e-9 * time for share, time in zip(shares, times, strict=True)):
            raise SettingError("solver", "milp", "needs times that are multiples of a common unit: use adaptive")
        common = math.lcm(*(share.denominator for share in shares))
        whole = [int(share * common) for share in shares]
        factor = math.gcd(*whole)
        slots = np.array(whole) // factor
        return cls(unit * factor / common, slots[:-1].reshape(problem.time_4P.shape), int(slots[-1]))


def _fit_chunks(problem: Problem, grid: ChunkGrid, slots_of: Sequence[int], time_limit_s: float) -> Round:
    """Finds a round in which no worker takes more than its slots, from its first op to the end of its last U.

    Args:
        problem: problem to plan.
        grid: costs of the problem in slots.
        slots_of: largest number of slots for each live worker.
        time_limit_s: time limit for the solver, in seconds.

    Raises:
        Refuted: no such round exists.
        Undecided: time ran out.
        SettingError: the problem is too large.
    """
    return _Model(problem, grid, slots_of).solve(time_limit_s)


class _Model:
    def __init__(self, problem: Problem, grid: ChunkGrid, slots_of: Sequence[int]):
        self.problem, self.grid, self.names = problem, grid, microbatch_ids(problem)
        self.rows = MixedIntegerProgram()
        self.workers = {
            d * problem.num_stages + p: slots for (d, p), slots in zip(problem.live_workers, slots_of, strict=True)
        }
        longest, C = max(slots_of), problem.num_chunks
        # A worker begins after its neighbor by less than the neighbor's slots: it has to send gradients back in time.
        self.end = longest if problem.begins_together else longest * C
        self.slots_T = np.arange(self.end)
        kinds = (F, B, W) if problem.decoupled else (F, B)
        size = len(kinds) * len(self.names) * sum(map(len, problem.survivors)) * self.end
        if size > _MAX_COLUMNS:
            raise SettingError("solver", "milp", "too large to prove an optimum: use adaptive")
        self.begun = {w: self.rows.add_count(1, 0, self.latest_begin, ONE, self.end) for w in self.workers}
        self.chosen: dict[tuple[int, int, int], int] = {}
        self.started: dict[_Ran, np.ndarray] = {}
        for j in range(len(self.names)):
            for k, peers in enumerate(problem.survivors):
                self.add_ops(j, k, peers)
        self.updated = [self.rows.add_count(1, 0, self.end, ONE, self.end) for _ in range(C)]
        for w in self.workers:
            self.hold_to_window(w)
            self.hold_to_memory(w)
        for j in range(len(self.names)):
            self.hold_to_precedence(j)
        self.hold_updates()
        self.break_symmetry()

    @property
    def latest_begin(self) -> int:
        return 0 if self.problem.begins_together else self.end - 1

    def time(self, kind: Kind, k: int) -> int:
        """Returns the slots that an op takes; without decoupling, B includes W."""
        fused = self.grid.time_4P[W, k] if kind == B and not self.problem.decoupled else 0
        return int(self.grid.time_4P[kind, k] + fused)

    def add_ops(self, j: int, k: int, peers: tuple[int, ...]) -> None:
        """Adds columns for the choice of a worker, and for whether each candidate has started each op by a slot."""
        chosen = self.rows.add_columns(1, len(peers))
        self.rows.add([(1, [column]) for column in chosen], 1, 1)
        first_f = sum(self.time(F, q) for q in range(k))
        first_b = sum(self.time(F, q) for q in range(k, self.problem.num_chunks)) + first_f
        first_b += sum(self.time(B, q) for q in range(k + 1, self.problem.num_chunks))
        for d, column in zip(peers, chosen.tolist(), strict=True):
            self.chosen[j, k, d] = column
            for kind in (F, B, W) if self.problem.decoupled else (F, B):
                first = first_f if kind == F else first_b + (self.time(B, k) if kind == W else 0)
                last = self.end - self.time(kind, k)
                self.started[kind, j, k, d] = self.rows.add_count(1, first, last, column, self.end)

    def worker_ops(self, w: int) -> list[tuple[Kind, int, np.ndarray]]:
        """Lists all ops that a worker could run, as (kind, chunk, columns)."""
        stage_DP, S = self.problem.worker_DP, self.problem.num_stages
        pipeline_ops = [(ran, columns) for ran, columns in self.started.items() if ran[3] == w // S]
        return [(kind, k, columns) for (kind, _, k, d), columns in pipeline_ops if stage_DP[d, k] == w]

    def hold_to_window(self, w: int) -> None:
        """Adds rows: a worker runs one op at a time, and all its ops within its slots."""
        slots_T, begun, slots = self.slots_T, self.begun[w], self.workers[w]
        # In every slot: running ops <= 1 between the worker's beginning and the end of its slots, else 0.
        terms: Terms = [(-1.0, at(begun, slots_T)), (1.0, at(begun, slots_T - slots))]
        ops = self.worker_ops(w)
        chunks = self.problem.held_by(divmod(w, self.problem.num_stages))
        for kind, k, columns in [*ops, *((U, k, self.updated[k]) for k in chunks)]:
            terms += [(1.0, at(columns, slots_T)), (-1.0, at(columns, slots_T - self.time(kind, k)))]
        self.rows.add(terms, -math.inf, 0)
        for k in chunks:
            due_T = np.clip(slots_T + slots - self.time(U, k), 0, self.end)
            self.rows.add([(1, at(begun, slots_T)), (-1, at(self.updated[k], due_T))], -math.inf, 0)
            self.rows.add([(1, at(self.updated[k], slots_T)), (-1, at(begun, slots_T))], -math.inf, 0)

    def hold_to_memory(self, w: int) -> None:
        limit, slots_T = self.problem.memory_limit, self.slots_T
        terms: Terms = []
        if limit is None:
            return
        for kind, k, columns in self.worker_ops(w):
            f_stash, w_stash = (float(stash) / limit for stash in self.problem.stash_2P[:, k])
            most = max(f_stash, w_stash)
            shrunk = slots_T - int(self.grid.time_4P[B, k])
            if kind == F:
                terms.append((f_stash, at(columns, slots_T)))
            elif kind == B:
                terms += [(most - f_stash, at(columns, slots_T)), (w_stash - most, at(columns, shrunk))]
            if kind == W or (kind == B and not self.problem.decoupled):
                terms.append((-w_stash, at(columns, slots_T - self.time(kind, k))))
        if terms:
            self.rows.add(terms, -math.inf, 1 + 1e-9)

    def hold_to_precedence(self, j: int) -> None:
        problem, C = self.problem, self.problem.num_chunks
        for k, peers in enumerate(problem.survivors):
            for d in peers:
                self.follow(F, k, [d], (B, j, k, d))
                if problem.decoupled:
                    self.follow(B, k, [d], (W, j, k, d))
                if k:
                    self.follow(F, k - 1, problem.survivors[k - 1], (F, j, k, d))
                if k + 1 < C:
                    self.follow(B, k + 1, problem.survivors[k + 1], (B, j, k, d))

    def follow(self, kind: Kind, k: int, senders: Sequence[int], reader: _Ran) -> None:
        """Adds rows: an op starts only after its input has arrived from the worker that computes it."""
        j, worker_DP = reader[1], self.problem.worker_DP
        terms: Terms = [(1.0, at(self.started[reader], self.slots_T))]
        for d in senders:
            is_sent = worker_DP[d, k] != worker_DP[reader[3], reader[2]]
            lag = self.time(kind, k) + self.grid.comm * int(is_sent)
            terms.append((-1.0, at(self.started[kind, j, k, d], self.slots_T - lag)))
        self.rows.add(terms, -math.inf, 0)

    def hold_updates(self) -> None:
        """Adds rows: a chunk's Us follow its last W or, without staggering, the last W of all chunks."""
        problem, last = self.problem, W if self.problem.decoupled else B
        for k, updated in enumerate(self.updated):
            for q, peers in enumerate(problem.survivors):
                if q == k or not problem.staggered:
                    ended_T = self.slots_T - self.time(last, q)
                    for j in range(len(self.names)):
                        terms: Terms = [(-1.0, at(self.started[last, j, q, d], ended_T)) for d in peers]
                        self.rows.add([(1.0, at(updated, self.slots_T)), *terms], -math.inf, 0)

    def break_symmetry(self) -> None:
        # A pipeline's micro-batches are interchangeable: requiring them to start in order removes equivalent solutions.
        for j in range(len(self.names) - 1):
            if self.names[j][0] == self.names[j + 1][0]:
                peers, slots_T = self.problem.survivors[0], self.slots_T
                terms: Terms = [(-1.0, at(self.started[F, j, 0, d], slots_T)) for d in peers]
                terms += [(1.0, at(self.started[F, j + 1, 0, d], slots_T)) for d in peers]
                self.rows.add(terms, -math.inf, 0)

    def solve(self, time_limit_s: float) -> Round:
        values_n = self.rows.solve(time_limit_s)
        starts = {ran: int(np.argmax(values_n[columns] > 0.5)) for ran, columns in self.started.items()}
        chosen = {ran: start for ran, start in starts.items() if values_n[self.chosen[ran[1:]]] > 0.5}
        updates = [int(np.argmax(values_n[columns] > 0.5)) for columns in self.updated]
        return self.as_round(chosen, updates)

    def as_round(self, starts: Mapping[_Ran, int], updates: Sequence[int]) -> Round:
        """Builds a round whose ops are in the order of ``starts``; each op starts as early as its exact costs allow."""
        problem, S = self.problem, self.problem.num_stages
        executor_DMP = np.full((problem.num_pipelines, problem.most_microbatches, problem.num_chunks), -1, np.int32)
        items: list[tuple[int, bool, int, int, SequencedOp]] = []
        for (kind, j, k, d), start in starts.items():
            executor_DMP[(*self.names[j], k)] = d
            w = int(problem.worker_DP[d, k])
            items.append((start, True, k, w, (kind, *self.names[j], k)))
            if kind == B and not problem.decoupled:
                items.append((start + int(self.grid.time_4P[B, k]), True, k, w, (W, *self.names[j], k)))
        for d, p in problem.live_workers:
            chunks = problem.held_by((d, p))
            items += [(updates[k], False, k, d * S + p, (U, d, NO_MICROBATCH, k)) for k in chunks]
        sequences: list[list[SequencedOp]] = [[] for _ in range(problem.num_pipelines * S)]
        busy = {item[3] for item in items if item[1]}
        for _, _, _, w, op in sorted(items):
            if w in busy:
                sequences[w].append(op)
        return time_round(problem, executor_DMP, sequences)


def prove_chunks(problem: Problem, first: Schedule, bound: float, deadline: float) -> tuple[Schedule, float]:
    """Narrows the gap between a schedule's period and a lower bound until they are equal or time runs out.

    Args:
        problem: problem to plan.
        first: schedule of the problem to start from.
        bound: lower bound on the period to start from.
        deadline: time at which to stop, on the clock of ``time.monotonic``.

    Returns:
        The best schedule and the best lower bound found.

    Raises:
        SettingError: the problem is too large, or its times have no common unit.
    """
    search = _Search(problem, first, bound, deadline)
    with suppress(Undecided):  # returns the best schedule and bound so far
        search.exclude_parts_of_slots(search.narrow())
    return search.schedule, search.bound


class _Search:
    def __init__(self, problem: Problem, first: Schedule, bound: float, deadline: float):
        self.problem, self.schedule, self.bound, self.deadline = problem, first, bound, deadline
        self.grid, self.num_workers = ChunkGrid.of(problem), len(problem.live_workers)

    def narrow(self) -> int:
        """Finds the smallest number of slots that suffices for every worker."""
        low = 1
        while True:
            least, most = self.bound / self.grid.slot, period(self.schedule) / self.grid.slot
            low, high = max(low, math.ceil(least * (1 - _SAME))), math.ceil(most * (1 - _SAME))
            if low >= high:
                if self.problem.begins_together:  # then the period is a whole number of slots
                    self.raise_bound(low)
                return low
            probe = (low + high - 1) // 2
            if not self.fits([probe] * self.num_workers):
                low = probe + 1
                # With staggering the period is a mean over a cycle of workers: a multiple of 1 / (length of the cycle).
                self.raise_bound(probe + (1 if self.problem.begins_together else 1 / self.num_workers))

    def exclude_parts_of_slots(self, low: int) -> None:
        """Proves that no period between ``low`` - 1 and ``low`` slots exists, as ``milp_proof`` does."""
        for worker in range(self.num_workers):
            if period(self.schedule) <= self.bound * (1 + _SAME):
                return
            if not self.fits([low - (other == worker) for other in range(self.num_workers)]):
                self.raise_bound(low)

    def raise_bound(self, slots: float) -> None:
        self.bound = max(self.bound, slots * self.grid.slot)

    def fits(self, slots_of: Sequence[int]) -> bool:
        """Returns whether each worker can stay within its slots; keeps the schedule found if it is shorter."""
        limit_s = self.deadline - time.monotonic()
        if limit_s <= 0:
            raise Undecided
        try:
            iteration_plan = _fit_chunks(self.problem, self.grid, slots_of, limit_s)
        except Refuted:
            return False
        schedule = Schedule.from_round(self.problem, "milp", iteration_plan)
        if period(schedule) < period(self.schedule):
            self.schedule = schedule
        return True
