"""Failure normalization: only the number of failures in each stage matters (ReCycle, arXiv 2405.14009).

The workers of a stage hold the same parameters, so a schedule stays valid if they swap places within the stage.
Pipelines have equally many micro-batches, so a schedule stays valid if pipelines swap theirs. Only the number of
failures in each stage is left. Copying a stage's parameters to a worker of another stage moves a failure between the
stages and keeps the total. ReCycle's dynamic program spreads the failures over the stages so that the bound on the
period is smallest.

If pipelines are not uniform, every failure set is a problem of its own, and every role differs. A greedy search then
vacates one role at a time, each time the one whose absence gives the smallest bound. ``ChunkAssignment`` records which
workers hold which chunks, for a run's own cut or for a recut.

``plan_document`` describes the plan of a normalized problem, for a run's record and for ``PlanStore``.

Shape suffixes: D pipelines, P stages.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from swift.errors import SettingError, check_count
from swift.schedules.bounds import tight_bound, tight_stage_bound
from swift.schedules.problem import Kind, Problem
from swift.schedules.schedule import Schedule, round_of
from swift.topology import Topology, Worker

VERSION = 1
"""Version of the format and of the planners' results; incrementing it invalidates all stored plans."""


@dataclass(frozen=True)
class Normalized:
    """A problem, the canonical problem with as many failures in each stage, and the mapping between them.

    Attributes:
        original: problem as given.
        problem: canonical problem, equal for all problems with the same number of failures in each stage that differ
            only in which workers failed and in the number of expert ranks.
        pipeline_D: for each canonical pipeline, the original pipeline whose micro-batches it runs.
        worker_PD: for each stage and canonical pipeline, the original pipeline of the worker. Equal to ``pipeline_D``
            except where a live worker replaces a failed one.
    """

    original: Problem
    problem: Problem
    pipeline_D: tuple[int, ...]
    worker_PD: tuple[tuple[int, ...], ...]


class Move(NamedTuple):
    """A live worker's move to another place, where it copies the parameters of its new peers.

    Attributes:
        worker: worker that moves, named by the place that it leaves.
        role: place that it takes.
    """

    worker: Worker
    role: Worker


def failure_counts(problem: Problem) -> tuple[int, ...]:
    """Counts the failed workers in each stage."""
    return tuple(sum(stage == p for _, stage in problem.failed) for p in range(problem.num_stages))


def canonical(problem: Problem, counts: tuple[int, ...]) -> Problem:
    """Returns the canonical problem: the same work with ``counts[p]`` failures at stage p, in the first pipelines.

    Raises:
        SettingError: there is not one count per stage, a stage has no survivor left, or the pipelines differ.
    """
    if not problem.is_uniform:
        allowed = "only where pipelines are alike does the number of failures of each stage say all"
        raise SettingError("Problem.num_microbatches, stage_of_chunk", problem.num_microbatches, allowed)
    if len(counts) != problem.num_stages or min(counts) < 0:
        raise SettingError("failure counts", counts, f"must be one for each of the {problem.num_stages} stages")
    failed = frozenset((d, p) for p, count in enumerate(counts) for d in range(count))
    return replace(problem, topology=Topology(problem.num_pipelines, problem.num_stages), failed=failed)


def normalize(problem: Problem) -> Normalized:
    """Maps a problem to its canonical form.

    Messages should stay within pipelines, so as many workers as possible keep the micro-batches of their own pipeline.
    Other workers run these micro-batches only if a worker has failed, or if the original problem has failures in
    several pipelines that the canonical problem has in one. A canonical problem is mapped to itself. A problem whose
    pipelines differ is also mapped to itself, apart from its number of expert ranks.
    """
    if not problem.is_uniform:
        D, P = problem.num_pipelines, problem.num_stages
        same = tuple(range(D))
        return Normalized(problem, replace(problem, topology=Topology(D, P)), same, (same,) * P)
    # Imported with the first plan, when a run starts: scipy.optimize takes 0.4 s, which would delay a recovery.
    from scipy.optimize import linear_sum_assignment

    target = canonical(problem, failure_counts(problem))
    live_DP, target_live_DP = _live(problem), _live(target)
    # Score of d in e's place: the number of stages at which both are live, where workers can stay. Ties favor d = e.
    kept_DD = target_live_DP.astype(int) @ live_DP.T.astype(int)
    D = problem.num_pipelines
    _, columns_D = linear_sum_assignment(kept_DD * (D + 1) + np.eye(D, dtype=int), maximize=True)
    pipeline_D = tuple(columns_D.tolist())
    worker_PD = tuple(
        _stage_workers(pipeline_D, target_live_DP[:, p], live_DP[:, p]) for p in range(problem.num_stages)
    )
    return Normalized(problem, target, pipeline_D, worker_PD)


def denormalize(schedule: Schedule, normalized: Normalized) -> Schedule:
    """Maps a schedule of the canonical problem back to the original one: the same ops at the same times."""
    assert schedule.problem == normalized.problem, "a schedule of another problem"
    P = normalized.problem.num_stages
    worker_DP = np.array(normalized.worker_PD).T * P + np.arange(P)
    # Whole workers swap places, so each worker's rows are still in order.
    player = np.argsort(worker_DP.ravel())
    rows = np.concatenate([np.arange(schedule.bounds[w], schedule.bounds[w + 1]) for w in player])
    worker = worker_DP.ravel()[schedule.worker[rows]].astype(np.int32)
    kind = schedule.kind[rows]
    microbatch_pipeline = np.array(normalized.pipeline_D)[schedule.pipeline[rows]]
    return Schedule(
        problem=normalized.original,
        solver=schedule.solver,
        worker=worker,
        kind=kind,
        iteration=schedule.iteration[rows],
        pipeline=np.where(kind == Kind.U, worker // P, microbatch_pipeline).astype(np.int32),
        microbatch=schedule.microbatch[rows],
        chunk=schedule.chunk[rows],
        start=schedule.start[rows],
        end=schedule.end[rows],
    )


def spread(problem: Problem, num_failures: int) -> tuple[int, ...]:
    """Distributes failures over the stages so that the bound on the period is smallest, for moving roles.

    This is ReCycle's dynamic program. Among the counts with the smallest maximum of ``tight_stage_bound`` it chooses
    those with the smallest sum of bounds, because a planner gets closer to the bound if the other stages have more
    slack. Ties go to counts with more failures in earlier stages.

    Args:
        problem: problem to plan; its own failures are ignored.
        num_failures: number of failed workers.

    Returns:
        Number of failures in each stage; they sum to ``num_failures``, and each is less than D.

    Raises:
        SettingError: there are too many failures to leave every stage a survivor.

    >>> spread(Problem(Topology(3, 4), num_microbatches=6), 1)
    (1, 0, 0, 0)
    """
    check_count("num_failures", num_failures, least=0)
    D, P = problem.num_pipelines, problem.num_stages
    if num_failures > P * (D - 1):
        allowed = f"at most {P * (D - 1)} failures leave each of {P} stages one of {D} workers"
        raise SettingError("num_failures", num_failures, allowed)
    most = min(num_failures, D - 1)
    bounds_PD = [[tight_stage_bound(problem, p, D - count) for count in range(most + 1)] for p in range(P)]
    # Rounded decimals: float errors in a bound or in a sum must not break ties.
    cost_PD = [[Decimal(f"{bound:.12g}") for bound in row] for row in bounds_PD]
    # A stage's bound grows with its failures, so taking the cheapest failures one by one minimizes the maximum.
    limit = max([row[0] for row in cost_PD] + sorted(cost for row in cost_PD for cost in row[1:])[:num_failures])
    best: list[_Spread] = [(Decimal(0), ())]
    for row in reversed(cost_PD):
        costs = [cost for cost in row if cost <= limit]
        most = min(num_failures, len(costs) - 1 + len(best) - 1)
        best = [_cheapest(costs, best, total) for total in range(most + 1)]
    return best[num_failures][1]


def role_moves(problem: Problem, counts: tuple[int, ...]) -> tuple[Move, ...]:
    """Finds the fewest moves after which each stage p has ``counts[p]`` failures.

    Workers move from the pipelines with the most failures to places in the pipelines with the fewest, so that failures
    concentrate in few pipelines.

    Raises:
        SettingError: the counts are impossible in this topology, or do not sum to the problem's failures.
    """
    canonical(problem, counts)
    if sum(counts) != len(problem.failed):
        raise SettingError("failure counts", counts, f"must sum to the {len(problem.failed)} failures there are")
    failures_D = [sum(d == pipeline for d, _ in problem.failed) for pipeline in range(problem.num_pipelines)]
    givers: list[Worker] = []
    roles: list[Worker] = []
    for p, count in enumerate(counts):
        failed = sorted(d for d, stage in problem.failed if stage == p)
        peers = [d for d in range(problem.num_pipelines) if d not in failed]
        surplus = count - len(failed)
        givers += [(d, p) for d in sorted(peers, key=lambda d: -failures_D[d])[: max(0, surplus)]]
        roles += [(d, p) for d in sorted(failed, key=lambda d: failures_D[d])[: max(0, -surplus)]]
    return tuple(Move(*pair) for pair in zip(givers, roles, strict=True))


def after_moves(problem: Problem, moved: tuple[Move, ...]) -> Problem:
    """Applies moves to a problem. The place that a worker leaves counts as failed unless another worker takes it."""
    assigned_roles, moved_workers = {move.role for move in moved}, {move.worker for move in moved}
    return replace(problem, failed=(problem.failed | moved_workers) - assigned_roles)


def num_plans(topology: Topology, max_failures: int, *, move_roles: bool = False) -> int:
    """Counts the plans that cover all failure sets of up to ``max_failures`` workers with a survivor in each stage.

    With moved roles there is one plan per number of failures. Otherwise there is one plan for each vector of counts
    (f_0 .. f_{P-1}), each less than D, with a sum of at most ``max_failures``. A dynamic program over the stages counts
    these vectors.

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
    """Yields the canonical problems for all failure sets of up to ``max_failures`` workers, fewest failures first.

    Args:
        problem: problem to plan; its own failures are ignored.
        max_failures: largest number of failures; ``num_plans`` computes the number of resulting problems.
        move_roles: True for one problem per number of failures, with the failures spread over the stages.
    """
    check_count("max_failures", max_failures, least=0)
    D, P = problem.num_pipelines, problem.num_stages
    for num_failures in range(min(max_failures, P * (D - 1)) + 1):
        if move_roles:
            yield canonical(problem, spread(problem, num_failures))
        else:
            yield from (canonical(problem, counts) for counts in _count_vectors(P, D, num_failures))


def plan_document(schedule: Schedule) -> dict[str, Any]:
    """Describes the plan of a normalized problem in JSON values, as stored under ``plan`` in a file."""
    iteration_plan = round_of(schedule)
    arrays = {name: _flat(value) for name, value in vars(iteration_plan).items() if name != "period"}
    return plan_header(schedule.problem, schedule.solver) | {"round": arrays | {"period": iteration_plan.period}}


def plan_header(problem: Problem, solver: str) -> dict[str, Any]:
    """Describes a problem and its planner; identical for all problems with the same normalized form."""
    limit, number, fields = problem.memory_limit, problem.num_microbatches, chunk_fields(problem)
    if not problem.is_uniform:
        fields["failed"] = [list(worker) for worker in sorted(problem.failed)]
    return {
        "version": VERSION,
        "solver": solver,
        "problem": fields
        | {
            "num_pipelines": problem.num_pipelines,
            "num_microbatches": number if isinstance(number, int) else list(number),
            "num_stages": problem.num_stages,
            "failures": list(failure_counts(problem)),
            # Adding 0.0 makes the text of equal problems equal: 8 and 8.0, or 0.0 and -0.0, would differ in their hash.
            "costs": {name: value + 0.0 for name, value in asdict(problem.costs).items()},
            "memory_limit": None if limit is None else float(limit),
            "num_iterations": problem.num_iterations,
            "decoupled": problem.decoupled,
            "staggered": problem.staggered,
        },
    }


def _flat(values: np.ndarray) -> list[Any]:
    return [None if math.isnan(value) else value for value in values.ravel().tolist()]


def chunk_fields(problem: Problem) -> dict[str, Any]:
    """Describes the problem's chunks and the stages that hold them; omits default values."""
    fields: dict[str, Any] = {}
    if problem.chunks:
        fields["chunks"] = [asdict(chunk) for chunk in problem.chunks]
    if problem.stage_of_chunk:
        fields["stage_of_chunk"] = [list(stages) for stages in problem.stage_of_chunk]
    return fields


def _count_vectors(num_stages: int, num_pipelines: int, total: int) -> Iterator[tuple[int, ...]]:
    if num_stages == 0:
        yield ()
        return
    later = (num_stages - 1) * (num_pipelines - 1)
    for count in range(max(0, total - later), min(total, num_pipelines - 1) + 1):
        for rest in _count_vectors(num_stages - 1, num_pipelines, total - count):
            yield (count, *rest)


_Spread = tuple[Decimal, tuple[int, ...]]
"""(sum of bounds, failures in each stage) for a stage and all later ones."""


def _cheapest(costs: list[Decimal], best: list[_Spread], total: int) -> _Spread:
    """Finds the smallest sum of bounds for a stage and all later ones; ties put more failures into this stage.

    Args:
        costs: bound of this stage for each number of failures.
        best: best distribution over the later stages for each number of failures.
        total: number of failures to distribute.
    """
    counts = range(max(0, total - len(best) + 1), min(total, len(costs) - 1) + 1)
    count = min(reversed(counts), key=lambda count: costs[count] + best[total - count][0])
    return costs[count] + best[total - count][0], (count, *best[total - count][1])


def _live(problem: Problem) -> np.ndarray:
    live_DP = np.ones((problem.num_pipelines, problem.num_stages), bool)
    for worker in problem.failed:
        live_DP[worker] = False
    return live_DP


def _stage_workers(pipeline_D: tuple[int, ...], target_live_D: np.ndarray, live_D: np.ndarray) -> tuple[int, ...]:
    """Chooses a stage's workers: those of ``pipeline_D``, except for swaps that give live places live workers."""
    workers = list(pipeline_D)
    unmanned = [e for e, d in enumerate(pipeline_D) if target_live_D[e] and not live_D[d]]
    idle = [e for e, d in enumerate(pipeline_D) if live_D[d] and not target_live_D[e]]
    for e, other in zip(unmanned, idle, strict=True):
        workers[e], workers[other] = workers[other], workers[e]
    return tuple(workers)


def moves_to_spread(problem: Problem) -> tuple[Move, ...]:
    """Finds the moves after which the bound on the period is smallest, for the failures of a problem.

    Args:
        problem: problem with failures, in which every chunk has a live worker.

    >>> from swift.topology import Topology
    >>> moves_to_spread(Problem(Topology(3, 4), num_microbatches=6, failed=frozenset({(1, 2)})))
    (Move(worker=(1, 0), role=(1, 2)),)
    >>> apart = (0, 0, 1), (0, 1, 1), (0, 1, 1)
    >>> moves_to_spread(Problem(Topology(3, 2), 2, frozenset({(1, 0), (2, 0)}), stage_of_chunk=apart))
    (Move(worker=(0, 1), role=(2, 0)),)
    """
    if problem.is_uniform:
        return role_moves(problem, spread(problem, len(problem.failed)))
    failed, empty = problem.failed, _roles_to_vacate(problem)
    return tuple(Move(*pair) for pair in zip(sorted(empty - failed), sorted(failed - empty), strict=True))


def _roles_to_vacate(problem: Problem) -> frozenset[Worker]:
    """Chooses as many roles to leave empty as there are failures: the failed workers' unless others are better."""
    empty = frozenset[Worker]()
    for _ in problem.failed:
        ways = [empty | {role} for role in problem.topology.workers if role not in empty]
        candidates = [(_bound(problem, way), way) for way in ways if _is_possible(problem, way)]
        if not candidates:
            return problem.failed
        empty = min(candidates, key=lambda pair: (pair[0], len(pair[1] - problem.failed), sorted(pair[1])))[1]
    return empty if _bound(problem, empty) < _bound(problem, problem.failed) else problem.failed


def _bound(problem: Problem, failed: frozenset[Worker]) -> float:
    """Returns ``tight_bound`` for a failure set, rounded so that float errors do not decide between roles."""
    return round(tight_bound(replace(problem, failed=failed)), 9)


def _is_possible(problem: Problem, failed: frozenset[Worker]) -> bool:
    """Returns whether every stage and every chunk still has a live worker."""
    places = [(p,) * problem.num_pipelines for p in range(problem.num_stages)] + problem.stage_DP.T.tolist()
    return all(any((d, p) not in failed for d, p in enumerate(stage_D)) for stage_D in places)


class ChunkAssignment(NamedTuple):
    """Assignment of chunks to workers. Falsy if every chunk is a stage in the run's own uniform cut.

    Attributes:
        stage_of_chunk: for each pipeline, the stage that holds each chunk; () for a pipeline in which no worker has a
            place. Empty if every chunk is a stage.
        moves: workers that took the place of another worker.
    """

    stage_of_chunk: tuple[tuple[int, ...], ...] = ()
    moves: tuple[Move, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.stage_of_chunk)

    def place(self, worker: Worker) -> Worker:
        """Returns the place of a worker: the pipeline and stage whose chunks it holds.

        >>> holders = ChunkAssignment(((0, 1), (0, 1)), (Move(worker=(1, 0), role=(0, 1)),))
        >>> holders.place((1, 0)), holders.place((1, 1))
        ((0, 1), (1, 1))
        """
        return next((place for mover, place in self.moves if mover == worker), worker)

    def lost_chunks(self, workers: Collection[Worker]) -> tuple[int, ...]:
        """Lists the chunks that none of these workers holds; empty if every chunk is a stage.

        >>> ChunkAssignment(((0, 0, 1), (0, 1, 1))).lost_chunks([(0, 1), (1, 0)])
        (1,)
        """
        places = {self.place(worker) for worker in workers}
        nonempty = [(d, stages) for d, stages in enumerate(self.stage_of_chunk) if stages]
        chunks = range(len(nonempty[0][1])) if nonempty else ()
        return tuple(chunk for chunk in chunks if places.isdisjoint((d, stages[chunk]) for d, stages in nonempty))

    @property
    def cuts(self) -> list[list[int]]:
        """Number of chunks in each stage, for each pipeline.

        >>> ChunkAssignment(((0, 0, 1), (0, 2, 2), ())).cuts
        [[2, 1, 0], [1, 0, 2], [0, 0, 0]]
        """
        num_stages = 1 + max((stage for stages in self.stage_of_chunk for stage in stages), default=-1)
        return [[stages.count(stage) for stage in range(num_stages)] for stages in self.stage_of_chunk]

    @property
    def positions(self) -> dict[str, str]:
        """Moved workers as text, mapped to their places as text, both ``d:p``."""
        return {"{}:{}".format(*worker): "{}:{}".format(*place) for worker, place in self.moves}

    @property
    def text(self) -> str:
        """Text that states how many layers each stage has and which workers moved, for chunks of one layer.

        >>> ChunkAssignment(((0, 0, 1), (0, 2, 2)), (Move((1, 1), (0, 1)),)).text
        'stages of 2, 1, 0; 1, 0, 2 layers, 1:1 replacing 0:1'
        """
        cuts = "; ".join(", ".join(map(str, sizes)) for sizes in self.cuts)
        moved = "".join(f", {worker} replacing {place}" for worker, place in self.positions.items())
        return f"stages of {cuts} layers{moved}"


DEFAULT_ASSIGNMENT = ChunkAssignment()
"""Assignment in which every worker is in its own place and holds the chunks of the run's own cut."""
