"""ReCycle's planner: peers run a failed worker's micro-batches in the bubbles of a decoupled backward pass.

This is adaptive pipelining (arXiv 2405.14009). The paper solves a MILP; this planner runs event-driven list scheduling
(``list_scheduling``) under many policies (``search``). It is tested against ``milp``, the exact planner.
"""

from dataclasses import replace

import numpy as np

from swift.schedules.bounds import max_in_flight, tight_bound
from swift.schedules.planners.list_scheduling import Listing, Policy, microbatch_ids
from swift.schedules.planners.search import LEAST_TRIALS, best_listing, reroute
from swift.schedules.problem import Kind, Problem
from swift.schedules.schedule import Round, Schedule, fits

_MAX_OPS = 400_000
"""Number of ops that the search may schedule, which takes about a second."""


def adaptive(problem: Problem) -> Schedule:
    """Plans a schedule for the live workers by about a second of search for a period close to ``tight_bound``."""
    return Schedule.planned(problem, "adaptive", adaptive_round)


def adaptive_round(problem: Problem, max_ops: int | None = None) -> Round:
    """Plans the round that ``adaptive`` repeats.

    How long messages occupy inboxes is known only after planning. If memory is limited and messages have a size,
    several plans are therefore made, each with stash memory for a fixed number of micro-batches, largest first. The
    shortest plan that fits in memory together with its messages wins. The numbers of micro-batches do not depend on the
    limit, so more memory never makes the period longer, except if planning for all of them would take too long: then
    they are chosen to suit the limit.

    Args:
        problem: problem to plan.
        max_ops: number of ops that the search may schedule; None for a number that takes about a second.
    """
    limit, costs, max_ops = problem.memory_limit, problem.costs, max_ops or _MAX_OPS
    if limit is None or not costs.inbox:
        return _plan(problem, max_ops)
    stash = float(problem.stash_2P.max())
    # Peak of a single micro-batch, without its message.
    alone = problem.microbatch_peak - costs.inbox
    best, (numbers, num_tries) = _one_after_another(problem), _numbers_held(problem, stash, max_ops)
    for number in numbers:
        # Plan without messages; ``fits`` includes them afterwards, when their times are known.
        stashes = replace(problem, costs=replace(costs, inbox=0.0), memory_limit=max(alone, number * stash))
        if tight_bound(stashes) >= best.period * (1 - 1e-9):
            break
        plan = _plan(stashes, max_ops // num_tries)
        if plan.period < best.period and fits(problem, plan):
            best = plan
    return best


def _numbers_held(problem: Problem, stash: float, max_ops: int) -> tuple[list[int], int]:
    """Returns micro-batch counts to reserve stash memory for, descending, and the divisor of the op budget."""
    fewest_peers, chunks = min(map(len, problem.survivors)), problem.num_chunks if problem.stage_of_chunk else 1
    # More memory than the most loaded worker can fill is useless.
    useful = max(problem.most_loaded(fewest_peers), problem.most_microbatches) * chunks
    most = min(int(max_in_flight(problem, stash)), useful)
    steps = [1]
    while steps[-1] < useful:
        steps.append(min(steps[-1] + max(1, steps[-1] // 8), useful))
    affordable = max(2, 5 * max_ops // problem.num_ops // LEAST_TRIALS)
    if len(steps) > affordable:
        steps = sorted({max(1, most >> halvings) for halvings in range(affordable)})
    return [number for number in reversed(steps) if number <= most], len(steps)


def _one_after_another(problem: Problem) -> Round:
    """Plans each micro-batch through all chunks and back before the next one, as a fallback that always fits."""
    D, M, C, comm = problem.num_pipelines, problem.most_microbatches, problem.num_chunks, problem.costs.t_comm
    f_P, b_P, w_P, u_P = problem.time_4P
    # If a worker holds several chunks, it may also hold the previous chunk, whose B then waits for this W.
    back_P = b_P if problem.decoupled and problem.is_plain else b_P + w_P
    start_f_P = np.cumsum(np.append(0.0, f_P + comm))
    start_b_P = start_f_P[-1] - comm + np.cumsum(np.append(0.0, (back_P + comm)[::-1]))[-2::-1]
    start_3P = np.stack([start_f_P[:-1], start_b_P, start_b_P + b_P])
    span = (start_3P[2] + w_P).max()
    end_P = start_3P[2] + w_P + (problem.total_microbatches - 1) * span
    executor_DMP, start_3DMP = np.full((D, M, C), -1, np.int32), np.full((3, D, M, C), np.nan)
    executor = np.array(reroute(problem), np.int32).reshape(-1, C)
    for index, name in enumerate(microbatch_ids(problem)):
        executor_DMP[name], start_3DMP[:, *name] = executor[index], start_3P + span * index
    if not problem.is_plain:
        update_P = end_P.max() + np.cumsum(u_P) - u_P
        return Round(executor_DMP, start_3DMP, update_P, float((update_P + u_P).max()))
    update_P = end_P if problem.staggered else np.full(C, end_P.max())
    first_P = start_3P[0] if problem.staggered else 0.0
    return Round(executor_DMP, start_3DMP, update_P, float((update_P + u_P - first_P).max()))


def _plan(problem: Problem, max_ops: int) -> Round:
    drained = problem.if_drained()
    best = best_listing(drained, tight_bound(drained), max_ops)
    return (
        _as_round(problem, best.policy, best.listing) if best.listing.period < np.inf else _one_after_another(problem)
    )


def _as_round(problem: Problem, policy: Policy, listing: Listing) -> Round:
    D, M, C = problem.num_pipelines, problem.most_microbatches, problem.num_chunks
    executor_DMP, start_3DMP = np.full((D, M, C), -1, np.int32), np.full((3, D, M, C), np.nan)
    d, m = np.array(microbatch_ids(problem)).T
    executor_DMP[d, m] = np.array(policy.executor, np.int32).reshape(-1, C)
    start_3DMP[:, d, m] = np.array(listing.start).reshape(-1, C, 3).transpose(2, 0, 1)
    # ``if_drained`` added a barrier, since only the end counts. Drop it if Us take no time away from other chunks.
    is_free = problem.staggered and (problem.is_plain or not problem.time_4P[Kind.U].any())
    return Round(executor_DMP, start_3DMP, np.array(listing.end if is_free else listing.update), listing.period)
