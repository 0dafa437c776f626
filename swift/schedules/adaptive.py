"""ReCycle's planner: a failed worker's micro-batches run on its peers, in the bubbles of a decoupled backward.

arXiv 2405.14009, adaptive pipelining. Where the paper solves a MILP, this lists ops event by event (``listing``) under
many policies (``search``); ``milp`` is the exact oracle that it is tested against.
"""

import math
from dataclasses import replace

import numpy as np

from swift.errors import SettingError
from swift.schedules.bound import tight_bound
from swift.schedules.listing import Listing, Policy
from swift.schedules.memory import peak_memory
from swift.schedules.problem import Problem
from swift.schedules.schedule import Round, Schedule
from swift.schedules.search import best_listing
from swift.topology import Topology

_MAX_OPS = 500_000
"""So many ops are listed in the search, about a second's worth."""


def adaptive(problem: Problem) -> Schedule:
    """A schedule of the live workers that is as near to ``tight_bound`` as a second's search finds.

    Raises:
        SettingError: messages in the inboxes overflow the memory limit however few micro-batches are held.
    """
    return Schedule.from_round(problem, "adaptive", plan_round(problem))


def plan_round(problem: Problem) -> Round:
    """One iteration; without a failure all pipelines do the same, so that one is planned for all."""
    if problem.failed or problem.num_pipelines == 1:
        return _plan_with_inboxes(problem)
    one = _plan_with_inboxes(replace(problem, topology=Topology(1, problem.num_stages)))
    D, M, P = problem.num_pipelines, problem.num_microbatches, problem.num_stages
    executor_DMP = np.broadcast_to(np.arange(D, dtype=np.int32)[:, None, None], (D, M, P))
    return replace(one, executor_DMP=executor_DMP, start_3DMP=np.repeat(one.start_3DMP, D, axis=1))


def _plan_with_inboxes(problem: Problem) -> Round:
    """Plans with less and less memory for stashes, until inboxes and stashes fit together."""
    if problem.memory_limit is None or not problem.costs.inbox:
        return _plan(problem)
    for_stashes, least = problem.memory_limit, math.inf
    while for_stashes >= problem.costs.microbatch_peak:
        found = _plan(replace(problem, memory_limit=for_stashes))
        peak = float(peak_memory(Schedule.from_round(problem, "adaptive", found)).max())
        if peak <= problem.memory_limit * (1 + 1e-9):
            return found
        least = min(least, peak)
        for_stashes -= max(peak - problem.memory_limit, problem.costs.inbox)
    allowed = f"stashes and messages together do not fit; the least that a schedule was found for is {least:g}"
    raise SettingError("Problem.memory_limit", problem.memory_limit, allowed)


def _plan(problem: Problem) -> Round:
    # What counts in a window of one iteration is when it ends, as with a barrier.
    drained = replace(problem, staggered=problem.staggered and problem.num_iterations > 1)
    best = best_listing(drained, tight_bound(drained), _MAX_OPS)
    return _as_round(problem, best.policy, best.listing)


def _as_round(problem: Problem, policy: Policy, listing: Listing) -> Round:
    D, M, P = problem.num_pipelines, problem.num_microbatches, problem.num_stages
    return Round(
        np.array(policy.executor, np.int32).reshape(D, M, P),
        np.array(listing.start).reshape(D, M, P, 3).transpose(3, 0, 1, 2),
        np.array(listing.end) if problem.staggered else np.full(P, max(listing.end)),
        listing.period(problem),
    )
