"""ReCycle's exact planner (arXiv 2405.14009, the planner's MILP) on HiGHS, an oracle for other planners.

It minimizes the period of a repeating iteration over the assignment of micro-batches to workers, the order of all ops,
and the time at which each stage begins. It starts from the schedule of ``adaptive`` and from ``tight_bound``; if the
period equals the bound, the schedule is optimal. Otherwise ``model`` decides whether a period of T slots is possible,
and every answer narrows the gap. Coarse models are solved first and refute most periods; only the exact model yields a
better schedule.

Costs that are multiples of a slot are represented exactly. Other costs are rounded down to slots in the model. The
bound remains valid, and schedules are timed with the exact costs, so the period gets close to the bound but rarely
equals it.

Shape suffixes: D pipelines, M micro-batches of a pipeline, P stages.
"""

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from swift.errors import SettingError
from swift.schedules.bounds import tight_bound
from swift.schedules.milp.chunks import prove_chunks
from swift.schedules.milp.model import Detail, Group, Refuted, SlotCosts, Starts, Undecided, fit, num_columns
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.problem import Kind, Problem
from swift.schedules.schedule import Schedule, period
from swift.schedules.sequences import time_round

F, B, W = Kind.F, Kind.B, Kind.W
_MAX_COLUMNS = 8_000
"""Limit on the number of columns of the coarsest model, up to which it is solved within a minute."""
_MAX_COLUMNS_OF_ROUNDED = 2_000
"""Limit on the number of columns of the coarsest model for rounded costs, where the optimum is rarely proved anyway."""
_MAX_COLUMNS_OF_FINER = 30_000
_LEAST_SLOTS_OF_OP = 3
_SAME = 1e-9


@dataclass(frozen=True, eq=False)
class Proof:
    """Best schedule so far, and a lower bound on the shortest period.

    Attributes:
        schedule: best schedule found.
        bound: lower bound on the period of any repeating iteration.
    """

    schedule: Schedule
    bound: float

    @property
    def proven(self) -> bool:
        """Whether ``schedule`` is optimal."""
        return period(self.schedule) <= self.bound * (1 + _SAME)


def milp(problem: Problem, time_limit_s: float = 60.0) -> Schedule:
    """Plans a schedule with the shortest period; if time runs out, warns and returns the best schedule found.

    Args:
        problem: problem to plan.
        time_limit_s: time limit for the solver, in seconds; see ``milp_proof``.

    Raises:
        SettingError: the problem is too large, or it limits memory and counts messages.
    """
    proof = milp_proof(problem, time_limit_s)
    if not proof.proven:
        known = f"found a period of {period(proof.schedule):g}; the proved lower bound is"
        warnings.warn(f"milp {known} {proof.bound:g}", stacklevel=2)
    return proof.schedule


def milp_proof(problem: Problem, time_limit_s: float = 60.0, *, use_bound: bool = True) -> Proof:
    """Finds the best schedule and a proved lower bound on the period.

    Args:
        problem: problem with a period of up to a few hundred slots.
        time_limit_s: time limit for the solver, in seconds; the time in which ``adaptive`` finds the initial schedule
            does not count. HiGHS checks the clock only between its steps: with thousands of columns, for example
            ``BY_WORKER`` with 8 stages, it may exceed the limit by a minute.
        use_bound: False to start without ``tight_bound``, for tests that compare that bound with the proved one.

    Raises:
        SettingError: the problem is too large, or it limits memory and counts messages.
    """
    if problem.costs.inbox and problem.memory_limit is not None:
        raise SettingError("solver", "milp", "does not count the memory of messages: use adaptive")
    barrier = problem.if_drained() if problem.has_equal_updates else problem
    first = replace(adaptive(problem), solver="milp")
    proof = Proof(first, tight_bound(barrier) if use_bound else 0.0)
    if not proof.proven:
        deadline = time.monotonic() + time_limit_s
        if problem.is_plain and problem.is_uniform and not problem.chunks:
            search = _Search(barrier, first, proof.bound, deadline)
            search.run()
            proof = search.proof
        else:
            proof = Proof(*prove_chunks(barrier, first, proof.bound, deadline))
    return replace(proof, schedule=replace(proof.schedule, problem=problem))


@dataclass(frozen=True)
class _Grid:
    """Costs in slots.

    Attributes:
        slot: length of a slot, in the time unit of the costs.
        costs: durations of ops and messages in slots.
        update: duration of U in slots.
        is_exact: whether no cost was rounded.
    """

    slot: float
    costs: SlotCosts
    update: int
    is_exact: bool

    @classmethod
    def of(cls, problem: Problem, longest: float) -> "_Grid":
        """Chooses a slot, and rounds the costs down to slots.

        The slot divides all costs if the model for a period of ``longest`` is then small enough; otherwise it is
        longer.
        """
        costs = problem.costs
        times = [costs.t_f, costs.t_b, costs.t_w, costs.t_u, costs.t_comm]
        shares = [Fraction(time / costs.t_f).limit_denominator(1000) for time in times]
        common = math.lcm(*(share.denominator for share in shares))
        slot = costs.t_f * math.gcd(*(int(share * common) for share in shares)) / common
        is_exact = all(abs(share * costs.t_f - time) <= 1e-12 * time for share, time in zip(shares, times, strict=True))
        if not is_exact or num_columns(problem, math.ceil(longest / slot), Detail.POOLED) > _MAX_COLUMNS:
            slot, is_exact = _least_lossy_slot(problem, longest), False
        f, b, w, update, comm = (int(time / slot * (1 + _SAME)) for time in times)
        in_slots = SlotCosts(f, b, w, comm, b) if problem.decoupled else SlotCosts(f, b + w, 0, comm, b)
        return cls(slot, in_slots, update, is_exact)


def _least_lossy_slot(problem: Problem, longest: float) -> float:
    """Chooses the slot with the least rounding error among the fractions of F that keep the model small."""
    costs = problem.costs
    times = (costs.t_f, costs.t_b, costs.t_w)
    most_slots = _MAX_COLUMNS_OF_ROUNDED // num_columns(problem, 1, Detail.POOLED)
    most_of_f = math.floor(most_slots * costs.t_f / longest)
    slots = [costs.t_f / number for number in range(1, most_of_f + 1)]
    slots = [slot for slot in slots if slot * _LEAST_SLOTS_OF_OP <= min(times)]
    if not slots:
        raise SettingError("solver", "milp", "too large to prove an optimum: use adaptive")
    return min(slots, key=lambda slot: sum(time - int(time / slot * (1 + _SAME)) * slot for time in times))


class _Search:
    """Search that narrows the gap between the best schedule and the best bound."""

    def __init__(self, problem: Problem, first: Schedule, bound: float, deadline: float):
        self.problem, self.deadline = problem, deadline
        self.proof = Proof(first, bound)
        self.grid = _Grid.of(problem, period(first))

    def run(self) -> None:
        """Searches until the schedule is proved optimal, all models are solved, or time runs out."""
        low, high = self.to_slots(self.proof.bound), self.to_slots(period(self.proof.schedule))
        with suppress(Undecided):  # keeps the best schedule and bound so far
            for detail in self.details(high):
                low, high = self.narrow(low, high, detail)
            if low == high:
                self.exclude_parts_of_slots(low)

    def to_slots(self, length: float) -> int:
        return math.ceil(length / self.grid.slot * (1 - _SAME))

    def details(self, num_slots: int) -> Iterator[Detail]:
        """Yields the models worth solving, coarse ones first; skips those that are too large or equal a finer one."""
        is_single_P = [len(peers) == 1 for peers in self.problem.survivors]
        same = {Detail.POOLED: all(is_single_P), Detail.BY_WORKER: all(is_single_P[:-1]), Detail.BY_PATH: False}
        for detail in Detail:
            if not same[detail] and num_columns(self.problem, num_slots, detail) <= _MAX_COLUMNS_OF_FINER:
                yield detail

    def narrow(self, low: int, high: int, detail: Detail) -> tuple[int, int]:
        """Raises ``low`` to the shortest period that a model allows, in slots, given that ``high`` is feasible."""
        allowed, stride = high, 1
        while low < allowed:
            # The shortest period is usually close to refuted ones: probe from there with growing strides, then bisect.
            probe = min(low + stride - 1, (low + allowed) // 2)
            try:
                starts = self.fit([probe] * self.problem.num_stages, detail)
            except Refuted:
                low, stride = probe + 1, 2 * stride
                self.raise_bound(low)
            else:
                allowed = probe
                if detail == Detail.BY_PATH:
                    high = probe
                    self.take(starts)
        return low, high

    def fit(self, slots_P: Sequence[int], detail: Detail) -> Starts:
        limit_s = self.deadline - time.monotonic()
        if limit_s <= 0:
            raise Undecided
        slots_P = [slots - self.grid.update for slots in slots_P]
        return fit(self.problem, self.grid.costs, slots_P, detail, limit_s)

    def take(self, starts: Starts) -> None:
        schedule = _as_schedule(self.problem, starts)
        if period(schedule) < period(self.proof.schedule):
            self.proof = replace(self.proof, schedule=schedule)

    def raise_bound(self, low: int) -> None:
        """Raises the bound, given that all periods of fewer than ``low`` whole slots are refuted."""
        slots: float = low
        if not self.grid.is_exact:
            slots = low - 1
        elif self.problem.staggered:
            # The period is the mean over a cycle of stages that delay each other: a multiple of 1 / (cycle length).
            slots = low - 1 + 1 / self.problem.num_stages
        self.proof = replace(self.proof, bound=max(self.proof.bound, slots * self.grid.slot))

    def exclude_parts_of_slots(self, low: int) -> None:
        """Proves that the shortest period, known to be above ``low - 1`` slots, is ``low``.

        Take a schedule with a period between ``low - 1`` and ``low`` slots, and round its times down to slots, counted
        from the beginning of stage p. This keeps the precedence; stage p takes at most ``low - 1`` slots, and the other
        stages take at most ``low``. So it is enough to find one stage p for which that is infeasible.
        """
        P = self.problem.num_stages
        for detail in self.details(low):
            for p in range(P):
                if self.proof.proven or not self.grid.is_exact:
                    return
                try:
                    self.fit([low - (q == p) for q in range(P)], detail)
                except Refuted:
                    self.proof = replace(self.proof, bound=max(self.proof.bound, low * self.grid.slot))


def _as_schedule(problem: Problem, starts: Starts) -> Schedule:
    """Builds a schedule with the exact model's order of ops; each op starts as early as its exact costs allow."""
    D, P, peers_P = problem.num_pipelines, problem.num_stages, problem.survivors
    paths, ops = _follow(problem, starts)
    names = _names(problem, [[peers_P[p][path[p]] for p in range(P)] for path in paths])
    executor_DMP = np.empty((D, problem.most_microbatches, P), np.int32)
    for name, path in zip(names, paths, strict=True):
        executor_DMP[name] = [peers_P[p][path[p]] for p in range(P)]
    sequences: list[list[tuple[int, int, int]]] = [[] for _ in range(D * P)]
    for p, worker, _, kind, number in sorted(ops):
        sequences[peers_P[p][worker] * P + p] += [
            (each, *names[number]) for each in ((B, W) if kind == B and not problem.decoupled else (kind,))
        ]
    return Schedule.from_round(problem, "milp", time_round(problem, executor_DMP, sequences))


def _follow(problem: Problem, starts: Starts) -> tuple[list[Group], list[tuple[int, int, int, Kind, int]]]:
    """Assigns the ops of groups to individual micro-batches.

    Returns:
        The path of each micro-batch (a ``Group``), and all ops as (stage, peer, slot, kind, micro-batch).
    """
    P = problem.num_stages
    groups_P: list[list[Group]] = [[group for kind, q, group in starts if (kind, q) == (F, p)] for p in range(P)]
    order: dict[tuple[Kind, Group], list[int]] = {}  # a group's micro-batches, by start
    paths: list[Group] = []
    ops = []
    for group in groups_P[0]:
        num_before = len(paths)
        paths += [group] * len(starts[F, 0, group])
        order[F, group] = list(range(num_before, len(paths)))
    for p in range(P - 1):
        for group in groups_P[p]:
            behind = [each for each in groups_P[p + 1] if each[:-1] == group]
            order.update({(F, each): [] for each in behind})
            merged = sorted((slot, each) for each in behind for slot in starts[F, p + 1, each])
            for number, (_, each) in zip(order[F, group], merged, strict=True):
                order[F, each].append(number)
                paths[number] = each
    for p in reversed(range(P)):
        for group in groups_P[p]:
            behind = [each for each in groups_P[p + 1] if each[:-1] == group] if p + 1 < P else []
            arrivals = sorted(
                pair for each in behind for pair in zip(starts[B, p + 1, each], order[B, each], strict=True)
            )
            order[B, group] = [number for _, number in arrivals] if behind else order[F, group]
            for kind in (F, B):
                pairs = zip(starts[kind, p, group], order[kind, group], strict=True)
                ops += [(p, group[-1], slot, kind, number) for slot, number in pairs]
    for (kind, p, worker), slots in starts.items():
        if kind == W:
            backs = sorted((op[2], op[4]) for op in ops if op[:2] == (p, worker[0]) and op[3] == B)
            ops += [(p, worker[0], slot, W, number) for slot, (_, number) in zip(slots, backs, strict=True)]
    return paths, ops


def _names(problem: Problem, executors: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Assigns a (pipeline, index) to every micro-batch, preferably of a pipeline that runs it at many stages."""
    counts = [0] * problem.num_pipelines
    names = []
    for executor in executors:
        free = [d for d in range(problem.num_pipelines) if counts[d] < problem.most_microbatches]
        d = max(free, key=lambda d: (executor.count(d), -d))
        names.append((d, counts[d]))
        counts[d] += 1
    return names
