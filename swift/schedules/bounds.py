"""Lower bounds on the period, valid for every schedule that repeats one iteration of a problem.

In a plain problem every stage holds one chunk. The work of the busiest worker of stage p is at least
n_p = ceil(M D / survivors) micro-batches. This worker also waits twice:

- After the stage's update it can only run Fs until its first B arrives from the later stages, and no more Fs than the
  memory limit lets it hold.
- After its last B it can only run Ws, no more than the limit lets it hold, until the stage's next F. Before that F, the
  gradient has to pass through all earlier stages to stage 0; stage 0 has to run a W, the update and the next
  iteration's first F; and the output of that F has to travel back. In a window of one iteration, or with a barrier, all
  stages have to end before the next F.

``lower_bound`` counts the first wait. It matches ReCycle's setting, and every reported gap refers to it.
``tight_bound`` counts both, and also memory turnover: a worker that can hold k micro-batches at once and runs n > k of
them starts its last F only after n - k others have been to the last stage and back, which delays the last B as well.

In other problems stages hold several chunks, or pipelines have different cuts. Their bound counts only work: the work
on any consecutive chunks, or on one stage's chunks, divided among all workers that hold one of them.

Shape suffixes: W live workers, P chunks.
"""

import math

import numpy as np

from swift.schedules.problem import Kind, Problem


def lower_bound(problem: Problem) -> float:
    """Returns the standard lower bound: the maximum over stages of a worker's work and its wait for the first B."""
    if not problem.is_plain:
        return _work_bound(problem)
    return max(stage_bound(problem, p, len(peers)) for p, peers in enumerate(problem.survivors))


def stage_bound(problem: Problem, stage: int, num_survivors: int) -> float:
    """Returns a lower bound on the time between consecutive updates of a stage.

    All pipelines must have the same cut.
    """
    if not problem.is_plain:
        times = problem.time_4P[:, list(problem.held_by((0, stage)))]
        return _shared(problem.total_microbatches, times[: Kind.U].sum(axis=0), num_survivors) + float(
            times[Kind.U].sum()
        )
    f_P, b_P, w_P, u_P = problem.time_4P.tolist()
    num_microbatches, comm = problem.most_loaded(num_survivors), problem.costs.t_comm
    first_b = _until_b(problem, stage)
    in_flight = max_in_flight(problem, float(problem.stash_2P[0, stage]))
    # Until the first B arrives, only Fs can run, and only as many as fit in memory.
    wait = max(0.0, first_b - min(num_microbatches, in_flight) * f_P[stage])
    bound = num_microbatches * (f_P[stage] + b_P[stage] + w_P[stage]) + u_P[stage] + wait
    if problem.staggered:
        return bound
    # After a barrier all stages start together: the first message has to reach this stage, and the last B's gradient
    # has to travel back.
    ahead = sum(f_P[:stage]) + stage * comm
    return bound + ahead + (0.0 if problem.decoupled else sum(_backward(problem)[:stage]) + stage * comm)


def tight_bound(problem: Problem) -> float:
    """Returns ``lower_bound``, tightened by the wait after the last B and by memory turnover."""
    if not problem.is_plain:
        return _work_bound(problem)
    return max(tight_stage_bound(problem, p, len(peers)) for p, peers in enumerate(problem.survivors))


def tight_stage_bound(problem: Problem, stage: int, num_survivors: int) -> float:
    """Returns the bound that ``tight_bound`` maximizes over stages; all pipelines must have the same cut."""
    if not problem.is_plain:
        return stage_bound(problem, stage, num_survivors)
    if problem.num_iterations == 1 and problem.has_equal_updates:
        problem = problem.if_drained()
    bound = stage_bound(problem, stage, num_survivors)
    waiting = bound + _wait_after_last_b(problem, stage, num_survivors)
    return max(waiting, _turnover_bound(problem, stage, num_survivors))


def max_in_flight(problem: Problem, stash: float) -> float:
    """Returns the number of micro-batches that fit in a worker's memory, or infinity without a memory limit.

    Args:
        problem: problem with the memory limit.
        stash: memory of one micro-batch, in the unit of the limit.
    """
    if problem.memory_limit is None or not stash:
        return math.inf
    # The tolerance keeps a limit of exactly k stashes from being rounded down to k - 1.
    return math.floor(problem.memory_limit / stash * (1 + 1e-12))


def _wait_after_last_b(problem: Problem, stage: int, num_survivors: int) -> float:
    f_P, b_P, w_P, u_P = problem.time_4P.tolist()
    comm, back_P = problem.costs.t_comm, _backward(problem)
    there_and_back = sum(f_P[:stage]) + sum(back_P[:stage]) + 2 * stage * comm
    if not problem.decoupled:
        return max(0.0, there_and_back + u_P[0] - u_P[stage]) if problem.staggered else 0.0
    # Only Ws that fit in memory until then can fill the wait. Stage 0 has to run a W of its own before its update.
    num_microbatches = problem.most_loaded(num_survivors)
    num_weight_gradients = min(num_microbatches, max_in_flight(problem, float(problem.stash_2P[1, stage])))
    extra_w = w_P[0] - num_weight_gradients * w_P[stage]
    if problem.staggered:
        return max(0.0, there_and_back + extra_w + u_P[0] - u_P[stage])
    return max(0.0, sum(b_P[:stage]) + stage * comm + extra_w)


def _turnover_bound(problem: Problem, stage: int, num_survivors: int) -> float:
    """Returns a lower bound from memory turnover: the last F waits for memory; 0 if all micro-batches fit at once.

    With room for k stashes, a worker's (m + k)-th F starts after m Ws. Of any m micro-batches, at least one has an F
    that is not among the first m - 1 Fs. So each group of k Fs starts at least one round trip (to the last stage and
    back) after the group before it. In the last of these groups, everything beyond k has to run between the first B and
    the last F.
    """
    f_P, _, w_P, u_P = problem.time_4P.tolist()
    n, k = problem.most_loaded(num_survivors), max_in_flight(problem, float(problem.stash_2P[0, stage]))
    if n <= k:
        return 0.0
    comm, back_P, until_b = problem.costs.t_comm, _backward(problem), _until_b(problem, stage)
    # If the W-stash is smaller, B already frees enough for the next F.
    frees_with_w = problem.decoupled and problem.stash_2P[1, stage] >= problem.stash_2P[0, stage]
    turnover = back_P[stage] + (w_P[stage] if frees_with_w else 0.0)
    last_f = max(
        before * (until_b + turnover) + until_b + left * turnover + (left - 1) * f_P[stage]
        for before, left in enumerate(range(n - int(k), 0, -int(k)))
    )
    stage_w, first_w = (w_P[stage], w_P[0]) if problem.decoupled else (0.0, 0.0)
    forward_time, backward_time = sum(f_P[:stage]) + stage * comm, sum(back_P[:stage]) + stage * comm
    end_of_b = last_f + until_b + back_P[stage]
    if problem.staggered:
        return end_of_b + max(stage_w + u_P[stage], backward_time + first_w + u_P[0] + forward_time)
    return forward_time + end_of_b + max(stage_w, backward_time + first_w) + u_P[stage]


def _until_b(problem: Problem, stage: int) -> float:
    """Returns the least time between the starts of a micro-batch's F and B at a stage."""
    behind = problem.num_stages - 1 - stage
    forward, backward = sum(problem.time_4P[Kind.F, stage:].tolist()), sum(_backward(problem)[stage + 1 :])
    return forward + backward + 2 * behind * problem.costs.t_comm


def _backward(problem: Problem) -> list[float]:
    """Returns the time from the start of each chunk's B until its gradient is sent to the previous chunk."""
    _, b_P, w_P, _ = problem.time_4P
    return (b_P if problem.decoupled else b_P + w_P).tolist()


def _work_bound(problem: Problem) -> float:
    live, C = problem.live_workers, problem.num_chunks
    holds_WP = np.zeros((len(live), C), bool)
    for row, worker in enumerate(live):
        holds_WP[row, list(problem.held_by(worker))] = True
    runs = [range(first, end) for first in range(C) for end in range(first + 1, C + 1)]
    chunk_sets = {problem.held_by(worker) for worker in live} - {()}
    # In any schedule, the work of a set of chunks is done by the workers that hold one of them, at best evenly.
    bound = 0.0
    for chunks in map(list, [*runs, *chunk_sets]):
        in_chunks_WP = holds_WP[:, chunks]
        num_workers = int(in_chunks_WP.any(axis=1).sum())
        updates = float((in_chunks_WP * problem.time_4P[Kind.U, chunks]).sum()) / num_workers
        work_P = problem.time_4P[: Kind.U, chunks].sum(axis=0)
        bound = max(bound, _shared(problem.total_microbatches, work_P, num_workers) + updates)
    return bound


def _shared(num_microbatches: int, work_P: np.ndarray, num_workers: int) -> float:
    """Returns the least possible work of the busiest worker when micro-batches are divided among workers.

    Args:
        num_microbatches: number of micro-batches to divide.
        work_P: time of one micro-batch at each chunk.
        num_workers: number of workers that share them.
    """
    # If all chunks take the same time, the busiest worker runs a whole number of (micro-batch, chunk) pairs.
    if np.ptp(work_P) == 0:
        return math.ceil(num_microbatches * len(work_P) / num_workers) * float(work_P[0])
    return num_microbatches * float(work_P.sum()) / num_workers
