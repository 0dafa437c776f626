"""Event-driven list scheduling of one iteration, which the adaptive planner runs for every policy that it tries.

A micro-batch at a stage has the number x = (d * M + m) * P + p, and its F, B and W are 3x, 3x + 1 and 3x + 2. Plain
lists are several times faster than arrays here, because every step depends on the previous one.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from swift.schedules.ops import Kind
from swift.schedules.problem import Problem

F, B, W = Kind.F, Kind.B, Kind.W


@dataclass(frozen=True)
class Policy:
    """Policy by which free workers choose their next op.

    Attributes:
        executor: pipeline whose worker runs each x.
        rank: priority of each micro-batch d * M + m; the lowest is served first.
        in_flight: target number of micro-batches between F and B for each worker d * P + p. Below it, a waiting F goes
            first, as does a W that frees memory for that F; at or above it, B goes first.
        patience: a W is postponed if a message will arrive before the W has run for this share of its time.
    """

    executor: Sequence[int]
    rank: Sequence[float]
    in_flight: Sequence[float]
    patience: float = 0.0


@dataclass(frozen=True)
class Listing:
    """Schedule of one iteration, as times.

    Attributes:
        start: start of every op 3x + kind.
        first_f: start of each stage's first F.
        end: end of each stage's last W.
    """

    start: list[float]
    first_f: list[float]
    end: list[float]

    def period(self, problem: Problem) -> float:
        """Time after which the next iteration can start in the same way."""
        if not problem.staggered:
            return max(self.end) + problem.costs.t_u
        return max(end - first for first, end in zip(self.first_f, self.end, strict=True)) + problem.costs.t_u


def list_schedule(problem: Problem, policy: Policy) -> Listing:
    """Schedules one iteration greedily by ``policy``: a free worker starts an op as soon as one is ready."""
    return _Simulation(problem, policy).run()


class _Simulation:
    def __init__(self, problem: Problem, policy: Policy):
        costs, self.P = problem.costs, problem.num_stages
        self.policy, self.comm = policy, costs.t_comm
        self.fused = not problem.decoupled
        self.t_f, self.t_w = costs.t_f, costs.t_w
        self.t_b = costs.t_b + costs.t_w if self.fused else costs.t_b
        # While a B runs, its micro-batch holds the larger stash, so room for one stash to grow is always kept.
        self.f_stash, self.w_stash = costs.f_stash, 0.0 if self.fused else costs.w_stash
        self.growth = max(0.0, costs.w_stash - costs.f_stash)
        self.limit = math.inf if problem.memory_limit is None else problem.memory_limit * (1 + 1e-12)
        num_workers, num_x = problem.num_pipelines * self.P, problem.num_pipelines * problem.num_microbatches * self.P
        self.rank = [rank for rank in policy.rank for _ in range(self.P)]
        self.worker = [d * self.P + x % self.P for x, d in enumerate(policy.executor)]
        self.free = [0.0] * num_workers
        self.held = [0.0] * num_workers
        self.flying = [0] * num_workers
        self.f_ready: list[list[tuple[float, int]]] = [[] for _ in range(num_workers)]
        self.b_ready: list[list[tuple[float, int]]] = [[] for _ in range(num_workers)]
        self.w_ready: list[deque[int]] = [deque() for _ in range(num_workers)]
        self.coming: list[list[float]] = [[] for _ in range(num_workers)]  # arrival times of messages in flight
        self.events: list[tuple[float, int]] = []  # (time, op that arrives) or (time, -1 - worker that becomes free)
        self.start = [0.0] * (3 * num_x)
        self.first_f, self.end = [math.inf] * self.P, [0.0] * self.P

    def run(self) -> Listing:
        for x in range(0, len(self.worker), self.P):
            heapq.heappush(self.events, (0.0, 3 * x))
        events, free, worker, rank = self.events, self.free, self.worker, self.rank
        while events:
            now = events[0][0]
            horizon = now * (1 + 1e-12)
            woken = []
            while events and events[0][0] <= horizon:
                code = heapq.heappop(events)[1]
                if code < 0:
                    woken.append(-1 - code)
                    continue
                x, kind = divmod(code, 3)
                w = worker[x]
                heapq.heappush(self.b_ready[w] if kind else self.f_ready[w], (rank[x], x))
                woken.append(w)
            for w in woken:
                if free[w] <= horizon:
                    self.choose(w, now)
        assert all(not waiting for waiting in (*self.f_ready, *self.b_ready, *self.w_ready)), "ops left over"
        return Listing(self.start, self.first_f, self.end)

    def choose(self, w: int, now: float) -> None:
        f_waits, b_waits, w_waits = self.f_ready[w], self.b_ready[w], self.w_ready[w]
        if f_waits:
            room = self.held[w] + self.f_stash + self.growth <= self.limit
            if self.flying[w] < self.policy.in_flight[w]:
                if room:
                    return self.run_f(w, now)
                if w_waits:
                    return self.run_w(w, now)
            if room and not b_waits:
                return self.run_f(w, now)
        if b_waits and self.held[w] + self.growth <= self.limit:
            return self.run_b(w, now)
        if w_waits and not self.waits_for_message(w, now):
            return self.run_w(w, now)
        return None

    def waits_for_message(self, w: int, now: float) -> bool:
        coming = self.coming[w]
        while coming and coming[0] <= now * (1 + 1e-12):
            heapq.heappop(coming)
        return bool(coming) and coming[0] < now + self.policy.patience * self.t_w

    def run_f(self, w: int, now: float) -> None:
        x, p = heapq.heappop(self.f_ready[w])[1], w % self.P
        self.start[3 * x] = now
        self.first_f[p] = min(self.first_f[p], now)
        self.held[w] += self.f_stash
        self.flying[w] += 1
        end = self.occupy(w, now + self.t_f)
        if p + 1 < self.P:
            self.send(x + 1, F, end)
        else:
            heapq.heappush(self.b_ready[w], (self.rank[x], x))

    def run_b(self, w: int, now: float) -> None:
        x, p = heapq.heappop(self.b_ready[w])[1], w % self.P
        self.start[3 * x + B] = now
        self.held[w] += self.w_stash - self.f_stash
        self.flying[w] -= 1
        end = self.occupy(w, now + self.t_b)
        if p:
            self.send(x - 1, B, end)
        if self.fused:
            self.start[3 * x + W] = end - self.t_w
            self.end[p] = max(self.end[p], end)
        else:
            self.w_ready[w].append(x)

    def run_w(self, w: int, now: float) -> None:
        x, p = self.w_ready[w].popleft(), w % self.P
        self.start[3 * x + W] = now
        self.held[w] -= self.w_stash
        self.end[p] = max(self.end[p], self.occupy(w, now + self.t_w))

    def occupy(self, w: int, end: float) -> float:
        self.free[w] = end
        heapq.heappush(self.events, (end, -1 - w))
        return end

    def send(self, x: int, kind: Kind, end: float) -> None:
        arrival, reader = end + self.comm, self.worker[x]
        heapq.heappush(self.events, (arrival, 3 * x + kind))
        if self.policy.patience:
            heapq.heappush(self.coming[reader], arrival)
