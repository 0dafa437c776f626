"""A configuration: the plan for a failure set, and who plays which part in it.

Only how many failures every stage has matters to a plan (ReCycle's failure normalization). So rows of the mesh are
parts of the canonical problem, and who plays them is data: configurations that differ only in who failed share a plan
and, apart from the order of the devices, a program.

D: pipelines, P: stages, M: micro-batches of a pipeline, K: iterations of a window, R: rows, n: micro-batches that a
worker meets, N: expert ranks, B: sequences, T: positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from swift.data import Batch
from swift.mesh import Place
from swift.schedules import (
    PLANNERS,
    Costs,
    Problem,
    Schedule,
    TickTable,
    bubble_share,
    lower,
    moves,
    normalize,
    spread,
    window_period,
)
from swift.schedules.normalize import after_moves
from swift.topology import Topology, Worker


@dataclass(frozen=True)
class PlanSettings:
    """What all plans of a run share.

    Attributes:
        topology: the whole cluster.
        num_microbatches: M, of a pipeline and iteration.
        planner: name of one of ``PLANNERS``.
        window: K.
        costs: of the model's stages.
        memory_limit: of a worker, in the unit of the costs' stashes; None: no limit.
        move_roles: whether workers may change their stage, to spread the failures as well as can be.
    """

    topology: Topology
    num_microbatches: int
    planner: str = "lockstep"
    window: int = 1
    costs: Costs = field(default_factory=Costs)
    memory_limit: float | None = None
    move_roles: bool = False


@dataclass(frozen=True, eq=False)
class Configuration:
    """A planned failure set.

    Attributes:
        failed: the workers that are down.
        places: for every row of the mesh, who runs it and for which stage.
        pipeline_D: for every pipeline of the plan, the one whose micro-batches it runs.
        schedules: of windows of K iterations and of one; the latter ends with a barrier.
    """

    failed: frozenset[Worker]
    places: tuple[Place, ...]
    pipeline_D: tuple[int, ...]
    schedules: dict[int, Schedule]

    @cached_property
    def tables(self) -> dict[int, TickTable]:
        """The tick tables of the schedules, by the number of iterations."""
        return {num_iterations: lower(schedule) for num_iterations, schedule in self.schedules.items()}

    @property
    def main(self) -> Schedule:
        """The schedule of a whole window."""
        return self.schedules[max(self.schedules)]

    @property
    def period(self) -> float:
        """Time of an iteration, in the unit of the costs: what a window that drains delivers."""
        return window_period(self.main)

    @property
    def bubble_share(self) -> float:
        """Share of the live workers' time in which they run nothing."""
        return bubble_share(self.main)


class Planner:
    """Plans configurations, each canonical problem once."""

    def __init__(self, settings: PlanSettings):
        self.settings = settings
        self._schedules: dict[Problem, Schedule] = {}

    def configure(self, failed: frozenset[Worker]) -> Configuration:
        """The plan for a failure set.

        Raises:
            SettingError: a stage has no survivor, or the planner cannot plan for failures.
        """
        settings = self.settings
        problem = Problem(
            settings.topology,
            settings.num_microbatches,
            failed,
            settings.costs,
            settings.memory_limit,
            num_iterations=settings.window,
        )
        players: dict[Worker, Worker] = {}
        if settings.move_roles:
            moved = moves(problem, spread(problem, len(failed)))
            problem, players = after_moves(problem, moved), {move.role: move.worker for move in moved}
        normalized = normalize(problem)
        canonical = normalized.problem
        parts = canonical.topology.live_workers(canonical.failed)
        played = [(normalized.worker_PD[stage][pipeline], stage) for pipeline, stage in parts]
        return Configuration(
            failed,
            tuple(Place(players.get(role, role), role[1]) for role in played),
            normalized.pipeline_D,
            {count: self._plan(replace(canonical, num_iterations=count)) for count in {1, settings.window}},
        )

    def _plan(self, canonical: Problem) -> Schedule:
        if canonical not in self._schedules:
            self._schedules[canonical] = PLANNERS[self.settings.planner](canonical)
        return self._schedules[canonical]


def batch_of_rows(batches: Sequence[Batch], table: TickTable, pipeline_D: Sequence[int], num_ranks: int) -> Batch:
    """The micro-batches that every row of the mesh meets in a window.

    Args:
        batches: of the window's iterations, each ``[D * M, B, T]``, pipeline by pipeline.
        table: says who meets what.
        pipeline_D: as in ``Configuration``.
        num_ranks: N, among which the sequences of a micro-batch are split.

    Returns:
        ``[R, n, N, B / N, T]``; where a row meets fewer micro-batches than another, nothing is valid.
    """
    iteration_Rn, pipeline_Rn, microbatch_Rn = np.moveaxis(table.data_Rn, -1, 0)
    total, num_sequences, length = batches[0].inputs.shape
    index_Rn = np.asarray(pipeline_D)[pipeline_Rn] * (total // len(pipeline_D)) + microbatch_Rn
    is_there_Rn = iteration_Rn >= 0

    def chosen(leaf_KX: np.ndarray) -> np.ndarray:
        taken = leaf_KX[iteration_Rn, index_Rn] * is_there_Rn[..., None, None]
        return taken.astype(leaf_KX.dtype).reshape(*index_Rn.shape, num_ranks, num_sequences // num_ranks, length)

    return Batch(*(chosen(np.stack(leaves)) for leaves in zip(*batches, strict=True)))
