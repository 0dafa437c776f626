"""Re-routing (ReCycle): which peer runs each micro-batch of a failed worker, and when among its own.

The peers of a worker serve its stage in other pipelines, with the same weights, so any of them may run the micro-batch.
``reroute`` gives it to the least loaded, ``search`` tries other divisions; the plan carries the choice to the step.
"""

import random
from collections.abc import Sequence

from swift.schedules.planners.policy import names_of
from swift.schedules.problem import Problem


def reroute(problem: Problem) -> list[int]:
    """Assigns micro-batches: live workers keep theirs, those of failed workers go to the least loaded peer."""
    D, C = problem.num_pipelines, problem.num_chunks
    names = names_of(problem)
    executor = [d for d, _ in names for _ in range(C)]
    number = {name: j for j, name in enumerate(names)}
    # Where pipelines are alike, every micro-batch of a chunk is as much work as any other, and own work is equal.
    work = [1.0] * C if problem.is_alike else problem.time_4P[:3].sum(axis=0).tolist()
    load_of = [0.0] * (D * problem.num_stages)
    if not problem.is_alike:
        for d, _ in names:
            for k, w in enumerate(problem.worker_DP[d].tolist()):
                load_of[w] += work[k]
    for k, peers in enumerate(problem.survivors):
        workers = problem.worker_DP[:, k].tolist()
        load = dict.fromkeys(workers, 0.0) if problem.is_alike else load_of
        down = [d for d in range(D) if d not in peers]
        for m in range(problem.most_microbatches):
            for d in down:
                if (d, m) in number:
                    peer = min(peers, key=lambda peer: (load[workers[peer]], (peer - d) % D))
                    load[workers[peer]] += work[k]
                    executor[number[d, m] * C + k] = peer
    return executor


def line_up(problem: Problem, executor: Sequence[int], place: float | None) -> list[float]:
    """Ranks every micro-batch: by its index, or, if its worker failed, at a position among its host's own.

    Args:
        problem: problem, whose micro-batches are numbered as by ``names_of``.
        executor: pipeline that runs every micro-batch at every chunk.
        place: position among the host's own, from 0 (early) to 1 (late); None to rank by index like all others.
    """
    D, M, C, names = problem.num_pipelines, problem.most_microbatches, problem.num_chunks, names_of(problem)
    # Pipelines with fewer micro-batches take as long for them.
    rank = [m * (M / problem.microbatches[d]) + d / D for d, m in names]
    if place is None:
        return rank
    by_index = sorted(range(len(names)), key=lambda j: names[j][1])
    for k, peers in enumerate(problem.survivors):
        guests: dict[int, list[int]] = {}
        for j in by_index:
            if names[j][0] not in peers:
                guests.setdefault(executor[j * C + k], []).append(j)
        for group in guests.values():
            for index, number in enumerate(group):
                rank[number] = (index + place) * M / len(group) + names[number][0] / D - 1.0 / D
    return rank


def swap_hosts(problem: Problem, executor: Sequence[int], chunk: int, source: random.Random) -> list[int]:
    """Swaps the hosts of two re-routed micro-batches at a chunk."""
    C, peers = problem.num_chunks, problem.survivors[chunk]
    guests = [j * C + chunk for j, (d, _) in enumerate(names_of(problem)) if d not in peers]
    if not guests:
        return list(executor)
    changed, (one, other) = list(executor), (source.choice(guests), source.choice(guests))
    changed[one], changed[other] = changed[other], changed[one]
    return changed
