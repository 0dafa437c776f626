"""A configuration: the plan for a failure set, and who plays which part in it.

Only how many failures every stage has matters to a plan (ReCycle's failure normalization). So rows of the mesh are
parts of the canonical problem, and who plays them is data: configurations that differ only in who failed share a plan,
and their programs differ in the order of the devices only.

D: pipelines, P: stages, M: micro-batches of a pipeline, K: iterations of a window, R: rows, n: micro-batches that a
worker meets, N: expert ranks, B: sequences, T: positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from swift.data import Batch
from swift.mesh import MeshRow
from swift.pipeline.reconfigure.executable_cache import ExecutableCache
from swift.pipeline.runtime import share_sequences
from swift.schedules import (
    OwnPlanner,
    Problem,
    Schedule,
    SlotBytes,
    TickTable,
    lower,
    moves,
    normalize,
    plan_with,
    round_of,
    spread,
)
from swift.schedules.plans import after_moves
from swift.topology import Topology, Worker


@dataclass(frozen=True)
class PlanSettings:
    """What all plans of a run share.

    Attributes:
        problem: a window of K iterations of the whole cluster, without failures.
        planner: name of one of ``PLANNERS``, or a planner from elsewhere.
        sizes: bytes of the slots of a stage on a rank.
        move_roles: whether workers may change their stage, to spread the failures as well as can be.
    """

    problem: Problem
    planner: str | OwnPlanner = "lockstep"
    sizes: SlotBytes = field(default_factory=lambda: SlotBytes(0, 0, 0))
    move_roles: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule and its tick table: what an SPMD program delivers, whose ticks take as long as their longest op."""

    schedule: Schedule
    table: TickTable

    @classmethod
    def of(cls, schedule: Schedule) -> "Plan":
        """With the ticks of ``lower``."""
        return cls(schedule, lower(schedule))

    @property
    def period(self) -> float:
        """Time of an iteration, in the unit of the costs: that of all ticks, over the iterations."""
        op_times = np.array([0.0, *self.schedule.problem.costs.op_times])
        return float(op_times[self.table.opcode_TR].max(axis=1).sum()) / self.schedule.problem.num_iterations

    @property
    def bubble_share(self) -> float:
        """Share of the live workers' time in which they run nothing."""
        busy = float((self.schedule.end - self.schedule.start).sum()) / self.schedule.problem.num_iterations
        return 1.0 - busy / (len(self.table.workers) * self.period)


@dataclass(frozen=True, eq=False)
class Configuration:
    """A planned failure set.

    Attributes:
        failed: the workers that are down.
        places: for every row of the mesh, who runs it and for which stage.
        pipeline_D: for every pipeline of the plan, the one whose micro-batches it runs.
        plans: by the number of iterations: of a window, and of a lone one that ends with a barrier.
    """

    failed: frozenset[Worker]
    places: tuple[MeshRow, ...]
    pipeline_D: tuple[int, ...]
    plans: Mapping[int, Plan]

    @property
    def window(self) -> int:
        """K."""
        return max(self.plans)


class Configurator:
    """Plans configurations, each canonical problem once; may be used from several threads.

    Args:
        settings: of all plans.
        store: where processes of the same run find each other's plans: whoever prepares a failure has planned for it.
    """

    def __init__(self, settings: PlanSettings, store: ExecutableCache | None = None):
        self.settings, self._store = settings, store
        self._plans: dict[Problem, Mapping[int, Plan]] = {}

    def configure(self, failed: frozenset[Worker]) -> Configuration:
        """The plan for a failure set.

        Raises:
            SettingError: a stage has no survivor, or the planner cannot plan for failures.
        """
        settings = self.settings
        problem = replace(settings.problem, failed=failed)
        players: dict[Worker, Worker] = {}
        if settings.move_roles:
            moved = moves(problem, spread(problem, len(failed)))
            problem, players = after_moves(problem, moved), {move.role: move.worker for move in moved}
        normalized = normalize(problem)
        canonical = normalized.problem
        if canonical not in self._plans:
            self._plans[canonical] = self._shared_plan(canonical)
        parts = canonical.topology.live_workers(canonical.failed)
        played = [(normalized.worker_PD[stage][pipeline], stage) for pipeline, stage in parts]
        places = tuple(MeshRow(players.get(role, role), role[1]) for role in played)
        return Configuration(failed, places, normalized.pipeline_D, self._plans[canonical])

    def _shared_plan(self, canonical: Problem) -> Mapping[int, Plan]:
        if self._store is None:
            return self._plan(canonical)
        failed = sorted(canonical.failed)  # a set has no order of its own
        key = "plan", failed, replace(canonical, failed=frozenset())
        return self._store.value(key, lambda: self._plan(canonical))

    def _plan(self, canonical: Problem) -> Mapping[int, Plan]:
        schedule = plan_with(self.settings.planner, canonical)
        plans = {canonical.num_iterations: Plan.of(schedule)}
        if canonical.num_iterations > 1:
            # The window's own iteration: its sums are in the same order, so that a window is what its iterations are
            # one by one, bit for bit.
            alone = replace(schedule.problem, num_iterations=1)
            plans[1] = Plan.of(Schedule.from_round(alone, schedule.solver, round_of(schedule)))
        return plans


def neighbours(topology: Topology, failed: frozenset[Worker]) -> Iterator[frozenset[Worker]]:
    """The failure sets that one return or one failure leads to, but those that leave a stage without a worker.

    >>> [sorted(other) for other in neighbours(Topology(2, 2), frozenset({(0, 1)}))]
    [[], [(0, 0), (0, 1)], [(0, 1), (1, 0)]]
    """
    yield from (failed - {worker} for worker in sorted(failed))
    for worker in topology.workers:
        if worker not in failed and survives(topology, failed | {worker}):
            yield failed | {worker}


def survives(topology: Topology, failed: frozenset[Worker]) -> bool:
    """Whether every stage has a live worker."""
    return all(any((d, p) not in failed for d in range(topology.num_pipelines)) for p in range(topology.num_stages))


def batch_of_rows(batches: Sequence[Batch], table: TickTable, pipeline_D: Sequence[int], num_ranks: int) -> Batch:
    """The micro-batches that every row of the mesh meets in a window.

    Args:
        batches: of the window's iterations, each ``[D * M, B, T]``, pipeline by pipeline.
        table: says who meets what.
        pipeline_D: as in ``Configuration``.
        num_ranks: N, among which the sequences of a micro-batch are split.

    Returns:
        ``[R, n, N, B / N, T]``, see ``share_sequences``; nothing is valid where a row meets fewer micro-batches than
        another.
    """
    iteration_Rn, pipeline_Rn, microbatch_Rn = np.moveaxis(table.data_Rn, -1, 0)
    total = len(batches[0].inputs)
    index_Rn = np.asarray(pipeline_D)[pipeline_Rn] * (total // len(pipeline_D)) + microbatch_Rn
    is_there_Rn = iteration_Rn >= 0

    def chosen(leaf_KX: np.ndarray) -> np.ndarray:
        taken = leaf_KX[iteration_Rn, index_Rn] * is_there_Rn[..., None, None]
        return share_sequences(taken.astype(leaf_KX.dtype), num_ranks)

    return Batch(*(chosen(np.stack(leaves)) for leaves in zip(*batches, strict=True)))
