"""Scheduling of one iteration by due times: every worker runs its Fs and Bs as nearly in their order as it can.

The op that is due first goes first. While a worker would wait for its input, or for memory, it runs a W, or an F or B
that is due later and does not take memory that the ops before it need. Ws have no due times: they go where a worker
would wait, where memory is short, and at the end.

The j-th micro-batch (see ``names_of``) at chunk k has the number x = j * (number of chunks) + k.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from swift.schedules.ops import Kind
from swift.schedules.planners.policy import names_of
from swift.schedules.problem import Problem
from swift.schedules.sequences.graph import SequencedOp

F, B, W = Kind.F, Kind.B, Kind.W


@dataclass(frozen=True)
class Filling:
    """The choices of a worker where it would wait.

    Attributes:
        patience: it waits if its next input will arrive before another op has run for this share of its time.
        overtakes: whether Fs and Bs that are due later run before Ws, after them, or not at all (None).
    """

    patience: float = 0.5
    overtakes: bool | None = True


def run_by_due_times(
    problem: Problem, executor: Sequence[int], due: Sequence[float], filling: Filling, limit: float
) -> list[list[SequencedOp]] | None:
    """Schedules one iteration.

    Args:
        problem: problem of which one iteration is planned, with a decoupled backward.
        executor: pipeline whose worker runs each x.
        due: time at which F and B of each x, 2x and 2x + 1, are due, in any unit.
        filling: what a worker does where it would wait.
        limit: memory of a worker for stashes.

    Returns:
        What every worker runs, as ``time_round`` takes it; None if memory runs out.
    """
    return _Simulation(problem, executor, due, filling, limit * (1 + 1e-9)).run()


@dataclass
class _Worker:
    """A worker during the simulation.

    Attributes:
        order: its Fs and Bs, 2x and 2x + 1, in the order in which they are due.
        streams: places in ``order`` of the ops of each kind and chunk, which stay in their order, last one first.
        has_run: whether each op has run, by place.
        waiting: xs whose W is to be run.
        free: time at which it is free.
        held: memory of all stashes.
        live: memory of those that await their B.
        sequence: what it has run, 3x + kind.
    """

    order: list[int]
    streams: list[list[int]]
    has_run: list[bool]
    waiting: deque[int] = field(default_factory=deque)
    free: float = 0.0
    held: float = 0.0
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
        self.names, worker_DP = names_of(problem), problem.worker_DP.tolist()
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
        if not all(all(one.has_run) for one in self.workers):
            return None
        return [list(self.named(one)) for one in self.workers]

    def named(self, one: _Worker) -> Iterator[SequencedOp]:
        for op in [*one.sequence, *(3 * x + W for x in one.waiting)]:
            x, kind = divmod(op, 3)
            yield kind, *self.names[x // self.C], x % self.C

    def choose(self, one: _Worker, w: int, now: float) -> None:
        heads = sorted([stream[-1] for stream in one.streams if stream])
        if not heads:
            return None
        head, horizon = one.order[heads[0]], now + 1e-9
        is_short = not head % 2 and one.held + self.f_stash[head // 2 % self.C] > self.limit
        if self.ready[head] <= horizon:
            if not is_short:
                return self.run_op(one, w, heads[0], now)
            if one.waiting:
                return self.run_w(one, w, now)
        gap = math.inf if is_short else self.ready[head] - now
        if self.overtakes and self.overtake(one, w, heads, now, gap):
            return None
        if one.waiting and gap >= self.patience * self.times[W][one.waiting[0] % self.C] - 1e-9:
            return self.run_w(one, w, now)
        if self.overtakes is False:
            self.overtake(one, w, heads, now, gap)
        return None

    def overtake(self, one: _Worker, w: int, heads: list[int], now: float, gap: float) -> bool:
        """Runs the first op that can run before those which are due sooner; False if there is none."""
        for place in heads[1:]:
            x, kind = divmod(one.order[place], 2)
            k = x % self.C
            if (
                self.ready[2 * x + kind] <= now + 1e-9
                and gap >= self.patience * self.times[kind][k] - 1e-9
                and (kind == B or self.has_room(one, heads[0], place, self.f_stash[k]))
            ):
                self.run_op(one, w, place, now)
                return True
        return False

    def has_room(self, one: _Worker, first: int, place: int, stash: float) -> bool:
        """Whether an F leaves the ops that it overtakes the memory that they need, if Ws run in time."""
        if one.held + stash > self.limit:
            return False
        live, order, has_run = one.live + stash, one.order, one.has_run
        for earlier in range(first, place):
            if not has_run[earlier]:
                x, kind = divmod(order[earlier], 2)
                live += -self.f_stash[x % self.C] if kind else self.f_stash[x % self.C]
                if live > self.limit:
                    return False
        return True

    def run_op(self, one: _Worker, w: int, place: int, now: float) -> None:
        x, kind = divmod(one.order[place], 2)
        k = x % self.C
        one.has_run[place] = True
        next(stream for stream in one.streams if stream and stream[-1] == place).pop()
        end = self.occupy(one, w, 3 * x + kind, now + self.times[kind][k])
        stash = self.f_stash[k]
        if kind:
            one.held += self.w_stash[k] - stash
            one.live -= stash
            one.waiting.append(x)
            if k:
                self.send(w, 2 * x - 1, end)
            return
        one.held += stash
        one.live += stash
        if k + 1 < self.C:
            self.send(w, 2 * x + 2, end)
        else:
            self.ready[2 * x + 1] = end

    def run_w(self, one: _Worker, w: int, now: float) -> None:
        x = one.waiting.popleft()
        one.held -= self.w_stash[x % self.C]
        self.occupy(one, w, 3 * x + W, now + self.times[W][x % self.C])

    def occupy(self, one: _Worker, w: int, op: int, end: float) -> float:
        one.sequence.append(op)
        one.free = end
        heapq.heappush(self.events, (end, w))
        return end

    def send(self, w: int, op: int, end: float) -> None:
        """Passes an output on to the op that reads it."""
        reader = self.worker[op // 2]
        arrival = self.ready[op] = end + self.comm * (reader != w)
        heapq.heappush(self.events, (arrival, reader))
