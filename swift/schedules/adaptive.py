"""ReCycle's planner: a failed worker's micro-batches run on its peers, in the bubbles of a decoupled backward.

arXiv 2405.14009, adaptive pipelining. Where the paper solves a MILP, this lists ops event by event (``listing``) under
many policies (``search``); ``milp`` is the exact oracle that it is tested against.
"""

from dataclasses import replace

import numpy as np

from swift.schedules.bound import tight_bound
from swift.schedules.listing import Listing
from swift.schedules.problem import Problem
from swift.schedules.schedule import Round, Schedule
from swift.schedules.search import Candidate, best_listing
from swift.topology import Topology

_MAX_OPS = 500_000
"""So many ops are listed in the search, about a second's worth."""


def adaptive(problem: Problem) -> Schedule:
    """A schedule of the live workers that is as near to ``tight_bound`` as a second's search finds."""
    return Schedule.from_round(problem, "adaptive", plan_round(problem))


def plan_round(problem: Problem) -> Round:
    """One iteration; without a failure all pipelines do the same, so that one is planned for all."""
    if problem.failed or problem.num_pipelines == 1:
        return _plan(problem)
    one = _plan(replace(problem, topology=Topology(1, problem.num_stages)))
    D = problem.num_pipelines
    executor_DMP = np.broadcast_to(
        np.arange(D, dtype=np.int32)[:, None, None], (D, problem.num_microbatches, problem.num_stages)
    )
    return replace(one, executor_DMP=executor_DMP, start_3DMP=np.repeat(one.start_3DMP, D, axis=1))


def _plan(problem: Problem) -> Round:
    # What counts in a window of one iteration is when it ends, as with a barrier.
    barrier = replace(problem, staggered=problem.staggered and problem.num_iterations > 1)
    best = best_listing(barrier, tight_bound(barrier), _MAX_OPS)
    return _as_round(problem, best)


def _as_round(problem: Problem, best: Candidate) -> Round:
    D, M, P = problem.num_pipelines, problem.num_microbatches, problem.num_stages
    listing: Listing = best.listing
    update_P = np.array(listing.end) if problem.staggered else np.full(P, max(listing.end))
    return Round(
        np.array(best.policy.executor, np.int32).reshape(D, M, P),
        np.array(listing.start).reshape(D, M, P, 3).transpose(3, 0, 1, 2),
        update_P,
        listing.period(problem),
    )
