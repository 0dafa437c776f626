"""A lower bound of the period that holds for every schedule of a problem.

Of the workers of stage p one runs at least n_p = ceil(M D / survivors) micro-batches. Between two updates it can only
run forwards until its first B is back from the stages behind it, of those no more than the memory limit lets it hold.
"""

import math

from swift.schedules.problem import Problem


def lower_bound(problem: Problem) -> float:
    """The largest of the stages' bounds: no schedule of the problem has a shorter period."""
    return max(stage_bound(problem, p, len(peers)) for p, peers in enumerate(problem.survivors))


def stage_bound(problem: Problem, stage: int, num_survivors: int) -> float:
    """What a stage with so many live workers needs from one update to the next.

    The last survivors of other stages do not matter here, so it is also the cost by which failures are spread.
    """
    costs, P = problem.costs, problem.num_stages
    behind = P - 1 - stage
    back = costs.t_b if problem.decoupled else costs.t_b + costs.t_w
    num_microbatches = math.ceil(problem.num_microbatches * problem.num_pipelines / num_survivors)
    first_b = (behind + 1) * costs.t_f + behind * (back + 2 * costs.t_comm)
    bubble = max(0.0, first_b - min(num_microbatches, max_in_flight(problem)) * costs.t_f)
    bound = num_microbatches * (costs.t_f + costs.t_b + costs.t_w) + costs.t_u + bubble
    if problem.staggered:
        return bound
    # Behind a barrier all stages start together: the first message has to come, and the last B has to go all the way.
    ahead = stage * (costs.t_f + costs.t_comm)
    return bound + ahead + (0.0 if problem.decoupled else stage * (back + costs.t_comm))


def max_in_flight(problem: Problem) -> float:
    """How many micro-batches a worker may hold between F and B: whole ones under the memory limit."""
    if problem.memory_limit is None:
        return math.inf
    return max(1, math.floor(problem.memory_limit / problem.costs.f_stash * (1 + 1e-12)))
