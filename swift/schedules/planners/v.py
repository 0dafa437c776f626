"""Planner for the V shape: each worker holds two runs of blocks, stage 0 the first and the last, and so on inward.

A micro-batch visits every worker twice. On a worker whose earlier chunk has long-lived stashes, those of the later
chunk are short-lived. A candidate consists of times at which Fs and Bs are due, and a rule for filling idle time.
Candidates are:

- the warm-up and alternation of ZB-V (arXiv 2401.10241, section 6);
- building blocks that repeat for every micro-batch, such as V-Half and V-Min (arXiv 2405.15362, section 3);
- small random changes to the best candidates.

The candidate with the shortest period wins, as computed by ``time_round`` for the resulting order of ops. If it misses
the lower bound, the plan of ``adaptive`` for the same chunks is considered, too.

A worker runs the op that is due first. While it would wait for input or memory, it runs a W, or an F or B that is due
later and takes no memory that the ops before it need. Ws have no due times: they fill idle time, free memory when it
runs short, and otherwise come at the end.

Shape suffixes: P stages, C = 2P chunks, M micro-batches (the maximum over pipelines), J micro-batches of all pipelines
together. The j-th micro-batch (see ``microbatch_ids``) at chunk k has the index x = j * (number of chunks) + k.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from swift.errors import SettingError
from swift.schedules.bounds import tight_bound
from swift.schedules.planners.adaptive import adaptive_round
from swift.schedules.planners.list_scheduling import microbatch_ids
from swift.schedules.planners.names import v_shape
from swift.schedules.planners.search import order_rerouted, reroute
from swift.schedules.problem import Kind, Problem
from swift.schedules.schedule import Round, Schedule, fits
from swift.schedules.sequences import SequencedOp, time_round

F, B, W = Kind.F, Kind.B, Kind.W
_TURN = 6.0
"""Ops per micro-batch on a worker, the unit of time in building blocks."""
_V_HALF = (6, (2, 1, 2, 1), (1, 1, 2)), (6, (2, 1, 2, 1), (1, 4, 2))
_V_MIN = (4, (1, 1, 1, 1), (1, 1, 1)), (4, (1, 1, 1, 1), (1, 3, 1))
"""Building blocks, as arguments of ``_block``. The two variants differ in a gap: no two ops may share a slot."""
_LAGS = ((1, 1, 1, 1), (2, 1, 2, 1), (1, 2, 1, 2), (1, 3, 3, 1), (1, 2, 2, 1), (3, 1, 3, 1))
"""Proportions of the lags from stage to stage: F on the first run, F on the second, B on the second, B on the first."""
_PLACES = (None, 0.0, 0.5, 1.0)
_SUMS = (4, 5, 6, 7, 8, 9, 10, 12, 14)
_GAPS = ((1, 4, 2), (1, 1, 4), (1, 1, 1), (1, 3, 1))
"""Times between the starts of two ops: both Fs on the last stage; the last chunk's F and B, on stage 0; and both Bs on
the last stage."""
_MAX_OPS = 150_000
"""Number of ops that all trials may schedule, which takes about a second; three times as many with failures, when all
pipelines have to be planned."""
_LEAST_TRIALS, _MOST_TRIALS = 40, 300
_SHARE_OF_FIRST = 0.4
_NUM_LEADERS = 3
_MESSAGES = (0, 2, 4)
"""Numbers of messages to reserve memory for, used by trials in turn, if memory is limited."""


@dataclass(frozen=True)
class Filling:
    """A rule by which a worker fills time in which it would wait.

    Attributes:
        patience: the worker waits if its next input arrives within this fraction of the filling op's duration.
        overtakes: True if Fs and Bs that are due later run before Ws, False if they run after Ws, None if they do not
            fill time.
    """

    patience: float = 0.5
    overtakes: bool | None = True


def _schedule_by_due_time(
    problem: Problem, executor: Sequence[int], due: Sequence[float], filling: Filling, limit: float
) -> list[list[SequencedOp]] | None:
    """Simulates one iteration in the order of due times.

    Args:
        problem: problem with a decoupled backward pass.
        executor: pipeline whose worker runs each x.
        due: times at which F and B of each x are due, at 2x and 2x + 1; only their order matters.
        filling: rule by which workers fill idle time.
        limit: limit on the stash memory of a worker.

    Returns:
        Each worker's ops in order, as arguments of ``time_round``, or None if memory runs out.
    """
    return _Simulation(problem, executor, due, filling, limit * (1 + 1e-9)).run()


@dataclass
class _Worker:
    """State of a worker during the simulation.

    Attributes:
        order: Fs and Bs of the worker (2x and 2x + 1), by due time.
        streams: remaining positions in ``order`` for each (kind, chunk), last one first. Ops of a stream run in order.
        has_run: whether each op in ``order`` has run.
        waiting: xs whose W has not run yet.
        free: time from which the worker is free.
        stash_memory: memory of all stashes.
        live: memory of stashes whose B has not run yet.
        sequence: ops (3x + kind) that have run, in order.
    """

    order: list[int]
    streams: list[list[int]]
    has_run: list[bool]
    waiting: deque[int] = field(default_factory=deque)
    free: float = 0.0
    stash_memory: float = 0.0
    live: float = 0.0
    sequence: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, order: list[int], num_chunks: int) -> "_Worker":
        streams: dict[tuple[int, int], list[int]] = {}
        for place in reversed(range(len(order))):
            x, kind = divmod(order[place], 2)
            streams.setdefault((kind, x % num_chunks), []).append(place)
        return cls(order, list(streams.values()), [False] * len(order))


class _Simulation:
    def __init__(self, problem: Problem, executor: Sequence[int], due: Sequence[float], filling: Filling, limit: float):
        self.C, self.comm, self.limit = problem.num_chunks, problem.costs.t_comm, limit
        self.patience, self.overtakes = filling.patience, filling.overtakes
        self.names, worker_DP = microbatch_ids(problem), problem.worker_DP.tolist()
        self.worker = [worker_DP[d][x % self.C] for x, d in enumerate(executor)]
        orders: list[list[int]] = [[] for _ in range(problem.num_pipelines * problem.num_stages)]
        for op in sorted(range(len(due)), key=due.__getitem__):
            orders[self.worker[op // 2]].append(op)
        self.workers = [_Worker.of(order, self.C) for order in orders]
        self.times = problem.time_4P[: Kind.U].tolist()
        self.f_stash, self.w_stash = problem.stash_2P.tolist()
        self.ready = [math.inf] * len(due)
        self.ready[:: 2 * self.C] = [0.0] * len(self.names)
        self.events = [(0.0, w) for w, order in enumerate(orders) if order]

    def run(self) -> list[list[SequencedOp]] | None:
        while self.events:
            now, w = heapq.heappop(self.events)
            if self.workers[w].free <= now:
                self.choose(self.workers[w], w, now)
        if not all(all(worker.has_run) for worker in self.workers):
            return None
        return [list(self.named(worker)) for worker in self.workers]

    def named(self, worker: _Worker) -> Iterator[SequencedOp]:
        for op in [*worker.sequence, *(3 * x + W for x in worker.waiting)]:
            x, kind = divmod(op, 3)
            yield kind, *self.names[x // self.C], x % self.C

    def choose(self, worker: _Worker, w: int, now: float) -> None:
        heads = sorted([stream[-1] for stream in worker.streams if stream])
        if not heads:
            return None
        head, horizon = worker.order[heads[0]], now + 1e-9
        is_short = not head % 2 and worker.stash_memory + self.f_stash[head // 2 % self.C] > self.limit
        if self.ready[head] <= horizon:
            if not is_short:
                return self.run_op(worker, w, heads[0], now)
            if worker.waiting:
                return self.run_w(worker, w, now)
        gap = math.inf if is_short else self.ready[head] - now
        if self.overtakes and self.overtake(worker, w, heads, now, gap):
            return None
        if worker.waiting and gap >= self.patience * self.times[W][worker.waiting[0] % self.C] - 1e-9:
            return self.run_w(worker, w, now)
        if self.overtakes is False:
            self.overtake(worker, w, heads, now, gap)
        return None

    def overtake(self, worker: _Worker, w: int, heads: list[int], now: float, gap: float) -> bool:
        """Runs the first op with a later due time that is ready and fits into the gap; returns False if none does."""
        for place in heads[1:]:
            x, kind = divmod(worker.order[place], 2)
            k = x % self.C
            if (
                self.ready[2 * x + kind] <= now + 1e-9
                and gap >= self.patience * self.times[kind][k] - 1e-9
                and (kind == B or self.has_room(worker, heads[0], place, self.f_stash[k]))
            ):
                self.run_op(worker, w, place, now)
                return True
        return False

    def has_room(self, worker: _Worker, first: int, place: int, stash: float) -> bool:
        """Returns whether an F leaves enough memory for the ops that it overtakes, assuming that Ws run in time."""
        if worker.stash_memory + stash > self.limit:
            return False
        live, order, has_run = worker.live + stash, worker.order, worker.has_run
        for earlier in range(first, place):
            if not has_run[earlier]:
                x, kind = divmod(order[earlier], 2)
                live += -self.f_stash[x % self.C] if kind else self.f_stash[x % self.C]
                if live > self.limit:
                    return False
        return True

    def run_op(self, worker: _Worker, w: int, place: int, now: float) -> None:
        x, kind = divmod(worker.order[place], 2)
        k = x % self.C
        worker.has_run[place] = True
        next(stream for stream in worker.streams if stream and stream[-1] == place).pop()
        end = self.occupy(worker, w, 3 * x + kind, now + self.times[kind][k])
        stash = self.f_stash[k]
        if kind:
            worker.stash_memory += self.w_stash[k] - stash
            worker.live -= stash
            worker.waiting.append(x)
            if k:
                self.send(w, 2 * x - 1, end)
            return
        worker.stash_memory += stash
        worker.live += stash
        if k + 1 < self.C:
            self.send(w, 2 * x + 2, end)
        else:
            self.ready[2 * x + 1] = end

    def run_w(self, worker: _Worker, w: int, now: float) -> None:
        x = worker.waiting.popleft()
        worker.stash_memory -= self.w_stash[x % self.C]
        self.occupy(worker, w, 3 * x + W, now + self.times[W][x % self.C])

    def occupy(self, worker: _Worker, w: int, op: int, end: float) -> float:
        worker.sequence.append(op)
        worker.free = end
        heapq.heappush(self.events, (end, w))
        return end

    def send(self, w: int, op: int, end: float) -> None:
        """Records the arrival of an output at the op that reads it, and wakes that op's worker then."""
        reader = self.worker[op // 2]
        arrival = self.ready[op] = end + self.comm * (reader != w)
        heapq.heappush(self.events, (arrival, reader))


_FILLINGS = tuple(Filling(*each) for each in ((1.0, True), (0.5, True), (1.0, False), (0.0, True), (0.5, False)))


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Due times of ops, and a rule for filling idle time.

    Attributes:
        is_in_turn: True for the order of ZB-V, False for a building block that repeats for every micro-batch.
        offset_2C: due times of F and B at each chunk for the first micro-batch; for ZB-V, delays added to its order.
        filling: rule by which workers fill idle time.
        interval: time between consecutive micro-batches.
        place: position of re-routed micro-batches among a worker's own, see ``order_rerouted``.
    """

    is_in_turn: bool
    offset_2C: np.ndarray
    filling: Filling
    interval: float = _TURN
    place: float | None = None

    def due(self, problem: Problem, executor: Sequence[int]) -> list[float]:
        """Computes the due times of F and B for every x."""
        rank_J = np.array(order_rerouted(problem, executor, self.place))
        due_JC2 = rank_J[:, None, None] * self.interval + self.offset_2C.T
        if self.is_in_turn:
            # Re-routed micro-batches may have fractional ranks: they fall between two of the worker's own.
            near_J = np.clip(np.floor(rank_J).astype(int), 0, problem.most_microbatches - 1)
            due_JC2 += _in_turn(problem)[near_J] - near_J[:, None, None] * self.interval
        return due_JC2.ravel().tolist()


def v(problem: Problem) -> Schedule:
    """Plans a problem whose workers hold two chunks each, in a V.

    Raises:
        SettingError: the chunks are not in a V.
    """
    if set(map(tuple, problem.stage_DP.tolist())) != {v_shape(problem.num_stages)}:
        raise SettingError(
            "Problem.stage_of_chunk",
            problem.stage_of_chunk,
            "v plans chunks in a V, 0, 1, ... and back, the same ones in all pipelines",
        )
    return Schedule.planned(problem, "v", _best_round)


def _best_round(problem: Problem) -> Round:
    target = tight_bound(problem) * (1 + 1e-9)
    best = _searched(problem, target) if problem.decoupled and problem.num_stages > 1 else None
    if best is None or best.period > target:
        other = adaptive_round(problem, _MAX_OPS if best else None)
        best = other if best is None or other.period < best.period * (1 - 1e-12) else best
    return best


def _searched(problem: Problem, target: float) -> Round | None:
    """Finds the best plan among initial candidates and random changes to them, or None if none fits in memory."""
    drained, executor, source = problem.if_drained(), reroute(problem), random.Random(0)
    max_ops = 3 * _MAX_OPS if problem.failed else _MAX_OPS
    num_trials = min(max(_LEAST_TRIALS, max_ops // problem.num_ops), _MOST_TRIALS)
    leaders: list[tuple[float, _Candidate]] = []
    best: Round | None = None
    first = itertools.islice(_first_candidates(problem), max(1, int(num_trials * _SHARE_OF_FIRST)))
    for trial, candidate in enumerate(
        itertools.islice(itertools.chain(first, _changes(problem, leaders, source)), num_trials)
    ):
        plan = _round_of(drained, executor, candidate, trial)
        if plan is None:
            continue
        if best is None or plan.period < best.period * (1 - 1e-12):
            best = plan
            if best.period <= target:
                break
        leaders.insert(0, (plan.period, candidate))  # ahead of its equals: drifting on a plateau helps
        leaders.sort(key=lambda leader: leader[0])
        del leaders[_NUM_LEADERS:]
    return best


def _round_of(problem: Problem, executor: Sequence[int], candidate: _Candidate, trial: int) -> Round | None:
    """Plans a round with the due times of a candidate; returns None if memory runs out."""
    costs, limit = problem.costs, math.inf if problem.memory_limit is None else problem.memory_limit
    if costs.inbox and limit < math.inf:
        limit -= _MESSAGES[trial % len(_MESSAGES)] * costs.inbox
    sequences = _schedule_by_due_time(problem, executor, candidate.due(problem, executor), candidate.filling, limit)
    if sequences is None:
        return None
    executor_DMP = np.full((problem.num_pipelines, problem.most_microbatches, problem.num_chunks), -1, np.int32)
    d, m = np.array(microbatch_ids(problem)).T
    executor_DMP[d, m] = np.array(executor, np.int32).reshape(-1, problem.num_chunks)
    plan = time_round(problem, executor_DMP, sequences)
    # Messages, and stashes that grow during B, take memory at times that are known only now.
    is_counted = not costs.inbox and not (problem.stash_2P[1] > problem.stash_2P[0]).any()
    return plan if is_counted or fits(problem, plan) else None


def _first_candidates(problem: Problem) -> Iterator[_Candidate]:
    """Yields ZB-V, V-Half and V-Min, then building blocks, starting with those whose memory is closest to the limit."""
    target_lag = 6 * (problem.memory_limit or math.inf) / float(problem.stash_2P[0].max()) / problem.num_stages
    blocks = sorted(itertools.product(_SUMS, _LAGS, _GAPS), key=lambda block: abs(block[0] - target_lag))
    nothing_2C, intervals = np.zeros((2, problem.num_chunks)), _intervals(problem)
    for filling in _FILLINGS:
        yield _Candidate(True, nothing_2C, filling)
        for block, interval in itertools.product((*_V_HALF, *_V_MIN), intervals):
            yield _Candidate(False, _block(problem, *block), filling, interval)
    for number, block in enumerate(blocks):
        yield _Candidate(False, _block(problem, *block), _FILLINGS[number % 2], intervals[number // 2 % len(intervals)])


def _intervals(problem: Problem) -> list[float]:
    """Lists times between micro-batches: for workers without re-routed micro-batches, and for the most loaded one."""
    most = max(problem.most_loaded(len(peers)) for peers in problem.survivors)
    return sorted({_TURN, _TURN * most / problem.most_microbatches}, reverse=True)


def _changes(problem: Problem, leaders: list[tuple[float, _Candidate]], source: random.Random) -> Iterator[_Candidate]:
    """Yields random changes to the current leaders."""
    intervals = _intervals(problem)
    while leaders:
        candidate = leaders[source.randrange(len(leaders))][1]
        for _ in range(source.choice((1, 1, 2, 3))):
            candidate = _change(candidate, intervals, source)
        yield candidate


def _change(candidate: _Candidate, intervals: Sequence[float], source: random.Random) -> _Candidate:
    way = source.random()
    if way < 0.15:
        return replace(candidate, filling=source.choice(_FILLINGS))
    if way < 0.3 and len(intervals) > 1:
        return replace(candidate, interval=source.choice(intervals), place=source.choice(_PLACES))
    offset_2C = candidate.offset_2C.copy()
    P = offset_2C.shape[1] // 2
    # Move one kind of op on one run of blocks: at all stages, at one, or progressively along the pipeline.
    kind, run, p = source.randrange(2), source.randrange(2), source.randrange(P)
    chunks = slice(run * P, (run + 1) * P)
    delta, way = source.choice((-3.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0)), source.random()
    if way < 0.4:
        offset_2C[kind, chunks] += delta
    elif way < 0.7:
        offset_2C[kind, run * P + p] += delta
    else:
        offset_2C[kind, chunks] += delta * np.arange(P) / P * source.choice((1, 2))
    return replace(candidate, offset_2C=offset_2C)


def _block(problem: Problem, total: float, lags: Sequence[int], gaps: Sequence[int]) -> np.ndarray:
    """Computes a building block: due times of F and B for each chunk, float64[2, C].

    Args:
        problem: problem to plan, which determines the number of stages.
        total: sum of the four lags from stage to stage; a larger sum needs more memory.
        lags: proportions of the lags, see ``_LAGS``.
        gaps: see ``_GAPS``.
    """
    P = problem.num_stages
    inward, outward = np.arange(P), np.arange(P)[::-1]
    lag = [total / sum(lags) * each for each in lags]
    starts = np.cumsum([0.0, *(each * (P - 1) + gap for each, gap in zip(lag, gaps, strict=False))])
    first_f, last_f, last_b, first_b = (
        start + each * way for start, each, way in zip(starts, lag, (inward, outward, inward, outward), strict=True)
    )
    return np.array([[*first_f, *last_f[::-1]], [*first_b, *last_b[::-1]]])


def _in_turn(problem: Problem) -> np.ndarray:
    """Computes the position of each F and B in its stage's ZB-V order, float64[M, C, 2]."""
    P, M, C = problem.num_stages, problem.most_microbatches, problem.num_chunks
    place_MC2 = np.zeros((M, C, 2))
    for p in range(P):
        first, last = p, C - 1 - p
        ops = [(F, first)] * (2 * (P - p) - 1) + [(F, last), (F, first)] * p + [(F, last), (B, last)] * (P - p)
        ops += [(F, first), (B, first), (F, last), (B, last)] * M + [(B, first), (B, last)] * M
        done: dict[tuple[int, int], int] = {}
        for kind, k in ops:
            m = done.get((kind, k), 0)
            if m < M and (kind == F or m < done.get((F, k), 0)):
                done[kind, k] = m + 1
                place_MC2[m, k, kind] = sum(done.values())
    return place_MC2
