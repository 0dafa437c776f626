"""Event-driven list scheduling of one iteration under one policy, the inner loop in the adaptive planner's search.

The j-th micro-batch (see ``microbatch_ids``) at chunk k has the index x = j * (number of chunks) + k, and its F, B and
W are the ops 3x, 3x + 1 and 3x + 2. Plain lists are several times faster than arrays here, because every step depends
on the previous one.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from swift.schedules.problem import Kind, Problem

F, B, W = Kind.F, Kind.B, Kind.W


@dataclass(frozen=True)
class Policy:
    """Rules by which a free worker chooses its next op.

    Attributes:
        executor: pipeline whose worker runs each x.
        rank: priority of each micro-batch, lowest first. On a worker with several chunks, later chunks go first.
        in_flight: target number of micro-batches between F and B, for each worker d * P + p. Below the target a waiting
            F goes first, or a W that frees memory for that F. At or above the target, B goes first.
        patience: a W is postponed if a message will arrive within this fraction of the W's duration.
        reserves: whether a micro-batch's first F on a worker allocates memory for all its chunks there. Otherwise the
            memory only has to be free at that moment, and other micro-batches may take it: either more micro-batches
            fit, or all of them deadlock.
        pace: least time between the starts of two Fs of the first chunk on a worker. The pace carries over to later
            workers: Fs and Bs arrive alternately, and none waits for an op that started early.
        begins: for each worker d * P + p, the time before which it is idle; empty if all workers begin at 0. A worker
            with chunks of several stages can begin an iteration only after the updates of all of them.
    """

    executor: Sequence[int]
    rank: Sequence[float]
    in_flight: Sequence[float]
    patience: float = 0.0
    reserves: bool = True
    begins: Sequence[float] = ()
    pace: float = 0.0


@dataclass(frozen=True)
class Listing:
    """Start times of one iteration's ops.

    Attributes:
        start: start of every op 3x + kind.
        end: end of each chunk's last W.
        update: start of each chunk's U.
        spans: time from the first F to the end of the last W, for each chunk; with staggering, if workers hold several
            chunks, time from the first F to the end of the last U, for each live worker.
        period: time after which the next iteration can repeat the listing; infinite if memory ran out.
    """

    start: list[float]
    end: list[float]
    update: list[float]
    spans: list[float]
    period: float


def microbatch_ids(problem: Problem) -> list[tuple[int, int]]:
    """Lists all micro-batches as (pipeline, index), in ascending order; the position in the list is the number j."""
    return [(d, m) for d, number in enumerate(problem.microbatches) for m in range(number)]


def list_schedule(problem: Problem, policy: Policy) -> Listing:
    """Schedules one iteration greedily: a free worker starts an op, chosen by ``policy``, as soon as an op is ready."""
    return _Simulation(problem, policy).run()


class _Simulation:
    # CPython 3.11 stores the attributes of objects with more than 30 of them in a dict, which slows the loop by 1/8.
    __slots__ = (
        *("problem", "policy", "C", "comm", "fused", "t_f", "t_b", "t_w", "t_u", "f_stash", "w_stash", "limit"),
        *("rank", "worker", "free", "held", "flying", "f_ready", "b_ready", "w_ready", "coming", "events", "times"),
        *("start", "paced", "first", "end", "room", "stash", "f_rank", "share", "joint"),
    )

    def __init__(self, problem: Problem, policy: Policy):
        self.problem, self.C = problem, problem.num_chunks
        self.policy, self.comm = policy, problem.costs.t_comm
        self.fused = not problem.decoupled
        self.t_f, self.t_b, self.t_w, self.t_u = problem.time_4P.tolist()
        # B holds the larger stash while it runs, so every worker reserves memory for one stash to grow.
        self.f_stash, self.w_stash = problem.stash_2P.tolist()
        if self.fused:
            self.t_b = [b + w for b, w in zip(self.t_b, self.t_w, strict=True)]
            self.w_stash = [0.0] * self.C
        limit = math.inf if problem.memory_limit is None else problem.memory_limit * (1 + 1e-12)
        self.limit = [limit - growth for growth in problem.growth_W]
        num_workers, num_x = problem.num_pipelines * problem.num_stages, problem.total_microbatches * self.C
        worker_DP = problem.worker_DP.tolist()
        self.rank = [rank for rank in policy.rank for _ in range(self.C)]
        self.worker = [worker_DP[d][x % self.C] for x, d in enumerate(policy.executor)]
        self.free = [0.0] * num_workers
        self.held = [0.0] * num_workers
        self.flying = [0.0] * num_workers
        self.f_ready: list[list[tuple[float, int]]] = [[] for _ in range(num_workers)]
        self.b_ready: list[list[tuple[float, int]]] = [[] for _ in range(num_workers)]
        self.w_ready: list[deque[int]] = [deque() for _ in range(num_workers)]
        self.coming: list[list[float]] = [[] for _ in range(num_workers)]  # arrival times of messages in flight
        # Time -> ops that arrive, and -1 - w for workers that become free. Uniform pipelines share most event times.
        self.events: dict[float, list[int]] = {}
        self.times: list[float] = []
        self.start = [0.0] * (3 * num_x)
        self.paced = [0.0] * num_workers  # time before which no F of the first chunk starts
        self.first, self.end = [math.inf] * num_workers, [0.0] * self.C
        self.room = [self.f_stash[x % self.C] for x in range(num_x)]
        self.stash, self.f_rank, self.share = self.room, self.rank, [1.0] * num_x
        if not problem.is_plain:
            self.count_chunks_of_workers()
        self.joint = None if problem.is_plain or not problem.staggered or not any(self.t_u) else _Updates(problem)

    def count_chunks_of_workers(self) -> None:
        """Makes an F require memory for all chunks of its micro-batch on the worker, so that later chunks can run."""
        self.f_rank, self.stash, C = list(self.rank), list(self.room), self.C
        # More than any difference of ranks, so that later chunks always go first.
        most = 2 * (max(self.rank) - min(self.rank)) + 1
        for first in range(0, len(self.worker), C):
            indices_by_worker: dict[int, list[int]] = {}
            for x in range(first, first + C):
                indices_by_worker.setdefault(self.worker[x], []).append(x)
            for indices in indices_by_worker.values():
                for position, x in enumerate(indices):
                    self.share[x], self.f_rank[x] = 1.0 / len(indices), self.rank[x] - position * most
                    self.room[x] = sum(self.stash[later] for later in indices[position:])
                if self.policy.reserves:
                    for x in indices:
                        self.room[x] = self.stash[x] = self.room[x] if x == indices[0] else 0.0

    def run(self) -> Listing:
        for x in range(0, len(self.worker), self.C):
            self.expect(0.0, 3 * x)
        for w, begin in enumerate(self.policy.begins):
            if begin > 0:
                self.occupy(w, begin)
        times, free, worker, rank, f_rank = self.times, self.free, self.worker, self.rank, self.f_rank
        f_ready, b_ready, joint, num_workers = self.f_ready, self.b_ready, self.joint, len(free)
        while times:
            now = times[0]
            # Events whose times differ only by rounding errors happen together.
            horizon = now * (1 + 1e-12)
            woken = []
            while times and times[0] <= horizon:
                for code in sorted(self.events.pop(heapq.heappop(times))):
                    if code < 0:
                        # -1 - w: worker w is free. Below these: a chunk's last W has ended, so its Us are due.
                        if code < -num_workers:
                            woken += self.ask(-1 - num_workers - code)
                            continue
                        woken.append(-1 - code)
                        continue
                    x, kind = divmod(code, 3)
                    w = worker[x]
                    if kind:
                        heapq.heappush(b_ready[w], (rank[x], x))
                    else:
                        heapq.heappush(f_ready[w], (f_rank[x], x))
                    woken.append(w)
            for w in woken:
                if free[w] <= horizon and not (joint and self.meet(w, now, horizon)):
                    self.choose(w, now, horizon)
        # Deadlock: micro-batches hold memory that others need. A worker with one chunk can always run a B.
        if any(self.f_ready) or any(self.b_ready) or any(self.w_ready):
            assert not self.problem.is_plain, "ops left over"
            return Listing(self.start, self.end, self.end, [math.inf], math.inf)
        return self.listing()

    def listing(self) -> Listing:
        problem, update = self.problem, self.end
        first = [min(self.first[w] for w in workers) for workers in problem.worker_DP.T.tolist()]
        if not problem.staggered:
            # Us follow the barrier, in the order of chunks. Peers start together, when all have finished earlier Us.
            update, after = [max(self.end)] * self.C, [0.0] * len(self.free)
            for k, workers in enumerate(problem.worker_DP.T.tolist()):
                latest = max(after[w] for w in workers)
                update[k] += latest
                for w in workers:
                    after[w] = latest + self.t_u[k]
            spans = [end - start for start, end in zip(first, self.end, strict=True)]
            return Listing(self.start, self.end, update, spans, max(self.end) + max(after))
        if problem.is_plain:
            spans = [end - start for start, end in zip(first, update, strict=True)]
            return Listing(self.start, self.end, update, spans, max(map(sum, zip(spans, self.t_u, strict=True))))
        update = self.joint.start if self.joint else update
        spans = []
        for d, p in problem.live_workers:
            ends = [update[k] + self.t_u[k] for k in problem.held_by((d, p))]
            w = d * problem.num_stages + p
            spans += [max(ends) - min(self.first[w], max(ends))] if ends else []
        return Listing(self.start, self.end, update, spans, max(spans))

    def ask(self, k: int) -> list[int]:
        """Queues a chunk's Us on all workers that hold it; returns these workers."""
        assert self.joint is not None
        for w in self.joint.holders[k]:
            self.joint.due[w].append(k)
        return self.joint.holders[k]

    def meet(self, w: int, now: float, horizon: float) -> bool:
        """Starts a due U if all its workers are free; returns whether the worker now runs a U or waits for one."""
        joint = self.joint
        assert joint is not None
        for k in joint.due[w]:
            if all(self.free[other] <= horizon for other in joint.holders[k]):
                joint.start[k] = now
                for other in joint.holders[k]:
                    joint.due[other].remove(k)
                    self.occupy(other, now + self.t_u[k])
                return True
        return bool(joint.due[w])

    def choose(self, w: int, now: float, horizon: float) -> None:
        f_waits, b_waits, w_waits = self.f_ready[w], self.b_ready[w], self.w_ready[w]
        if f_waits:
            x = f_waits[0][1]
            room = self.held[w] + self.room[x] <= self.limit[w] and not (x % self.C == 0 and now < self.paced[w])
            # Below the target F goes first; without room for it a W, which frees memory.
            if self.flying[w] < self.policy.in_flight[w]:
                if room:
                    return self.run_f(w, now)
                if w_waits:
                    return self.run_w(w, now)
            # At the target B goes first, but an F beats idling.
            if room and not b_waits:
                return self.run_f(w, now)
        if b_waits and self.held[w] <= self.limit[w]:
            return self.run_b(w, now)
        if w_waits and not (self.policy.patience and self.waits_for_message(w, now, horizon)):
            return self.run_w(w, now)
        return None

    def waits_for_message(self, w: int, now: float, horizon: float) -> bool:
        coming = self.coming[w]
        while coming and coming[0] <= horizon:
            heapq.heappop(coming)
        return bool(coming) and coming[0] < now + self.policy.patience * self.t_w[self.w_ready[w][0] % self.C]

    def run_f(self, w: int, now: float) -> None:
        x = heapq.heappop(self.f_ready[w])[1]
        k = x % self.C
        self.start[3 * x] = now
        if now < self.first[w]:
            self.first[w] = now
        if self.policy.pace and not k:
            self.paced[w] = now + self.policy.pace * (1 - 1e-12)
            self.expect(now + self.policy.pace, -1 - w)  # wakes the worker when its next F may start
        self.held[w] += self.stash[x]
        self.flying[w] += self.share[x]
        end = self.occupy(w, now + self.t_f[k])
        if k + 1 < self.C:
            self.send(w, x + 1, F, end)
        else:  # the last chunk computes the loss: its B can follow at once, without a message
            heapq.heappush(self.b_ready[w], (self.rank[x], x))

    def run_b(self, w: int, now: float) -> None:
        x = heapq.heappop(self.b_ready[w])[1]
        k = x % self.C
        self.start[3 * x + B] = now
        self.held[w] += self.w_stash[k] - self.f_stash[k]
        self.flying[w] -= self.share[x]
        end = self.occupy(w, now + self.t_b[k])
        if k:
            self.send(w, x - 1, B, end)
        if self.fused:
            self.start[3 * x + W] = end - self.t_w[k]
            self.finish(k, end)
        else:
            self.w_ready[w].append(x)

    def run_w(self, w: int, now: float) -> None:
        x = self.w_ready[w].popleft()
        k = x % self.C
        self.start[3 * x + W] = now
        self.held[w] -= self.w_stash[k]
        self.finish(k, self.occupy(w, now + self.t_w[k]))

    def finish(self, k: int, end: float) -> None:
        """Records when a W ends; the end of a chunk's last W makes the chunk's Us due."""
        if end > self.end[k]:
            self.end[k] = end
        if self.joint:
            self.joint.left[k] -= 1
            if not self.joint.left[k]:
                self.expect(end, -1 - len(self.free) - k)

    def occupy(self, w: int, end: float) -> float:
        self.free[w] = end
        self.expect(end, -1 - w)
        return end

    def expect(self, time: float, code: int) -> None:
        """Adds an event at ``time``; see ``events`` for the codes."""
        events = self.events
        if time in events:
            events[time].append(code)
        else:
            events[time] = [code]
            heapq.heappush(self.times, time)

    def send(self, w: int, x: int, kind: Kind, end: float) -> None:
        reader = self.worker[x]
        arrival = end + self.comm if reader != w else end
        self.expect(arrival, 3 * x + kind)
        if self.policy.patience:
            heapq.heappush(self.coming[reader], arrival)


class _Updates:
    """State of Us that take time, which all workers that hold the chunk have to start together.

    Attributes:
        holders: live workers that hold each chunk.
        left: Ws of each chunk that have not started.
        due: for each worker, chunks whose U is due.
        start: start of each chunk's Us.
    """

    def __init__(self, problem: Problem):
        S, stage_DP = problem.num_stages, problem.stage_DP.tolist()
        self.holders = [[d * S + stage_DP[d][k] for d in peers] for k, peers in enumerate(problem.survivors)]
        self.left = [problem.total_microbatches] * problem.num_chunks
        self.due: list[list[int]] = [[] for _ in range(problem.num_pipelines * S)]
        self.start = [0.0] * problem.num_chunks
