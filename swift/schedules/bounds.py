"""Lower bounds of the period that hold for every schedule of a problem that repeats one iteration.

Of the workers of stage p one runs at least n_p = ceil(M D / survivors) micro-batches, which is its work. It has to wait
besides, at two times:

- After its stage's update it can only run forwards until its first B is back from the stages behind it, and of those
  no more than the memory limit lets it hold.
- After its last B it can only run Ws, no more than the limit lets it hold, until its stage's next F: that B has to go
  through all stages ahead, where it is followed by a W, the update and the next iteration's first F, which has to come
  back. In a window of one iteration, or with a barrier, all stages have to end before the next F.

The first gives ``lower_bound``, the one of ReCycle's setting that every gap refers to; both together ``tight_bound``.
"""

import math

from swift.schedules.problem import Problem


def lower_bound(problem: Problem) -> float:
    """The largest of the stages' work and wait for their first B: no iteration that repeats has a shorter period."""
    return max(stage_bound(problem, p, len(peers)) for p, peers in enumerate(problem.survivors))


def stage_bound(problem: Problem, stage: int, num_survivors: int) -> float:
    """What a stage with so many live workers needs from one update to the next, whatever the other stages lack."""
    costs = problem.costs
    num_microbatches = problem.most_loaded(num_survivors)
    behind = problem.num_stages - 1 - stage
    first_b = (behind + 1) * costs.t_f + behind * (_backward(problem) + 2 * costs.t_comm)
    wait = max(0.0, first_b - min(num_microbatches, max_held(problem, costs.f_stash)) * costs.t_f)
    bound = num_microbatches * (costs.t_f + costs.t_b + costs.t_w) + costs.t_u + wait
    if problem.staggered:
        return bound
    # Behind a barrier all stages start together: the first message has to come, and the last B has to go all the way.
    ahead = stage * (costs.t_f + costs.t_comm)
    return bound + ahead + (0.0 if problem.decoupled else stage * (_backward(problem) + costs.t_comm))


def tight_bound(problem: Problem) -> float:
    """A bound at least as high as ``lower_bound``, which counts the wait after the last B as well."""
    problem = problem.if_drained()
    return max(
        stage_bound(problem, p, len(peers)) + _wait_after_last_b(problem, p, len(peers))
        for p, peers in enumerate(problem.survivors)
    )


def max_held(problem: Problem, stash: float) -> float:
    """How many micro-batches a worker may hold at once with a stash of this size each."""
    if problem.memory_limit is None or not stash:
        return math.inf
    return math.floor(problem.memory_limit / stash * (1 + 1e-12))


def _wait_after_last_b(problem: Problem, stage: int, num_survivors: int) -> float:
    costs = problem.costs
    there_and_back = stage * (costs.t_f + _backward(problem) + 2 * costs.t_comm)
    if not problem.decoupled:
        return there_and_back if problem.staggered else 0.0
    num_microbatches = problem.most_loaded(num_survivors)
    num_weight_gradients = min(num_microbatches, max_held(problem, costs.w_stash))
    there = stage * (costs.t_b + costs.t_comm)
    return max(0.0, (there_and_back if problem.staggered else there) + (1 - num_weight_gradients) * costs.t_w)


def _backward(problem: Problem) -> float:
    """From the start of a B until its message leaves."""
    return problem.costs.t_b if problem.decoupled else problem.costs.t_b + problem.costs.t_w
