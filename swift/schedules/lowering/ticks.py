"""Assignment of ops to ticks. Workers keep their op order, and all wait for a tick's longest op.

A worker gains nothing by idling while an op that fits into the tick is ready. The only choice is therefore the length
of each tick: in a short tick, longer ops wait for a later tick that more workers can use. A beam search over the
progress of all workers makes that choice, tick by tick.

Shape suffixes: T ticks, R live workers in mesh order, S states of the search, c counters of a worker's progress, P
chunks, n ops of a schedule, in the schedule's order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from swift.schedules.problem import Kind
from swift.schedules.schedule import Schedule, round_of

NONE = -1
_WIDTH = 12
_MAX_STATES = 6_000
"""Limit on the beam's width times the number of live workers, so that large clusters take seconds."""
COST_PER_TICK = 1e-3
"""Extra cost of a tick, as a fraction of the shortest op's time, so that fewer ticks win among equally long paths."""


class Step(NamedTuple):
    """One option for the next tick, applied to each of S states.

    Attributes:
        length: duration of the tick.
        ran_cSR: bool, counters that advance by one in the tick.
        possible_S: bool, states from which the step is possible.
    """

    length: float
    ran_cSR: np.ndarray
    possible_S: np.ndarray


class Space(Protocol):
    """Search space of ``beam_search``; states are int64[c, S, R]."""

    start_cR: np.ndarray
    end_cR: np.ndarray

    def steps(self, state_cSR: np.ndarray) -> Iterator[Step]:
        """Yields the options for the next tick."""

    def time_left(self, state_cSR: np.ndarray) -> np.ndarray:
        """Estimates the time from each state to the end, float64[S]."""


class _Choice(NamedTuple):
    """States kept after one tick: the predecessor of each, and the counters that advanced."""

    before_S: np.ndarray
    ran_cSR: np.ndarray


def beam_search(space: Space, width: int, cost_per_tick: float) -> np.ndarray | None:
    """Finds a short path from start to end, keeping the ``width`` most promising states after every tick.

    Args:
        space: space to search.
        width: largest number of states to keep, S.
        cost_per_tick: cost of a tick in addition to its length; among paths of equal duration, fewer ticks win.

    Returns:
        The counters that advance in each tick, bool[T, c, R], or None if all states that were kept reached dead ends.
    """
    state, spent = space.start_cR[:, None], np.zeros(1)
    choices: list[_Choice] = []
    best, best_path = np.inf, None
    # Weights of a random linear hash, modulo 2^64, which identifies a state that several paths reach.
    marks = np.random.default_rng(0).integers(1, 2**62, space.start_cR.shape)
    while True:
        steps = [step for step in space.steps(state) if step.possible_S.any()]
        if not steps:
            return best_path
        before = np.concatenate([np.flatnonzero(step.possible_S) for step in steps])
        ran = np.concatenate([step.ran_cSR[:, step.possible_S] for step in steps], axis=1)
        lengths = np.repeat([step.length for step in steps], [np.count_nonzero(step.possible_S) for step in steps])
        state, spent = state[:, before] + ran, spent[before] + lengths + cost_per_tick
        beam = _kept(spent + space.time_left(state), np.einsum("cSR,cR->S", state, marks), width)
        state, spent = state[:, beam], spent[beam]
        choices.append(_Choice(before[beam], ran[:, beam]))
        ended = (state == space.end_cR[:, None]).all(axis=(0, 2))
        if ended.any():
            last = np.flatnonzero(ended)[np.argmin(spent[ended])]
            # Unfinished paths have used as many ticks but perhaps less time, so they may still end sooner.
            if spent[last] < best:
                best, best_path = spent[last], _path(choices, int(last))
            going = np.flatnonzero(~ended & (spent < best))
            if not len(going):
                return best_path
            state, spent = state[:, going], spent[going]
            choices[-1] = _Choice(choices[-1].before_S[going], choices[-1].ran_cSR[:, going])


def _kept(estimate: np.ndarray, mark: np.ndarray, width: int) -> np.ndarray:
    """Selects the ``width`` states with the lowest estimates; among states with equal hashes, only the best is kept."""
    order = np.argsort(estimate, kind="stable")
    _, first = np.unique(mark[order], return_index=True)
    return order[np.sort(first)[:width]]


def _path(choices: list[_Choice], last: int) -> np.ndarray:
    ran = []
    for choice in reversed(choices):
        ran.append(choice.ran_cSR[:, last])
        last = int(choice.before_S[last])
    return np.array(ran[::-1])


def assign_ticks(schedule: Schedule) -> np.ndarray:
    """Assigns a valid schedule's ops to ticks, by a short search for the least total length of the ticks.

    Every worker runs at most one op per tick, in its order, and every op runs in a later tick than the op that it
    reads. All peers run a chunk's U in the same tick. Without staggering, if each stage holds one chunk, all stages run
    their Us in the same tick.

    Returns:
        Tick of each op, from 0, int64[n].
    """
    lines = Lines.of(schedule)
    space = FixedOrder(lines)
    width = max(1, min(_WIDTH, _MAX_STATES // len(lines.worker_R)))
    cost_per_tick = COST_PER_TICK * float(lines.duration_n[lines.duration_n > 0].min())
    ran_TcR = beam_search(space, width, cost_per_tick)
    assert ran_TcR is not None, "the workers wait for each other in a cycle"
    tick_n = np.empty(schedule.num_ops, np.int64)
    for row, ran_T in enumerate(ran_TcR[:, 0].T):
        tick_n[lines.bounds[row] : lines.bounds[row + 1]] = np.flatnonzero(ran_T)
    return tick_n


def lockstep_period(schedule: Schedule, tick_n: np.ndarray | None = None) -> float:
    """Computes the period of a schedule that runs as an SPMD program, tick by tick.

    A tick lasts as long as its longest op, plus the time of its messages. Messages follow the ops of their tick, and
    all workers wait for them. They do not overlap with ops, as they do when workers run at their own pace.

    Args:
        schedule: valid schedule.
        tick_n: int64[n], tick of every op; None for ``assign_ticks`` of at least four iterations.

    Returns:
        Time per iteration in steady state: the mean time between the starts of iterations on the slowest worker. The
        first and the last iteration are left out if there are others, since the pipeline fills and drains in them. For
        two iterations, the time between their starts or between their ends, whichever is less. For a single iteration,
        its total time.
    """
    if tick_n is None:
        schedule = _of_iterations(schedule, 4)
        tick_n = assign_ticks(schedule)
    problem, num_workers = schedule.problem, len(schedule.problem.topology.workers)
    length_T = np.zeros(int(tick_n.max()) + 1)
    np.maximum.at(length_T, tick_n, _durations(schedule))
    length_T[tick_n[_senders_elsewhere(schedule)]] += problem.costs.t_comm
    time_T = np.concatenate([[0.0], np.cumsum(length_T)])
    if problem.num_iterations == 1:
        return float(time_T[-1])
    rows = schedule.worker, schedule.iteration
    first_WK = np.full((num_workers, problem.num_iterations), len(length_T))  # the end if a worker runs nothing
    np.minimum.at(first_WK, rows, tick_n)
    if problem.num_iterations > 2:
        first_WK = first_WK[:, 1 : -1 if problem.num_iterations > 3 else None]
        return float((time_T[first_WK[:, -1]] - time_T[first_WK[:, 0]]).max()) / (first_WK.shape[1] - 1)
    end_WK = np.zeros(first_WK.shape, np.int64)
    np.maximum.at(end_WK, rows, tick_n + 1)
    return min(float(np.diff(time_T[place_WK]).max()) for place_WK in (first_WK, end_WK))


def _of_iterations(schedule: Schedule, least: int) -> Schedule:
    """Extends a schedule to at least ``least`` iterations; a single iteration is kept, since its period is unknown."""
    if schedule.problem.num_iterations == 1 or schedule.problem.num_iterations >= least:
        return schedule
    problem = replace(schedule.problem, num_iterations=least)
    return Schedule.from_round(problem, schedule.solver, round_of(schedule))


def _durations(schedule: Schedule) -> np.ndarray:
    """Returns the duration of every op, float64[n]."""
    return schedule.problem.time_4P[schedule.kind, schedule.chunk]


@dataclass(frozen=True, eq=False)
class Lines:
    """A schedule's ops as lines, one per live worker, with each op's dependencies.

    Attributes:
        schedule: schedule whose ops are in the lines.
        bounds: int64[R + 1], line r has the ops ``bounds[r]:bounds[r + 1]``.
        row_n: int64[n], line of each op.
        place_n: int64[n], position of each op in its line.
        sender_n: int64[n], op of another chunk that each op has to follow, or ``NONE``.
        worker_R: int64[R], worker of each line.
        group_P: int64[P], group of Us that run together, for each chunk: a group of its own, or one group for all
            chunks of a plain problem without staggering.
        num_in_group_P: int64[P], number of lines that run a U of the group.
    """

    schedule: Schedule
    bounds: np.ndarray
    row_n: np.ndarray
    place_n: np.ndarray
    sender_n: np.ndarray
    worker_R: np.ndarray
    group_P: np.ndarray
    num_in_group_P: np.ndarray

    @classmethod
    def of(cls, schedule: Schedule) -> "Lines":
        """Builds the lines of a valid schedule."""
        problem, P = schedule.problem, schedule.problem.num_chunks
        worker_R = np.array([d * problem.num_stages + p for d, p in problem.live_workers])
        bounds = np.append(schedule.bounds[worker_R], schedule.num_ops)
        row_n = np.repeat(np.arange(len(worker_R)), np.diff(bounds))
        assert (worker_R[row_n] == schedule.worker).all(), "a failed worker runs an op"
        group_P = np.arange(P) if problem.staggered or not problem.is_plain else np.zeros(P, np.int64)
        num_in_group_P = np.bincount(group_P, [len(peers) for peers in problem.survivors], P).astype(np.int64)
        place_n = np.arange(schedule.num_ops) - bounds[row_n]
        return cls(schedule, bounds, row_n, place_n, _senders(schedule), worker_R, group_P, num_in_group_P)

    @cached_property
    def duration_n(self) -> np.ndarray:
        """Duration of every op, float64[n]."""
        return _durations(self.schedule)

    def longest_together(self, ops: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Replaces each U's value by the maximum over the Us that run together; keeps the values of other ops."""
        is_u = self.schedule.kind[ops] == Kind.U
        if not is_u.any():
            return values
        largest, group = np.zeros(len(self.group_P)), self.group_P[self.schedule.chunk[ops]]
        np.maximum.at(largest, group[is_u], values[is_u])
        return np.where(is_u, largest[group], values)

    def all_at_update(self, at_update_SR: np.ndarray, chunk_SR: np.ndarray) -> np.ndarray:
        """Returns whether each line, and all lines that update together with it, have reached their U, bool[S, R].

        Args:
            at_update_SR: bool, whether a line has reached a U.
            chunk_SR: chunk of that U; arbitrary for lines that have not reached a U.
        """
        S, P = len(at_update_SR), len(self.group_P)
        group_SR = np.where(at_update_SR, self.group_P[chunk_SR], 0)
        key_SR = group_SR + np.arange(S)[:, None] * P
        there_SP = np.bincount(key_SR[at_update_SR], minlength=S * P)
        return at_update_SR & (there_SP[key_SR] == self.num_in_group_P[group_SR])


def _senders(schedule: Schedule) -> np.ndarray:
    row_3KnP = schedule.rows_of_microbatches
    assert (row_3KnP >= 0).all(), "an op is missing"
    sender_n = np.full(schedule.num_ops, NONE, np.int64)
    sender_n[row_3KnP[Kind.F, ..., 1:]] = row_3KnP[Kind.F, ..., :-1]
    back = Kind.B if schedule.problem.decoupled else Kind.W
    sender_n[row_3KnP[Kind.B, ..., :-1]] = row_3KnP[back, ..., 1:]
    return sender_n


def _senders_elsewhere(schedule: Schedule) -> np.ndarray:
    """Finds the ops that send a message to another worker, without duplicates."""
    sender_n = _senders(schedule)
    reads = np.flatnonzero(sender_n != NONE)
    return np.unique(sender_n[reads[schedule.worker[reads] != schedule.worker[sender_n[reads]]]])


class FixedOrder:
    """Search space in which every line keeps its order; a state is the position in every line.

    The i-th op of line r is node ``first_R[r] + i``; each line has a last node without an op.
    """

    def __init__(self, lines: Lines):
        n, R = len(lines.row_n), len(lines.worker_R)
        self.lines = lines
        self.node_n = np.arange(n) + lines.row_n
        self.first_R = lines.bounds[:-1] + np.arange(R)
        self.start_cR = np.zeros((1, R), np.int64)
        self.end_cR = np.diff(lines.bounds)[None]
        self.duration = np.full(n + R, np.inf)
        self.duration[self.node_n] = lines.duration_n
        self.is_u = np.zeros(n + R, bool)
        self.is_u[self.node_n] = lines.schedule.kind == Kind.U
        self.chunk = np.zeros(n + R, np.int64)
        self.chunk[self.node_n] = lines.schedule.chunk
        # Iterations whose Ws a line has finished when it reaches a node.
        self.iterations_done = np.full(n + R, lines.schedule.problem.num_iterations)
        self.iterations_done[self.node_n] = lines.schedule.iteration + (lines.schedule.kind == Kind.U)
        self.lengths = np.unique(lines.duration_n)
        # An op can run once line ``sender_row`` is beyond ``sender_place``.
        self.sender_row, self.sender_place = np.zeros(n + R, np.int64), np.full(n + R, -1)
        reads = np.flatnonzero(lines.sender_n != NONE)
        self.sender_row[self.node_n[reads]] = lines.row_n[lines.sender_n[reads]]
        self.sender_place[self.node_n[reads]] = lines.place_n[lines.sender_n[reads]]
        self.left = self.longest_paths()

    def ready(self, place_SR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the next node of every line, int64[S, R], and whether it can run, bool[S, R]."""
        node_SR = self.first_R + place_SR
        sender_SR = np.take_along_axis(place_SR, self.sender_row[node_SR], axis=1)
        ready_SR = (sender_SR > self.sender_place[node_SR]) & (place_SR < self.end_cR)
        at_update_SR = self.is_u[node_SR]
        if at_update_SR.any():
            ready_SR &= ~at_update_SR | self.lines.all_at_update(at_update_SR, self.chunk[node_SR])
            if not self.lines.schedule.problem.staggered:
                done_SR = self.iterations_done[node_SR]
                ready_SR &= ~at_update_SR | (done_SR == done_SR.min(axis=1, keepdims=True))
        return node_SR, ready_SR

    def steps(self, state_cSR: np.ndarray) -> Iterator[Step]:
        """Yields the options for the next tick, one per distinct op duration."""
        node_SR, ready_SR = self.ready(state_cSR[0])
        duration_SR = np.where(ready_SR, self.duration[node_SR], np.inf)
        # Every op that fits runs. ``possible_S`` rules out ticks that are longer than their longest op.
        for length in self.lengths:
            yield Step(float(length), (duration_SR <= length)[None], (duration_SR == length).any(axis=1))

    def time_left(self, state_cSR: np.ndarray) -> np.ndarray:
        """Estimates the time left from each state by longest paths, float64[S].

        The maximum over lines is a lower bound. A small multiple of the mean breaks ties in favor of states with more
        completed work.
        """
        left_SR = self.left[self.first_R + state_cSR[0]]
        return left_SR.max(axis=1) + 1e-6 * left_SR.mean(axis=1)

    def longest_paths(self) -> np.ndarray:
        """Computes the longest path from each node to the end of the window, ignoring ticks, float64[n + R]."""
        lines, left = self.lines, np.zeros(len(self.duration) + 1)
        reader_n = np.full(len(lines.row_n), -1)
        sent = np.flatnonzero(lines.sender_n != NONE)
        reader_n[lines.sender_n[sent]] = self.node_n[sent]
        for ops in reversed(self.levels):
            nodes = self.node_n[ops]
            ahead = np.maximum(left[nodes + 1], left[reader_n[ops]])
            left[nodes] = lines.longest_together(ops, ahead) + lines.duration_n[ops]
        return left[:-1]

    @cached_property
    def levels(self) -> list[np.ndarray]:
        """Ops that would run in each tick if every tick were long enough for any op."""
        place_SR, levels = self.start_cR.copy(), []
        while (place_SR < self.end_cR).any():
            node_SR, ready_SR = self.ready(place_SR)
            assert ready_SR.any(), "the workers wait for each other in a cycle"
            rows = np.flatnonzero(ready_SR[0])
            levels.append(node_SR[0, rows] - rows)
            place_SR = place_SR + ready_SR
        return levels
