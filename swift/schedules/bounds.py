"""Lower bounds of the period, valid for every schedule that repeats one iteration of a problem.

Some worker of stage p runs at least n_p = ceil(M D / survivors) micro-batches: its work. In addition it waits twice:

- After its stage's update it can only run forwards until its first B arrives from the later stages, and no more of them
  than the memory limit lets it hold.
- After its last B it can only run Ws, no more than the limit lets it hold, until its stage's next F: that B has to pass
  through all earlier stages to the first, where a W, the update and the next iteration's first F follow, which has to
  travel back. In a window of one iteration, or with a barrier, all stages have to end before the next F.

The first wait gives ``lower_bound``, which matches ReCycle's setting and which every gap refers to; both together give
``tight_bound``.
"""

import math

from swift.schedules.problem import Problem


def lower_bound(problem: Problem) -> float:
    """Lower bound of the period: the largest sum, over stages, of a worker's work and its wait for the first B."""
    return max(stage_bound(problem, p, len(peers)) for p, peers in enumerate(problem.survivors))


def stage_bound(problem: Problem, stage: int, num_survivors: int) -> float:
    """Lower bound of the time between updates of a stage with ``num_survivors`` live workers."""
    costs = problem.costs
    num_microbatches = problem.most_loaded(num_survivors)
    behind = problem.num_stages - 1 - stage
    first_b = (behind + 1) * costs.t_f + behind * (_backward(problem) + 2 * costs.t_comm)
    wait = max(0.0, first_b - min(num_microbatches, max_held(problem, costs.f_stash)) * costs.t_f)
    bound = num_microbatches * (costs.t_f + costs.t_b + costs.t_w) + costs.t_u + wait
    if problem.staggered:
        return bound
    # After a barrier all stages start together: the first message has to arrive, and the last B has to travel back.
    ahead = stage * (costs.t_f + costs.t_comm)
    return bound + ahead + (0.0 if problem.decoupled else stage * (_backward(problem) + costs.t_comm))


def tight_bound(problem: Problem) -> float:
    """Lower bound of the period that also counts the wait after the last B; at least ``lower_bound``."""
    problem = problem.if_drained()
    return max(
        stage_bound(problem, p, len(peers)) + _wait_after_last_b(problem, p, len(peers))
        for p, peers in enumerate(problem.survivors)
    )


def max_held(problem: Problem, stash: float) -> float:
    """Number of micro-batches that a worker may hold at once, given the size of each stash."""
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
    """Time from the start of a B until its message is sent."""
    return problem.costs.t_b if problem.decoupled else problem.costs.t_b + problem.costs.t_w
