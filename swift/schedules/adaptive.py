"""ReCycle's planner (placeholder body for the first end-to-end run; the interface stays)."""

import heapq
import math

import numpy as np

from swift.schedules.problem import Problem
from swift.schedules.schedule import Round, Schedule


def adaptive(problem: Problem) -> Schedule:
    """A schedule of the live workers: failed workers' micro-batches run on their peers."""
    return Schedule.from_round(problem, "adaptive", _greedy(problem))


def _greedy(pr: Problem) -> Round:
    c = pr.costs
    D, M, P = pr.num_pipelines, pr.num_microbatches, pr.num_stages
    dur = (c.t_f, c.t_b, c.t_w)
    comm = c.t_comm
    limit = pr.memory_limit if pr.memory_limit is not None else math.inf
    nw = D * P
    free, held, load = [0.0] * nw, [0.0] * nw, [0] * nw
    executor = [-1] * (D * M * P)
    start = [0.0] * (3 * D * M * P)
    ready: list = [([], [], []) for _ in range(nw)]
    for p in range(P):
        for d in pr.survivors[p]:
            load[d * P + p] = M
        for m in range(M):
            for d in range(D):
                x = (d * M + m) * P + p
                if d in pr.survivors[p]:
                    executor[x] = d * P + p
                else:
                    w = min((load[e * P + p], (e - d) % D, e) for e in pr.survivors[p])[2] * P + p
                    load[w] += 1
                    executor[x] = w
    heap: list = []
    for x in range(0, D * M * P, P):
        heapq.heappush(heap, (0.0, 0, executor[x], 3 * x))
    end_p, first = [0.0] * P, [math.inf] * P
    while heap:
        t = heap[0][0]
        woken = set()
        while heap and heap[0][0] <= t:
            _, _, w, op = heapq.heappop(heap)
            if op >= 0:
                heapq.heappush(ready[w][op % 3], ((op // 3 // P) % M, op))
            woken.add(w)
        for w in sorted(woken):
            if free[w] > t:
                continue
            r, p = ready[w], w % P
            fits = held[w] + max(c.f_stash, c.w_stash) <= limit
            k = next((k for k in (1, 0, 2) if r[k] and (k != 0 or fits)), None)
            if k is None:
                continue
            op = heapq.heappop(r[k])[1]
            start[op] = t
            e = free[w] = t + dur[k]
            first[p] = min(first[p], t)
            heapq.heappush(heap, (e, 1, w, -1))
            x = op // 3
            if k == 0:
                held[w] += max(c.f_stash, c.w_stash)
                heapq.heappush(heap, (e + comm, 0, executor[x + 1], 3 * x + 3) if p + 1 < P else (e, 0, w, op + 1))
            elif k == 1:
                if p > 0:
                    heapq.heappush(heap, (e + comm, 0, executor[x - 1], 3 * (x - 1) + 1))
                heapq.heappush(heap, (e, 0, w, op + 1))
            else:
                held[w] -= max(c.f_stash, c.w_stash)
                end_p[p] = max(end_p[p], e)
    update = np.array(end_p) if pr.staggered else np.full(P, max(end_p))
    period = max(u + c.t_u - (f if pr.staggered else 0.0) for u, f in zip(update, first, strict=True))
    start_3 = np.array(start).reshape(D, M, P, 3).transpose(3, 0, 1, 2)
    return Round(np.array(executor, np.int32).reshape(D, M, P) // P, start_3, update, float(period))
