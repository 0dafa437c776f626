"""Planner for SPMD execution, which minimizes ``lockstep_period``.

In an SPMD program every tick takes as long as its longest op. A plan for workers at their own pace mixes kinds of ops
in a tick, and the tick takes as long as the longest kind. This planner therefore keeps only two things from the
adaptive plan: the assignment of micro-batches to workers, and the order of each worker's Fs, of its Bs and of its Ws. A
beam search finds their interleaving tick by tick. A tick has the duration of one kind of op, and in it every worker
runs a B if one is ready and fits, else an F, else a W.

Shape suffixes: R live workers in mesh order, S states of the search, n ops, 4 the kinds F, B, W, U, D pipelines, P
chunks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from swift.schedules.lowering.ticks import COST_PER_TICK, NONE, FixedOrder, Lines, Step, beam_search, lockstep_period
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.problem import Kind, Problem
from swift.schedules.schedule import Round, Schedule, fits, round_of
from swift.schedules.sequences import SequencedOp, time_round

_GUIDES = ((1.0, 0.3), (1.0, 1.0), (1.0, 2.0), (1.5, 0.3))
"""(stretch, weight of the mean) for each search, see ``_FreeOrder``; the best result is used."""
_WIDTH = 24
_MAX_STATES = 3_000
"""Limit on the beam's width times the number of live workers."""
_MAX_OPS = 1_500_000
"""Number of ops that all searches together may schedule; at least one search runs."""
_MESSAGES = (1, 2, 4, 6)
"""Numbers of messages to reserve memory for, in the order tried, until the result fits in memory with its messages."""
_NEVER = 1 << 40


def lockstep(problem: Problem) -> Schedule:
    """Plans a schedule with a short ``lockstep_period``; its ``period`` is slightly longer than with ``adaptive``.

    The order of ops is optimized for lockstep, but the schedule's times assume that workers run at their own pace.
    """
    return Schedule.planned(problem, "lockstep", _best_round)


def _best_round(problem: Problem) -> Round:
    # Three iterations are enough for the steady state: the middle one has neighbors on both sides.
    problem = replace(problem, num_iterations=1 if problem.num_iterations == 1 else 3)
    plan = adaptive(problem)
    rounds = [round_of(plan), *(_interleaved(plan) if problem.decoupled else ())]
    costs = [(lockstep_period(Schedule.from_round(problem, "lockstep", r)), r.period) for r in rounds]
    return rounds[min(range(len(rounds)), key=costs.__getitem__)]


def _interleaved(plan: Schedule) -> Iterator[Round]:
    """Yields the best round of each search, taken from the middle iteration."""
    problem, space = plan.problem, _FreeOrder(plan)
    executor_DMP = round_of(plan).executor_DMP
    for stretch, weight in _GUIDES[: max(1, _MAX_OPS // plan.num_ops)]:
        for num_messages in _MESSAGES if problem.costs.inbox and problem.memory_limit is not None else (0,):
            space.guide(stretch, weight, num_messages)
            ran_T4R = space.best_way()
            if ran_T4R is None:
                break
            iteration_plan = time_round(problem, executor_DMP, space.sequences(ran_T4R, problem.num_iterations // 2))
            if fits(problem, iteration_plan):
                yield iteration_plan
                break


class _FreeOrder:
    """Search space of interleavings. A state counts the Fs, Bs, Ws and Us that each worker has run.

    The estimate of the time left is the maximum over workers, plus a multiple of the mean. A worker's time left is the
    maximum of its remaining work and of the longest paths from its next ops to the end of the window. Paths lead from
    an op to the next op on its worker and to ops that wait for its output. On a path to a waiting op, an op counts
    ``stretch`` times its duration, since its output is available only at the end of its tick.

    The i-th op of a kind in line r is node ``first_4R[kind, r] + i``; each list has a last node without an op.
    """

    def __init__(self, schedule: Schedule):
        problem, self.schedule, lines = schedule.problem, schedule, Lines.of(schedule)
        self.lines, self.costs = lines, problem.costs
        self.lengths = np.unique(lines.duration_n)
        kind, R = schedule.kind, len(lines.worker_R)
        self.end_cR = np.stack([np.bincount(lines.row_n[kind == k], minlength=R) for k in Kind])
        self.start_cR = np.zeros_like(self.end_cR)
        self.first_4R = np.concatenate([[0], np.cumsum(self.end_cR + 1)[:-1]]).reshape(4, R)
        num_nodes = int(self.end_cR.sum()) + 4 * R
        # In this space Us come last, in the order of chunks, regardless of their places in the plan.
        place_n = np.where(kind == Kind.U, schedule.iteration * problem.num_chunks + schedule.chunk, lines.place_n)
        order = np.lexsort((place_n, lines.row_n, kind))
        self.op = np.full(num_nodes, NONE)
        self.op[np.delete(np.arange(num_nodes), (self.first_4R + self.end_cR).ravel())] = order
        self.node_n = np.empty(schedule.num_ops, np.int64)
        self.node_n[order] = np.flatnonzero(self.op != NONE)
        self.place_n = self.node_n - self.first_4R[kind, lines.row_n]
        self.sender_row, self.sender_place = self.after_senders(num_nodes)
        self.length, self.chunk = np.full(num_nodes, np.inf), np.zeros(num_nodes, np.int64)
        self.length[self.node_n], self.chunk[self.node_n] = lines.duration_n, schedule.chunk
        self.done = self.sums_before(lines.duration_n)
        f_stash_n, w_stash_n = problem.stash_2P[:, schedule.chunk]
        self.f_held = self.sums_before(f_stash_n)
        self.w_held = self.sums_before(w_stash_n)
        self.growth_R = np.zeros(R)
        np.maximum.at(self.growth_R, lines.row_n, w_stash_n - f_stash_n)
        self.num_updates = self.end_cR[Kind.U] // problem.num_iterations
        self.time_4R = self.mean_times()
        self.num_own = self.end_cR[Kind.F] // problem.num_iterations
        self.own_place = self.after_own(num_nodes)
        self.levels = FixedOrder(lines).levels

    def sums_before(self, values_n: np.ndarray) -> np.ndarray:
        """Sums the values of the ops that precede each node in its list, float64[nodes]."""
        node_values = np.zeros(len(self.op))
        node_values[self.node_n] = values_n
        lists = np.split(node_values, self.first_4R.ravel()[1:])
        return np.concatenate([np.cumsum(values) - values for values in lists])

    def mean_times(self) -> np.ndarray:
        """Computes the mean time of each line's ops by kind, float64[4, R]; for U, the sum over an iteration."""
        problem, R = self.schedule.problem, len(self.lines.worker_R)
        times_4R = np.zeros((4, R))
        for row, w in enumerate(self.lines.worker_R.tolist()):
            chunks = list(problem.held_by(divmod(w, problem.num_stages)))
            if chunks:
                times_4R[:, row] = (
                    problem.time_4P[:, chunks].mean(axis=1) if len(chunks) > 1 else problem.time_4P[:, chunks[0]]
                )
        return np.concatenate([times_4R[: Kind.U], times_4R[Kind.U :] * self.num_updates])

    def after_senders(self, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        """Finds the op that each node reads: its line, and its position in that line's list of the same kind."""
        lines, reads = self.lines, np.flatnonzero(self.lines.sender_n != NONE)
        row, place = np.zeros(num_nodes, np.int64), np.full(num_nodes, NONE)
        row[self.node_n[reads]] = lines.row_n[lines.sender_n[reads]]
        place[self.node_n[reads]] = self.place_n[lines.sender_n[reads]]
        return row, place

    def after_own(self, num_nodes: int) -> np.ndarray:
        """Finds the op of the previous kind that each node waits for in its own line, as a position in that list.

        F waits for the U of the previous iteration, B for F, W for B, and U for the last W.
        """
        kind, iteration = self.schedule.kind, self.schedule.iteration
        (f_n, b_n, w_n), is_f, is_u = self.schedule.rows_of_microbatches, kind == Kind.F, kind == Kind.U
        # The last node of each list keeps this value, so it is never ready.
        place = np.full(num_nodes, _NEVER)
        place[self.node_n[is_f]] = self.num_updates[self.lines.row_n[is_f]] * iteration[is_f] - 1
        place[self.node_n[b_n]] = self.place_n[f_n]
        place[self.node_n[w_n]] = self.place_n[b_n]
        place[self.node_n[is_u]] = (self.num_own[self.lines.row_n] * (iteration + 1) - 1)[is_u]
        return place

    def guide(self, stretch: float, weight: float, num_messages: int) -> None:
        """Sets the parameters of the next search.

        Args:
            stretch: factor on the duration of ops whose output others wait for.
            weight: weight of the workers' mean in the estimate.
            num_messages: number of messages for which a worker reserves memory.
        """
        self.weight, self.left = weight, self.longest_paths(stretch)
        limit = self.schedule.problem.memory_limit
        self.limit = np.inf if limit is None else limit * (1 + 1e-12) - num_messages * self.costs.inbox

    def best_way(self) -> np.ndarray | None:
        """Searches for the ops to run in every tick.

        Returns:
            Kind of op that each worker runs in each tick, bool[T, 4, R], or None if the search reached a dead end.
        """
        width = max(1, min(_WIDTH, _MAX_STATES // len(self.lines.worker_R)))
        shortest = float(self.schedule.problem.time_4P[: Kind.U].min())
        return beam_search(self, width, COST_PER_TICK * shortest)

    def longest_paths(self, stretch: float) -> np.ndarray:
        """Estimates the time from each node's start to the window's end, float64[nodes]."""
        lines, kind, iteration = self.lines, self.schedule.kind, self.schedule.iteration
        f_n, b_n, w_n = self.schedule.rows_of_microbatches
        nowhere, row_n = len(self.op), lines.row_n
        reader_n, follower_n = np.full((2, len(kind)), nowhere)
        sent = np.flatnonzero(lines.sender_n != NONE)
        reader_n[lines.sender_n[sent]] = self.node_n[sent]
        follower_n[f_n], follower_n[b_n] = self.node_n[b_n], self.node_n[w_n]
        is_w, is_u = kind == Kind.W, kind == Kind.U
        follower_n[is_w] = (self.first_4R[Kind.U, row_n] + self.num_updates[row_n] * iteration)[is_w]
        follower_n[is_u] = (self.first_4R[Kind.F, row_n] + self.num_own[row_n] * (iteration + 1))[is_u]
        work_n, left = self.work_ahead(), np.zeros(nowhere + 1)
        for ops in reversed(self.levels):
            nodes, duration = self.node_n[ops], lines.duration_n[ops]
            waiting = np.maximum(left[reader_n[ops]], left[follower_n[ops]]) + stretch * duration
            longest = np.maximum(np.maximum(left[nodes + 1] + duration, waiting), work_n[ops])
            left[nodes] = lines.longest_together(ops, longest)
        return left[:-1]

    def work_ahead(self) -> np.ndarray:
        """Computes each worker's remaining work at the start of each op, float64[n]."""
        t_f, t_b, t_w, t_u = self.time_4R[:, self.lines.row_n]
        own_n, kind = self.num_own[self.lines.row_n], self.schedule.kind
        iterations_ahead = self.schedule.problem.num_iterations - 1 - self.schedule.iteration
        microbatch_work_n = np.choose(kind, [t_f + t_b + t_w, t_b + t_w, t_w, np.zeros_like(t_w)])
        ahead_n = own_n * (self.schedule.iteration + 1) - self.place_n
        return ahead_n * microbatch_work_n + t_u + iterations_ahead * (own_n * (t_f + t_b + t_w) + t_u)

    def steps(self, state_cSR: np.ndarray) -> Iterator[Step]:
        """Yields the possible next ticks, one per distinct op duration."""
        ready_4SR = self.ready(state_cSR)
        length_4SR = np.where(ready_4SR, self.length[self.first_4R[:, None] + state_cSR], np.inf)
        for length in self.lengths:
            free_SR = np.ones(ready_4SR.shape[1:], bool)
            ran_4SR, possible_S = np.zeros_like(ready_4SR), np.zeros(len(free_SR), bool)
            for kind in (Kind.U, Kind.B, Kind.F, Kind.W):
                ran_4SR[kind] = (length_4SR[kind] <= length) & free_SR
                free_SR &= ~ran_4SR[kind]
                possible_S |= (ran_4SR[kind] & (length_4SR[kind] == length)).any(axis=1)
            yield Step(float(length), ran_4SR, possible_S)

    def ready(self, state_4SR: np.ndarray) -> np.ndarray:
        """Returns whether each worker can run its next op of each kind, bool[4, S, R]."""
        ready_4SR = np.empty(state_4SR.shape, bool)
        for kind in Kind:
            done_SR, node_SR = state_4SR[kind], self.first_4R[kind] + state_4SR[kind]
            # For F, kind - 1 is -1 and thus U: F waits for the previous iteration's U.
            ready_4SR[kind] = state_4SR[kind - 1] > self.own_place[node_SR]
            if kind in (Kind.F, Kind.B):
                sender_SR = np.take_along_axis(done_SR, self.sender_row[node_SR], axis=1)
                ready_4SR[kind] &= sender_SR > self.sender_place[node_SR]
        problem, node_4SR = self.schedule.problem, self.first_4R[:, None] + state_4SR
        ready_4SR[Kind.U] &= self.lines.all_at_update(ready_4SR[Kind.U], self.chunk[node_4SR[Kind.U]])
        if not problem.staggered and not problem.is_plain:
            done_SR = np.where(
                self.num_own > 0, state_4SR[Kind.W] // np.maximum(self.num_own, 1), problem.num_iterations
            )
            due_SR = state_4SR[Kind.U] // np.maximum(self.num_updates, 1)
            ready_4SR[Kind.U] &= done_SR.min(axis=1, keepdims=True) > due_SR
        if np.isfinite(self.limit):
            # B holds the larger stash while it runs, so every worker keeps room for one stash to grow.
            f, b, w, _ = node_4SR
            held_SR = self.f_held[f] - self.f_held[b] + self.w_held[b] - self.w_held[w] + self.growth_R
            f_stash_SR = problem.stash_2P[0, self.chunk[f]]
            ready_4SR[Kind.F] &= held_SR + f_stash_SR <= self.limit
            ready_4SR[Kind.B] &= held_SR <= self.limit
        return ready_4SR

    def time_left(self, state_cSR: np.ndarray) -> np.ndarray:
        """Estimates the time left from each state, float64[S]."""
        node_4SR = self.first_4R[:, None] + state_cSR
        left_SR = (self.done[self.first_4R + self.end_cR][:, None] - self.done[node_4SR]).sum(axis=0)
        for kind in (Kind.F, Kind.B, Kind.W):
            left_SR = np.maximum(left_SR, self.left[node_4SR[kind]])
        return left_SR.max(axis=1) + self.weight * left_SR.mean(axis=1)

    def sequences(self, ran_T4R: np.ndarray, iteration: int) -> Sequence[Sequence[SequencedOp]]:
        """Lists the ops that every worker runs in an iteration, in order, as arguments of ``time_round``."""
        schedule, lines = self.schedule, self.lines
        by_worker: list[list[SequencedOp]] = [[] for _ in range(len(schedule.bounds) - 1)]
        place_T4R = ran_T4R.cumsum(axis=0) - 1
        for row, first_4 in enumerate(self.first_4R.T):
            tick, kind = np.nonzero(ran_T4R[:, : Kind.U, row])
            ops = self.op[first_4[kind] + place_T4R[tick, kind, row]]
            ops = ops[schedule.iteration[ops] == iteration]
            columns = (schedule.kind[ops], schedule.pipeline[ops], schedule.microbatch[ops], schedule.chunk[ops])
            worker = int(lines.worker_R[row])
            by_worker[worker] = list(zip(*(column.tolist() for column in columns), strict=True))
        return by_worker
