"""ReCycle's planner: a failed worker's micro-batches run on its peers, in the bubbles of a decoupled backward.

arXiv 2405.14009, adaptive pipelining. Where the paper solves a MILP, this planner runs event-driven list scheduling
(``list_scheduling``) under many policies (``search``); ``milp`` is the exact oracle that it is tested against.
"""

from dataclasses import replace

import numpy as np

from swift.schedules.bounds import max_held, tight_bound
from swift.schedules.memory import fits
from swift.schedules.planners.list_scheduling import Listing, Policy
from swift.schedules.planners.search import LEAST_TRIALS, best_listing, share_out
from swift.schedules.problem import Problem
from swift.schedules.schedule import Round, Schedule

_MAX_OPS = 400_000
"""Ops scheduled during the search, about a second's worth."""


def adaptive(problem: Problem) -> Schedule:
    """Plans a schedule of the live workers, as close to ``tight_bound`` as a search of about a second gets."""
    return Schedule.planned(problem, "adaptive", _plan_with_inboxes)


def _plan_with_inboxes(problem: Problem) -> Round:
    """Plans with a reduced memory limit for stashes: the largest with which stashes and inboxes fit together."""
    limit, costs = problem.memory_limit, problem.costs
    if limit is None or not costs.inbox:
        return _plan(problem, _MAX_OPS)
    stash = max(costs.f_stash, costs.w_stash)
    least, most = 1, min(problem.num_pipelines * problem.num_microbatches, int(max_held(problem, stash)))
    num_tries = max(2, min(most.bit_length(), 5 * _MAX_OPS // problem.num_ops // LEAST_TRIALS))
    held, best = most, _one_after_another(problem)
    for _ in range(num_tries):
        if least > most:
            break
        # Messages are counted afterwards, because their times are not known earlier.
        stashes = replace(problem, costs=replace(costs, inbox=0.0), memory_limit=held * stash)
        found = _plan(stashes, _MAX_OPS // num_tries)
        if fits(problem, found):
            least = held + 1
            best = min(best, found, key=lambda one: one.period)
        else:
            most = held - 1
        held = (least + most + 1) // 2
    return best


def _one_after_another(problem: Problem) -> Round:
    """Runs each micro-batch through all stages and back before the next; fits whenever a single micro-batch does."""
    costs, D, M, P = problem.costs, problem.num_pipelines, problem.num_microbatches, problem.num_stages
    back = costs.t_b if problem.decoupled else costs.t_b + costs.t_w
    f_P = np.arange(P) * (costs.t_f + costs.t_comm)
    b_P = f_P[-1] + costs.t_f + np.arange(P)[::-1] * (back + costs.t_comm)
    start_3P = np.stack([f_P, b_P, b_P + costs.t_b])
    span = start_3P.max() + costs.t_w
    turn_DM = np.arange(D * M).reshape(D, M)
    end_P = start_3P[2] + costs.t_w + (D * M - 1) * span
    update_P = end_P if problem.staggered else np.full(P, end_P.max())
    period = (end_P - f_P).max() if problem.staggered else end_P.max()
    executor_DMP = np.array(share_out(problem), np.int32).reshape(D, M, P)
    start_3DMP = start_3P[:, None, None] + span * turn_DM[:, :, None]
    return Round(executor_DMP, start_3DMP, update_P, float(period) + costs.t_u)


def _plan(problem: Problem, max_ops: int) -> Round:
    drained = problem.if_drained()
    best = best_listing(drained, tight_bound(drained), max_ops)
    return _as_round(problem, best.policy, best.listing)


def _as_round(problem: Problem, policy: Policy, listing: Listing) -> Round:
    D, M, P = problem.num_pipelines, problem.num_microbatches, problem.num_stages
    return Round(
        np.array(policy.executor, np.int32).reshape(D, M, P),
        np.array(listing.start).reshape(D, M, P, 3).transpose(3, 0, 1, 2),
        np.array(listing.end) if problem.staggered else np.full(P, max(listing.end)),
        listing.period(problem),
    )
