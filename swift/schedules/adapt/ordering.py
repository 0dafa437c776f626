"""Schedules for a mixture, by list scheduling under many policies in which workers may begin late.

A worker with chunks of several stages can begin an iteration only after all of them are updated. If it began together
with the others, its period would be longer by the time between these updates. Each policy is therefore tried again with
every worker beginning as late as the updates of the previous try allow. The resulting order is timed exactly
(``time_round``).
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from swift.schedules.adapt.mixture import BlockMixture
from swift.schedules.planners.list_scheduling import Listing, Policy, list_schedule, microbatch_ids
from swift.schedules.planners.search import first_policies
from swift.schedules.problem import Kind, Problem
from swift.schedules.schedule import Round, fits
from swift.schedules.sequences import time_round

_STRETCHES = (1.0, 1.01, 1.03)
"""Periods to aim for, as multiples of ``_goal``."""
_MOST_TIMED = 2


@dataclass(frozen=True, eq=False)
class _Try:
    listing: Listing
    policy: Policy


def schedule_mixture(mixture: BlockMixture, max_ops: int) -> tuple[Round | None, int]:
    """Searches for a short period for a mixture's reduced problem.

    Args:
        mixture: layout and division of micro-batches.
        max_ops: number of ops that all tries together may schedule; at least three policies are tried.

    Returns:
        The best round, or None if no try fits in memory, and the number of ops scheduled.
    """
    problem = mixture.reduced
    costs, limit = problem.costs, problem.memory_limit
    if limit is None or not costs.inbox:
        return _best(mixture, problem, max_ops)
    # How long messages occupy inboxes is known only after scheduling, so reserve some memory for them.
    used = 0
    for messages in (1, 2, 4, 8):
        least = problem.microbatch_peak - costs.inbox
        limit_of_stashes = max(least, limit - messages * costs.inbox)
        stashes = replace(problem, costs=replace(costs, inbox=0.0), memory_limit=limit_of_stashes)
        plan, ops = _best(mixture, stashes, max_ops // 3)
        used += ops
        if plan is not None and fits(problem, plan):
            return plan, used
    return None, used


def _best(mixture: BlockMixture, problem: Problem, max_ops: int) -> tuple[Round | None, int]:
    goal = _goal(mixture, problem)
    close = goal * (1 + 1e-9)
    num_tries = max(3, max_ops // problem.num_ops)
    tries: list[_Try] = []

    def is_done() -> bool:
        return len(tries) >= num_tries or tries[0].listing.period <= close

    for policy in itertools.islice(_policies(mixture, problem), max(2, num_tries // 3)):
        tries.append(_Try(list_schedule(problem, policy), policy))
        tries.sort(key=lambda attempt: attempt.listing.period)
        if is_done():
            break
    for stretch, attempt in itertools.product(_STRETCHES, tries[:3]):
        if is_done() or attempt.listing.period == math.inf:
            break
        for later in _later(problem, attempt, goal * stretch):
            tries.append(later)
            if len(tries) >= num_tries or later.listing.period <= close * stretch:
                break
        tries.sort(key=lambda attempt: attempt.listing.period)
    used = len(tries) * problem.num_ops
    if tries[0].listing.period == math.inf:
        return None, used
    rounds = [_listed(problem, mixture, tries[0].listing)]
    if tries[0].listing.period > close * (1.005 if used > max_ops else 1.0):
        rounds += [
            _timed(problem, mixture, attempt) for attempt in tries[:_MOST_TIMED] if attempt.listing.period < math.inf
        ]
    return min(rounds, key=lambda plan: plan.period), used


def _goal(mixture: BlockMixture, problem: Problem) -> float:
    updates = [sum(problem.time_4P[Kind.U, k] for k in problem.held_by(worker)) for worker in problem.live_workers]
    return mixture.load + min(updates, default=0.0)


def _later(problem: Problem, attempt: _Try, target: float) -> Iterator[_Try]:
    """Retries a policy with every worker beginning ``target`` before its chunks' last update ends."""
    begins = [0.0] * (problem.num_pipelines * problem.num_stages)
    for index in range(4):
        update = attempt.listing.update
        new_begins = list(begins)
        for d, p in problem.live_workers:
            ends = [update[k] + problem.time_4P[Kind.U, k] for k in problem.held_by((d, p))]
            at = d * problem.num_stages + p
            new_begins[at] = float(max(begins[at] if index % 2 else 0.0, max(ends, default=0.0) - target))
        if new_begins == begins:
            return
        begins = new_begins
        policy = replace(attempt.policy, begins=begins)
        attempt = _Try(list_schedule(problem, policy), policy)
        if attempt.listing.period == math.inf:
            return
        yield attempt


def _policies(mixture: BlockMixture, problem: Problem) -> Iterator[Policy]:
    """Yields policies with the mixture's executors, the most promising first."""
    places = (None, 0.5, 0.0) if mixture.num_routed else (None,)
    seen = set()
    for policy in first_policies(problem):
        choice = tuple(policy.in_flight), policy.patience, policy.reserves
        if choice not in seen:
            seen.add(choice)
            for place in places:
                yield replace(policy, executor=mixture.executor, rank=_ranks(mixture, problem, place))


def _ranks(mixture: BlockMixture, problem: Problem, place: float | None) -> list[float]:
    """Ranks micro-batches by index; re-routed ones are spread evenly among the others.

    Args:
        mixture: mixture with the executors.
        problem: reduced problem of the mixture.
        place: offset of the re-routed micro-batches, from 0 (early) to 1 (late); None to rank them by index.
    """
    D, M, K = problem.num_pipelines, problem.most_microbatches, problem.num_chunks
    rank = [m * (M / problem.microbatches[d]) + d / D for d, m in microbatch_ids(problem)]
    if place is not None:
        routes_JK = np.array(mixture.executor).reshape(-1, K)
        routed = np.flatnonzero(np.ptp(routes_JK, axis=1)).tolist()
        for index, j in enumerate(routed):
            rank[j] = (index + place) * M / len(routed) - 0.5 / D
    return rank


def _listed(problem: Problem, mixture: BlockMixture, listing: Listing) -> Round:
    """Builds a round with the start times of a listing."""
    executor_DMK, (d_J, m_J) = _executors(problem, mixture)
    start_3DMK = np.full((3, *executor_DMK.shape), np.nan)
    start_3DMK[:, d_J, m_J] = np.array(listing.start).reshape(-1, problem.num_chunks, 3).transpose(2, 0, 1)
    is_free = problem.staggered and not problem.time_4P[Kind.U].any()
    return Round(executor_DMK, start_3DMK, np.array(listing.end if is_free else listing.update), listing.period)


def _timed(problem: Problem, mixture: BlockMixture, attempt: _Try) -> Round:
    """Builds a round with a listing's order of ops and exact times, where all updates come last."""
    K, names = problem.num_chunks, microbatch_ids(problem)
    executor_DMK, (d_J, m_J) = _executors(problem, mixture)
    worker_JK = problem.worker_DP[executor_DMK[d_J, m_J], np.arange(K)]
    sequences: list[list[tuple[float, int, int, int, int]]] = [
        [] for _ in range(problem.num_pipelines * problem.num_stages)
    ]
    starts = attempt.listing.start
    for x, w in enumerate(worker_JK.ravel().tolist()):
        (d, m), k = names[x // K], x % K
        for kind in (Kind.F, Kind.B, Kind.W):
            sequences[w].append((starts[3 * x + kind], int(kind), d, m, k))
    return time_round(problem, executor_DMK, [[op[1:] for op in sorted(ops)] for ops in sequences])


def _executors(problem: Problem, mixture: BlockMixture) -> tuple[np.ndarray, np.ndarray]:
    """Returns the executors, laid out as in ``Round``, and each micro-batch's (pipeline, index), int64[2, J]."""
    names, K = np.array(microbatch_ids(problem)).T, problem.num_chunks
    executor_DMK = np.full((problem.num_pipelines, problem.most_microbatches, K), -1, np.int32)
    executor_DMK[names[0], names[1]] = np.array(mixture.executor, np.int32).reshape(-1, K)
    return executor_DMK, names
