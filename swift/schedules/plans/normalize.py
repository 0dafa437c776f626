"""Failure normalization: only how many failures every stage has matters (ReCycle, arXiv 2405.14009).

The workers of a stage hold the same parameters, so a schedule stays valid when they change places, stage by stage; and
pipelines have equally many micro-batches, so it stays valid when these change names, pipeline by pipeline. What is left
are the counts. Copying a stage's parameters to a worker of another stage moves a failure, and leaves their sum.

D: pipelines, P: stages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import NamedTuple

import numpy as np

from swift.errors import SettingError, check_count
from swift.schedules.bounds import stage_bound
from swift.schedules.ops import Kind
from swift.schedules.problem import Problem
from swift.schedules.schedule import Schedule
from swift.topology import Topology, Worker


@dataclass(frozen=True)
class Normalized:
    """A problem, the canonical one with as many failures in every stage, and who plays whom.

    Attributes:
        original: the problem as it was asked.
        problem: the canonical problem; equal for all problems that differ only in who failed and in expert ranks.
        pipeline_D: for every canonical pipeline, the original one whose micro-batches take its place.
        worker_PD: for every stage and canonical pipeline, the original pipeline whose worker of that stage takes the
            place of its worker; the same as ``pipeline_D`` but where a live worker must stand in for a failed one.
    """

    original: Problem
    problem: Problem
    pipeline_D: tuple[int, ...]
    worker_PD: tuple[tuple[int, ...], ...]


class Move(NamedTuple):
    """A live worker gives up its place, and takes that of a failed one by copying the parameters of its new peers."""

    worker: Worker
    role: Worker


def failure_counts(problem: Problem) -> tuple[int, ...]:
    """For every stage, how many of its workers are down."""
    return tuple(problem.num_pipelines - len(peers) for peers in problem.survivors)


def canonical(problem: Problem, counts: tuple[int, ...]) -> Problem:
    """The same work with ``counts[p]`` failures at stage p, in the first pipelines.

    Raises:
        SettingError: not one count a stage, or one that leaves a stage without a survivor.
    """
    if len(counts) != problem.num_stages or min(counts) < 0:
        raise SettingError("failure counts", counts, f"must be one for each of the {problem.num_stages} stages")
    failed = frozenset((d, p) for p, count in enumerate(counts) for d in range(count))
    return replace(problem, topology=Topology(problem.num_pipelines, problem.num_stages), failed=failed)


def normalize(problem: Problem) -> Normalized:
    """The canonical problem, and how to come back from it.

    As many workers as possible keep the micro-batches of their own pipeline, which keeps messages within pipelines:
    those of a pipeline's worker go elsewhere only where it is down, or where failures that the canonical problem has in
    one pipeline are in several. A problem that is canonical comes back as it is.
    """
    target = canonical(problem, failure_counts(problem))
    live_DP, target_live_DP = _live(problem), _live(target)
    # A pipeline in another's place keeps the workers of those stages at which both are up. Ties: everyone stays.
    kept_DD = target_live_DP.astype(int) @ live_DP.T.astype(int)
    D = problem.num_pipelines
    pipeline_D = _assignment(kept_DD * (D + 1) + np.eye(D, dtype=int))
    worker_PD = tuple(
        _stage_workers(pipeline_D, target_live_DP[:, p], live_DP[:, p]) for p in range(problem.num_stages)
    )
    return Normalized(problem, target, pipeline_D, worker_PD)


def denormalize(schedule: Schedule, normalized: Normalized) -> Schedule:
    """A schedule of the original problem from one of the canonical problem: the same ops at the same times."""
    assert schedule.problem == normalized.problem, "a schedule of another problem"
    P = normalized.problem.num_stages
    worker_DP = np.array(normalized.worker_PD).T * P + np.arange(P)
    # Only whole workers change places, so the rows of each of them stay in order.
    player = np.argsort(worker_DP.ravel())
    rows = np.concatenate([np.arange(schedule.bounds[w], schedule.bounds[w + 1]) for w in player])
    worker = worker_DP.ravel()[schedule.worker[rows]].astype(np.int32)
    kind = schedule.kind[rows]
    of_microbatch = np.array(normalized.pipeline_D)[schedule.pipeline[rows]]
    return Schedule(
        normalized.original,
        schedule.solver,
        worker,
        kind,
        schedule.iteration[rows],
        np.where(kind == Kind.U, worker // P, of_microbatch).astype(np.int32),
        schedule.microbatch[rows],
        schedule.stage[rows],
        schedule.start[rows],
        schedule.end[rows],
    )


def spread(problem: Problem, num_failures: int) -> tuple[int, ...]:
    """How many failures every stage should have where roles can be moved: those with the smallest bound of the period.

    ReCycle's dynamic program. Of the counts with the smallest largest ``stage_bound`` it takes those with the smallest
    sum of bounds, since a planner gets nearer to the bound the more time the other stages have to spare; of these,
    those with more failures in the earlier stages: after its last B a stage waits for all ahead (``tight_bound``).

    Args:
        problem: its own failures do not matter.
        num_failures: F, of all workers together.

    Returns:
        Failures of every stage; their sum is ``num_failures``, and each is less than D.

    Raises:
        SettingError: more failures than leave every stage a survivor.

    >>> spread(Problem(Topology(3, 4), num_microbatches=6), 1)
    (1, 0, 0, 0)
    """
    check_count("num_failures", num_failures, least=0)
    D, P = problem.num_pipelines, problem.num_stages
    if num_failures > P * (D - 1):
        allowed = f"at most {P * (D - 1)} failures leave each of {P} stages one of {D} workers"
        raise SettingError("num_failures", num_failures, allowed)
    bounds_PD = [[stage_bound(problem, p, D - count) for count in range(D)] for p in range(P)]
    # Decimals of few digits, so that no tie is broken by the last bits of a bound or of their sum.
    cost_PD = [[Decimal(f"{bound:.12g}") for bound in row] for row in bounds_PD]
    # Bounds grow with the failures, so the cheapest next failures, one after the other, give the smallest largest one.
    limit = max([row[0] for row in cost_PD] + sorted(cost for row in cost_PD for cost in row[1:])[:num_failures])
    best: list[_Spread] = [(Decimal(0), ())]
    for row in reversed(cost_PD):
        costs = [cost for cost in row if cost <= limit]
        most = min(num_failures, len(costs) - 1 + len(best) - 1)
        best = [_cheapest(costs, best, total) for total in range(most + 1)]
    return best[num_failures][1]


def moves(problem: Problem, counts: tuple[int, ...]) -> tuple[Move, ...]:
    """The fewest moves after which every stage has as many failures as ``counts`` says.

    Workers leave pipelines that have failures already for places in those with the fewest, so that failures gather in
    few pipelines.

    Raises:
        SettingError: the counts are no failures of this topology, or not as many as the problem has.
    """
    canonical(problem, counts)
    if sum(counts) != len(problem.failed):
        raise SettingError("failure counts", counts, f"must sum to the {len(problem.failed)} failures there are")
    failures_D = [sum(d == pipeline for d, _ in problem.failed) for pipeline in range(problem.num_pipelines)]
    givers: list[Worker] = []
    roles: list[Worker] = []
    for p, (count, peers) in enumerate(zip(counts, problem.survivors, strict=True)):
        failed = sorted(d for d, stage in problem.failed if stage == p)
        surplus = count - len(failed)
        givers += [(d, p) for d in sorted(peers, key=lambda d: -failures_D[d])[: max(0, surplus)]]
        roles += [(d, p) for d in sorted(failed, key=lambda d: failures_D[d])[: max(0, -surplus)]]
    return tuple(Move(*pair) for pair in zip(givers, roles, strict=True))


def after_moves(problem: Problem, moved: tuple[Move, ...]) -> Problem:
    """The problem with roles moved: who moved has left a failed place behind."""
    taken, left = {move.role for move in moved}, {move.worker for move in moved}
    return replace(problem, failed=(problem.failed - taken) | left)


def num_plans(topology: Topology, max_failures: int, *, move_roles: bool = False) -> int:
    """How many plans cover every failure set of at most ``max_failures`` workers that leaves each stage a survivor.

    Where roles are moved, one for each number of failures. Else as many as there are counts (f_0 .. f_{P-1}), each
    less than D, with a sum of at most ``max_failures``: a dynamic program over the stages.

    >>> num_plans(Topology(3, 4), 2), num_plans(Topology(3, 4), 2, move_roles=True)
    (15, 3)
    """
    check_count("max_failures", max_failures, least=0)
    D, P = topology.num_pipelines, topology.num_stages
    most = min(max_failures, P * (D - 1))
    if move_roles:
        return most + 1
    ways = [1] + [0] * most
    for _ in range(P):
        ways = [sum(ways[max(0, total - D + 1) : total + 1]) for total in range(most + 1)]
    return sum(ways)


def plans_to_prepare(problem: Problem, max_failures: int, *, move_roles: bool = False) -> Iterator[Problem]:
    """The canonical problems that cover every failure set of at most ``max_failures`` workers, fewest failures first.

    Args:
        problem: what to plan for, but for its own failures.
        max_failures: as for ``num_plans``, which says how many problems there are.
        move_roles: one problem for each number of failures, spread over the stages.
    """
    check_count("max_failures", max_failures, least=0)
    D, P = problem.num_pipelines, problem.num_stages
    for num_failures in range(min(max_failures, P * (D - 1)) + 1):
        if move_roles:
            yield canonical(problem, spread(problem, num_failures))
        else:
            yield from (canonical(problem, counts) for counts in _count_vectors(P, D, num_failures))


def _count_vectors(num_stages: int, num_pipelines: int, total: int) -> Iterator[tuple[int, ...]]:
    if num_stages == 0:
        yield ()
        return
    later = (num_stages - 1) * (num_pipelines - 1)
    for count in range(max(0, total - later), min(total, num_pipelines - 1) + 1):
        for rest in _count_vectors(num_stages - 1, num_pipelines, total - count):
            yield (count, *rest)


_Spread = tuple[Decimal, tuple[int, ...]]
"""The bounds of some stages, summed, and their failures."""


def _cheapest(costs: list[Decimal], best: list[_Spread], total: int) -> _Spread:
    """The smallest sum, then the most failures here, of a stage and those behind it with ``total`` failures."""
    counts = range(max(0, total - len(best) + 1), min(total, len(costs) - 1) + 1)
    count = min(reversed(counts), key=lambda count: costs[count] + best[total - count][0])
    return costs[count] + best[total - count][0], (count, *best[total - count][1])


def _live(problem: Problem) -> np.ndarray:
    live_DP = np.ones((problem.num_pipelines, problem.num_stages), bool)
    for worker in problem.failed:
        live_DP[worker] = False
    return live_DP


def _stage_workers(pipeline_D: tuple[int, ...], target_live_D: np.ndarray, live_D: np.ndarray) -> tuple[int, ...]:
    """Everyone in its own pipeline's place, but that live places get live workers and failed places failed ones."""
    workers = list(pipeline_D)
    unmanned = [e for e, d in enumerate(pipeline_D) if target_live_D[e] and not live_D[d]]
    idle = [e for e, d in enumerate(pipeline_D) if live_D[d] and not target_live_D[e]]
    for e, other in zip(unmanned, idle, strict=True):
        workers[e], workers[other] = workers[other], workers[e]
    return tuple(workers)


def _assignment(weight_NN: np.ndarray) -> tuple[int, ...]:
    """For every row a column of its own, with the largest sum of weights: shortest augmenting paths with potentials.

    Row and column 0 are added: matched to row 0 is what is free, and column 0 is where a path starts.
    """
    N = len(weight_NN)
    cost = np.zeros((N + 1, N + 1))
    cost[1:, 1:] = weight_NN.max() - weight_NN
    row_price, column_price = np.zeros(N + 1), np.zeros(N + 1)
    row_of, before = np.zeros(N + 1, int), np.zeros(N + 1, int)
    for row in range(1, N + 1):
        row_of[0], column = row, 0
        distance, done = np.full(N + 1, np.inf), np.zeros(N + 1, bool)
        while row_of[column]:
            done[column] = True
            reached = cost[row_of[column]] - row_price[row_of[column]] - column_price
            shorter = ~done & (reached < distance)
            distance[shorter], before[shorter] = reached[shorter], column
            column = int(np.where(done, np.inf, distance).argmin())
            step = distance[column]
            row_price[row_of[done]] += step
            column_price[done] -= step
            distance[~done] -= step
        while column:
            row_of[column], column = row_of[before[column]], before[column]
    return tuple(np.argsort(row_of[1:]).tolist())
