"""MILP for the exact planner, which decides whether a schedule exists in which no stage exceeds its number of slots.

Time is divided into slots, at which ops start. A column counts how many Fs (Bs, Ws) of a *group* of micro-batches have
started at a stage by a slot. The micro-batches of a group are interchangeable, so counts are enough, and no time is
spent on proving that permuting them does not help. The LP relaxation is so tight that most programs need no branching.
HiGHS solves the program (``MixedIntegerProgram``). Three definitions of a group give three models, from coarse to
exact, each a relaxation of the next:

- ``POOLED``: all micro-batches. The live workers of a stage form one machine that runs as many ops at once as there are
  workers.
- ``BY_WORKER``: the micro-batches of one worker. The B of a micro-batch may run on a worker other than that of its F.
- ``BY_PATH``: the micro-batches that run on the same workers at this stage and at all earlier ones. This is exact. The
  i-th F of a group continues as the i-th F among the groups of the next stage into which it splits; the i-th B among
  those groups returns as the i-th B of the group; and the i-th W of a worker belongs to its i-th B. Then every op waits
  for its input: when the i-th op of a group starts, at least i of the ops that provide inputs have ended.

Shape suffixes: P stages, T slots, n columns or entries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise, product

import highspy
import numpy as np

from swift.schedules.problem import Kind, Problem

ZERO, ONE = 0, 1
"""Columns with the fixed values 0 and 1."""

Terms = list[tuple[float, Sequence[int] | np.ndarray]]
"""(factor, columns) pairs; the i-th column of each pair is a term of the i-th added row."""

F, B, W = Kind.F, Kind.B, Kind.W

Group = tuple[int, ...]
"""Name of a group: the index, among peers, of its worker at each stage that defines it, with its own stage last."""


class Refuted(Exception):
    """The program is infeasible: no such schedule exists."""


class Undecided(Exception):
    """The solver ran out of time."""


def at(columns_T: np.ndarray, slots_T: np.ndarray) -> np.ndarray:
    """Selects the columns of a count for these slots. Before slot 0 the count is 0; after the end it is constant."""
    return np.where(slots_T < 0, ZERO, columns_T[np.clip(slots_T, 0, len(columns_T) - 1)])


class MixedIntegerProgram:
    """A mixed-integer linear program with nonnegative integer columns, solved for any feasible solution."""

    def __init__(self) -> None:
        self.uppers, self.num_columns = [np.array([0.0, 1.0])], 2
        self.lower_bounds: list[np.ndarray] = []
        self.upper_bounds: list[np.ndarray] = []
        self.num_rows = 0
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add_columns(self, most: float, number: int) -> np.ndarray:
        """Adds columns with values between 0 and ``most``; returns their indices."""
        self.uppers.append(np.full(number, float(most)))
        self.num_columns += number
        return np.arange(self.num_columns - number, self.num_columns)

    def add_count(self, most: int, first: int, last: int, total: int, end: int) -> np.ndarray:
        """Adds a nondecreasing count, and returns its columns by slot, int[T].

        Args:
            most: upper bound on the count.
            first: slot before which the count is 0.
            last: slot from which the count is ``total``.
            total: column with the final count.
            end: last slot.

        Raises:
            Refuted: ``last`` is before ``first``.
        """
        if last < first:
            raise Refuted
        columns_T = np.full(end + 1, ZERO)
        columns_T[first:last], columns_T[last:] = self.add_columns(most, last - first), total
        self.add([(1, columns_T[first:last]), (-1, columns_T[first + 1 : last + 1])], -math.inf, 0)
        return columns_T

    def add(self, terms: Terms, lower: float, upper: float) -> None:
        """Adds rows lower <= sum(factor * column) <= upper, one for each index into the arrays of columns."""
        number = len(terms[0][1])
        rows_n = np.arange(self.num_rows, self.num_rows + number)
        self.entries += [(rows_n, np.asarray(columns_n), np.full(number, float(factor))) for factor, columns_n in terms]
        self.lower_bounds.append(np.full(number, float(lower)))
        self.upper_bounds.append(np.full(number, float(upper)))
        self.num_rows += number

    def solve(self, time_limit_s: float) -> np.ndarray:
        """Finds a feasible value for every column, float64[columns].

        Raises:
            Refuted: the program is infeasible.
            Undecided: time ran out.
        """
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", max(0.0, time_limit_s))
        # The first feasible solution answers the question.
        solver.setOptionValue("mip_max_improving_sols", 1)
        solver.passModel(self.as_lp())
        solver.run()
        if solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            return np.array(solver.getSolution().col_value)
        # All columns are bounded, so "unbounded or infeasible" means infeasible.
        refuted = highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible
        raise Refuted if solver.getModelStatus() in refuted else Undecided

    def as_lp(self) -> highspy.HighsLp:
        """Builds the program in HiGHS's row-wise format."""
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self.num_columns, self.num_rows
        # No objective is needed, but with one that favors early starts HiGHS finds a feasible solution far sooner.
        lp.col_cost_ = np.full(self.num_columns, -1.0)
        lp.col_upper_ = np.concatenate(self.uppers)
        lp.col_lower_ = np.where(np.arange(self.num_columns) == ONE, 1.0, 0.0)
        lp.row_lower_, lp.row_upper_ = np.concatenate(self.lower_bounds), np.concatenate(self.upper_bounds)
        lp.integrality_ = [highspy.HighsVarType.kInteger] * self.num_columns
        rows_n, columns_n, values_n = (np.concatenate(parts) for parts in zip(*self.entries, strict=True))
        # A row can contain a column twice, for example if ``at`` clips to the end: add the factors.
        keys_n, inverse_n = np.unique(rows_n * self.num_columns + columns_n, return_inverse=True)
        factors_n = np.bincount(inverse_n, values_n)
        rows_n, columns_n = np.divmod(keys_n, self.num_columns)
        nonzero = (np.abs(factors_n) > 1e-12) & (columns_n != ZERO)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.bincount(rows_n[nonzero], minlength=self.num_rows))])
        lp.a_matrix_.index_ = columns_n[nonzero].astype(np.int32)
        lp.a_matrix_.value_ = factors_n[nonzero]
        return lp


class Detail(IntEnum):
    """Granularity of groups, from coarse to exact; see the module's docstring."""

    POOLED = 0
    BY_WORKER = 1
    BY_PATH = 2


@dataclass(frozen=True)
class SlotCosts:
    """Times in slots. Without decoupling, B includes W, and there is no separate W.

    Attributes:
        f, b, w: durations of the ops, at least 1; w is 0 without decoupling.
        comm: duration of a message.
        shrink: time from the start of a B until the F-stash has become a W-stash.
    """

    f: int
    b: int
    w: int
    comm: int
    shrink: int

    @property
    def duration(self) -> dict[Kind, int]:
        """Duration by kind; there is no W without decoupling."""
        return {F: self.f, B: self.b, W: self.w} if self.w else {F: self.f, B: self.b}

    def first_b(self, num_behind: int) -> int:
        """Returns the least time from an F's start to its B's start, with ``num_behind`` later stages."""
        return (num_behind + 1) * self.f + num_behind * (self.b + 2 * self.comm)


Starts = dict[tuple[Kind, int, Group], list[int]]
"""Start slots of ops, ascending, by kind, stage and group (for W, the group is the worker alone)."""


def _groups_of(problem: Problem, stage: int, detail: Detail) -> list[Group]:
    """Lists the names of all groups at a stage."""
    if detail == Detail.POOLED:
        return [(0,)]
    first = 0 if detail == Detail.BY_PATH else stage
    return list(product(*(range(len(peers)) for peers in problem.survivors[first : stage + 1])))


def num_columns(problem: Problem, num_slots: int, detail: Detail) -> int:
    """Estimates the number of columns in the model."""
    num_groups = sum(math.prod(map(len, problem.survivors[: p + 1])) for p in range(problem.num_stages))
    num_workers = sum(map(len, problem.survivors))
    return num_slots * (3 * problem.num_stages, 3 * num_workers, 2 * num_groups + num_workers)[detail]


def fit(problem: Problem, costs: SlotCosts, slots_P: Sequence[int], detail: Detail, time_limit_s: float) -> Starts:
    """Finds start slots with which no stage exceeds its slots, from its beginning to the end of its last W.

    Args:
        problem: problem to plan. With staggering, stages may begin at different times; otherwise all begin at slot 0.
        costs: costs of the problem in slots.
        slots_P: largest number of slots for each stage.
        detail: model to solve; only ``BY_PATH`` guarantees that the starts form a schedule.
        time_limit_s: time limit for the solver, in seconds.

    Raises:
        Refuted: the model is infeasible, so no such schedule exists.
        Undecided: time ran out.
    """
    if min(slots_P) < sum(costs.duration.values()):
        raise Refuted
    return _Model(problem, costs, slots_P, detail).solve(time_limit_s)


class _Model:
    def __init__(self, problem: Problem, costs: SlotCosts, slots_P: Sequence[int], detail: Detail):
        self.problem, self.costs, self.slots_P, self.detail = problem, costs, slots_P, detail
        self.num_all = problem.total_microbatches
        self.rows = MixedIntegerProgram()
        self.groups_P = [_groups_of(problem, p, detail) for p in range(problem.num_stages)]
        self.workers_P = [sorted({group[-1:] for group in groups}) for groups in self.groups_P]
        self.earliest_P, self.latest_P = self.beginnings()
        self.end_P = [latest + slots for latest, slots in zip(self.latest_P, slots_P, strict=True)]
        self.begun_PT = [
            self.rows.add_count(1, earliest, latest, ONE, end)
            for earliest, latest, end in zip(self.earliest_P, self.latest_P, self.end_P, strict=True)
        ]
        self.total: dict[tuple[int, Group], int] = {}
        self.started: dict[tuple[Kind, int, Group], np.ndarray] = {}
        for p in range(problem.num_stages):
            self.add_counts(p)
        for p in range(problem.num_stages):
            self.hold_to_windows(p)
            self.hold_to_memory(p)
            self.hold_to_precedence(p)
            self.break_symmetry(p)

    def beginnings(self) -> tuple[list[int], list[int]]:
        """Computes the earliest and the latest slot at which each stage can begin."""
        earliest_P, latest_P = [0] * self.problem.num_stages, [0] * self.problem.num_stages
        for p in range(1, self.problem.num_stages if self.problem.staggered else 1):
            earliest_P[p] = earliest_P[p - 1] + self.least_lag
            latest_P[p] = latest_P[p - 1] + self.most_lag(p)
            if self.most_lag(p) < self.least_lag:
                raise Refuted
        return earliest_P, latest_P

    @property
    def least_lag(self) -> int:
        """Least delay in slots between the beginnings of consecutive stages: the first F and its message."""
        return self.costs.f + self.costs.comm

    def most_lag(self, p: int) -> int:
        """Returns a stage's greatest delay after the previous one, in slots.

        The last B of the stage's busiest worker has to reach the previous stage in time.
        """
        costs, load = self.costs, math.ceil(self.num_all / len(self.problem.survivors[p]))
        return self.slots_P[p - 1] - load * (costs.f + costs.b) - costs.comm - costs.b - costs.w

    def room(self, p: int) -> int:
        """Returns how many ops a worker can run at once; in the pooled model, the number of workers."""
        return len(self.problem.survivors[p]) if self.detail == Detail.POOLED else 1

    def add_counts(self, p: int) -> None:
        """Adds columns that count the started ops of every kind and group, by slot and in total."""
        costs, rows = self.costs, self.rows
        first_b = costs.first_b(self.problem.num_stages - 1 - p)
        before = {F: 0, B: first_b, W: first_b + costs.b}
        behind = {F: first_b + costs.b + costs.w, B: costs.b + costs.w, W: costs.w}
        most = min(self.num_all, self.room(p) * (self.slots_P[p] // sum(costs.duration.values())))
        for kind in costs.duration:
            for group in self.workers_P[p] if kind == W else self.groups_P[p]:
                total = rows.add_columns(most, 1)[0] if kind != B else self.total[p, group]
                if kind == F:
                    self.total[p, group] = total
                if kind == W:
                    rows.add([(1, [total]), *((-1, [self.total[p, g]]) for g in self.run_by(p, group))], 0, 0)
                first, last = self.earliest_P[p] + before[kind], self.end_P[p] - behind[kind]
                self.started[kind, p, group] = rows.add_count(most, first, last, total, self.end_P[p])
        rows.add([(1, [self.total[p, group]]) for group in self.groups_P[p]], self.num_all, self.num_all)

    def run_by(self, p: int, worker: Group) -> list[Group]:
        return [group for group in self.groups_P[p] if group[-1:] == worker]

    def by(self, kind: Kind, p: int, groups: Sequence[Group], slots_T: np.ndarray, sign: float = 1.0) -> Terms:
        """Builds the terms for the number of ops that groups have started by these slots."""
        return [(sign, at(self.started[kind, p, group], slots_T)) for group in groups]

    def hold_to_windows(self, p: int) -> None:
        """Adds rows: a worker runs one op at a time, and all its ops within its stage's slots."""
        slots_T, begun_T, room = np.arange(self.earliest_P[p], self.end_P[p]), self.begun_PT[p], self.room(p)
        for worker in self.workers_P[p]:
            # In every slot: running ops <= room between the stage's beginning and the end of its slots, else 0.
            terms: Terms = [(-room, at(begun_T, slots_T)), (room, at(begun_T, slots_T - self.slots_P[p]))]
            for kind, duration in self.costs.duration.items():
                groups = [worker] if kind == W else self.run_by(p, worker)
                terms += self.by(kind, p, groups, slots_T) + self.by(kind, p, groups, slots_T - duration, -1)
            self.rows.add(terms, -math.inf, 0)
        if p and self.problem.staggered:
            ahead_T = self.begun_PT[p - 1]
            self.rows.add([(1, at(begun_T, slots_T)), (-1, at(ahead_T, slots_T - self.least_lag))], -math.inf, 0)
            self.rows.add([(-1, at(begun_T, slots_T)), (1, at(ahead_T, slots_T - self.most_lag(p)))], -math.inf, 0)

    def hold_to_memory(self, p: int) -> None:
        """Adds rows: stash memory stays within the limit in every slot, as ``peak_memory`` measures it."""
        limit, costs, slots_T = self.problem.memory_limit, self.problem.costs, np.arange(self.end_P[p])
        if limit is None:
            return
        f_stash, w_stash = costs.f_stash, costs.w_stash
        during_b = max(f_stash, w_stash)
        # If both stashes are equal, the unit is a stash: a limit in whole stashes tightens the LP relaxation.
        unit = f_stash if f_stash == w_stash else limit
        most = math.floor(limit / unit * (1 + 1e-9)) if f_stash == w_stash else 1 + 1e-9
        for worker in self.workers_P[p]:
            groups = self.run_by(p, worker)
            given_back = (
                self.by(W, p, [worker], slots_T - self.costs.w, -w_stash / unit)
                if self.costs.w
                else self.by(B, p, groups, slots_T - self.costs.b, -w_stash / unit)
            )
            terms = self.by(F, p, groups, slots_T, f_stash / unit)
            terms += self.by(B, p, groups, slots_T, (during_b - f_stash) / unit)
            terms += self.by(B, p, groups, slots_T - self.costs.shrink, (w_stash - during_b) / unit)
            self.rows.add(terms + given_back, -math.inf, most * self.room(p))

    def hold_to_precedence(self, p: int) -> None:
        """Adds rows: in every slot, no more ops have started than inputs have arrived for them."""
        costs, rows, slots_T = self.costs, self.rows, np.arange(self.end_P[p])
        for worker in self.workers_P[p] if costs.w else []:
            ended = self.by(B, p, self.run_by(p, worker), slots_T - costs.b, -1)
            rows.add(self.by(W, p, [worker], slots_T) + ended, -math.inf, 0)
        first_b = costs.first_b(self.problem.num_stages - 1 - p)
        for group in self.groups_P[p]:
            rows.add(self.by(B, p, [group], slots_T) + self.by(F, p, [group], slots_T - first_b, -1), -math.inf, 0)
        if p + 1 == self.problem.num_stages:
            return
        for groups, behind in self.splits(p):
            later_T = np.arange(self.end_P[p + 1])
            sent = self.by(F, p, groups, later_T - costs.f - costs.comm, -1)
            rows.add(self.by(F, p + 1, behind, later_T) + sent, -math.inf, 0)
            sent = self.by(B, p + 1, behind, slots_T - costs.b - costs.comm, -1)
            rows.add(self.by(B, p, groups, slots_T) + sent, -math.inf, 0)

    def splits(self, p: int) -> list[tuple[list[Group], list[Group]]]:
        """Pairs groups at stage p with the groups at the next stage that have the same micro-batches."""
        if self.detail != Detail.BY_PATH:
            return [(self.groups_P[p], self.groups_P[p + 1])]
        return [([g], [behind for behind in self.groups_P[p + 1] if behind[:-1] == g]) for g in self.groups_P[p]]

    def break_symmetry(self, p: int) -> None:
        # A stage's peers are interchangeable: ordering them by load removes equivalent solutions.
        for more, less in pairwise(self.workers_P[p]):
            terms: Terms = [(-1, [self.total[p, group]]) for group in self.run_by(p, more)]
            terms += [(1, [self.total[p, group]]) for group in self.run_by(p, less)]
            self.rows.add(terms, -math.inf, 0)

    def solve(self, time_limit_s: float) -> Starts:
        values_n = self.rows.solve(time_limit_s)
        starts = {}
        for key, columns_T in self.started.items():
            counts_T = np.rint(values_n[columns_T]).astype(int)
            starts[key] = np.repeat(np.arange(len(counts_T)), np.diff(counts_T, prepend=0)).tolist()
        return starts
