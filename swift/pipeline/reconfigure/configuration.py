"""Configurations: the plan for a failure set, and the live worker in each of its roles.

A plan depends only on the number of failures in each stage (ReCycle's failure normalization). So mesh rows are roles of
a canonical problem, which any workers can fill: configurations that differ only in which workers failed share a plan,
and their programs differ only in the order of the devices.

Legend: D pipelines, P stages, M micro-batches of a pipeline, K iterations of a window, R mesh rows, n micro-batches of
a worker, N expert ranks, B sequences, T positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from swift.data.windows import Batch
from swift.mesh.live import LiveMesh, MeshRow
from swift.mesh.per_rank import AXES
from swift.models.cuts import Chunks
from swift.pipeline.reconfigure.executables import ExecutableCache
from swift.pipeline.step.single_worker import share_sequences
from swift.schedules.lowering.lower import SlotBytes, allocated_bytes, lower
from swift.schedules.lowering.tick_table import TickTable
from swift.schedules.planners.names import CustomPlanner
from swift.schedules.plans.normalize import Move, after_moves, normalize
from swift.schedules.problem import Kind, Problem
from swift.schedules.registry import plan_with
from swift.schedules.schedule import Schedule, round_of
from swift.topology import Topology, Worker


@dataclass(frozen=True)
class PlanSettings:
    """Settings that all plans of a run share.

    Attributes:
        problem: window of K iterations on the whole cluster, without failures.
        planner: name of one of ``PLANNERS``, or a planner object.
        sizes: bytes of each kind of buffer slot of a stage, on one rank.
        moves: workers that take another worker's place, for the single failure set that is planned.
        adapt: adaptations that survivors may use in addition to re-routing, see ``find_recut``.
    """

    problem: Problem
    planner: str | CustomPlanner = "lockstep"
    sizes: SlotBytes = field(default_factory=lambda: SlotBytes(0, 0, 0))
    moves: tuple[Move, ...] = ()
    adapt: Literal["reroute", "reassign", "recut", "auto"] = "auto"


@dataclass(frozen=True, eq=False)
class Plan:
    """Schedule and its tick table, for an SPMD program whose ticks take as long as their longest op."""

    schedule: Schedule
    table: TickTable

    @classmethod
    def of(cls, schedule: Schedule) -> "Plan":
        """Returns the plan of a schedule, with ticks from ``lower``."""
        return cls(schedule, lower(schedule))

    @property
    def period(self) -> float:
        """Time per iteration, in the costs' unit: the sum over all ticks, divided by the iterations."""
        opcode_TR, problem = self.table.opcode_TR, self.schedule.problem
        time_TR = np.where(opcode_TR > 0, problem.time_4P[opcode_TR - 1, self.table.chunk_TR], 0.0)
        return float(time_TR.max(axis=1).sum()) / problem.num_iterations

    def stash_bytes(self, sizes: SlotBytes) -> int:
        """Computes the bytes that a rank allocates for stashes and messages, given the bytes per slot of each kind."""
        if len(self.schedule.problem.topology.workers) == 1:  # one micro-batch after another, without a table
            return sizes.stash_for_b + sizes.stash_for_b_and_w + sizes.activation
        return allocated_bytes(self.table, sizes)

    @property
    def relative_period(self) -> float:
        """``period`` relative to a micro-batch's work on all chunks, which makes it independent of costs and cuts."""
        return self.period / float(self.schedule.problem.time_4P[: Kind.U].sum())

    @property
    def bubble_share(self) -> float:
        """Idle share of the live workers' time."""
        busy = float((self.schedule.end - self.schedule.start).sum()) / self.schedule.problem.num_iterations
        return max(0.0, 1.0 - busy / (len(self.table.workers) * self.period))


@dataclass(frozen=True, eq=False)
class Configuration:
    """Failure set with its plans.

    Attributes:
        failed: workers that are down.
        rows: worker and stage of every mesh row.
        pipeline_D: for each pipeline of the plan, the pipeline whose micro-batches it runs.
        plans: plans by number of iterations: for a window, and for a single iteration that ends with a barrier.
        device_rows: for each mesh row, the index of its row of devices in the group of processes. It depends only on
            the failures, not on the cut of the layers, so that processes need not form a new group to move blocks.
        moves: workers that take another worker's place.
    """

    failed: frozenset[Worker]
    rows: tuple[MeshRow, ...]
    pipeline_D: tuple[int, ...]
    plans: Mapping[int, Plan]
    device_rows: tuple[int, ...]
    moves: tuple[Move, ...] = ()

    def live_mesh(self, topology: Topology, devices_RN: np.ndarray) -> LiveMesh:
        """Returns the live mesh on a process group's devices, ``[R, N]`` in process order."""
        return LiveMesh(topology, self.rows, Mesh(devices_RN[list(self.device_rows)], AXES))

    def with_devices_of(self, other: "Configuration") -> "Configuration":
        """Returns the same configuration, with every worker on the devices that it has in another configuration."""
        row_of = dict(zip((row.worker for row in other.rows), other.device_rows, strict=True))
        return replace(self, device_rows=tuple(row_of[row.worker] for row in self.rows))

    @property
    def window(self) -> int:
        """Iterations of a window, K."""
        return max(self.plans)

    @property
    def roles(self) -> list[Any]:
        """Stage of every mesh row, together with its pipeline if pipelines differ; programs depend on these."""
        is_alike = self.plans[1].schedule.problem.is_uniform
        return [row.stage if is_alike else row.role for row in self.rows]

    @property
    def chunks(self) -> Any:
        """Block counts of the chunks, if known, and the stage that holds each chunk, by pipeline."""
        problem = self.plans[1].schedule.problem
        return [chunk.num_blocks for chunk in problem.chunks], problem.stage_of_chunk


class Configurator:
    """Plans configurations and caches the plan of each canonical problem; safe to use from several threads.

    Args:
        settings: settings of all plans.
        store: cache in which the processes of a run share plans, or None for no cache.
    """

    def __init__(self, settings: PlanSettings, store: ExecutableCache | None = None):
        self.settings, self._store = settings, store
        self._plans: dict[Problem, Mapping[int, Plan]] = {}

    def configure(self, failed: frozenset[Worker]) -> Configuration:
        """Returns the configuration for a failure set.

        Raises:
            SettingError: a stage has no survivor, or the planner cannot plan for failures.
        """
        settings = self.settings
        problem = replace(settings.problem, failed=failed)
        problem, players = after_moves(problem, settings.moves), {place: worker for worker, place in settings.moves}
        normalized = normalize(problem)
        canonical = normalized.problem
        if canonical not in self._plans:
            self._plans[canonical] = self._shared_plan(canonical)
        roles = canonical.topology.live_workers(canonical.failed)
        played = [(normalized.worker_PD[stage][pipeline], stage) for pipeline, stage in roles]
        rows = tuple(_mesh_row(players.get(role, role), role, is_alike=problem.is_uniform) for role in played)
        in_order = tuple(range(len(rows)))
        return Configuration(failed, rows, normalized.pipeline_D, self._plans[canonical], in_order, settings.moves)

    def _shared_plan(self, canonical: Problem) -> Mapping[int, Plan]:
        if self._store is None:
            return self._plan(canonical)
        failed = sorted(canonical.failed)  # sorted, since sets are unordered
        key = "plan", failed, replace(canonical, failed=frozenset())
        return self._store.value(key, lambda: self._plan(canonical))

    def _plan(self, canonical: Problem) -> Mapping[int, Plan]:
        schedule = plan_with(self.settings.planner, canonical)
        plans = {canonical.num_iterations: Plan.of(schedule)}
        if canonical.num_iterations > 1:
            # Single iterations use the window's own schedule: with sums in the same order, a window and its iterations
            # run one by one are bit-identical.
            alone = replace(schedule.problem, num_iterations=1)
            plans[1] = Plan.of(Schedule.from_round(alone, schedule.solver, round_of(schedule)))
        return plans


def _mesh_row(worker: Worker, role: Worker, *, is_alike: bool) -> MeshRow:
    """Returns the mesh row of a worker in a role; it includes the role's pipeline only if pipelines differ."""
    return MeshRow(worker, role[1]) if is_alike else MeshRow.at(worker, role)


def neighbours(
    topology: Topology, failed: frozenset[Worker], chunks: Chunks | None = None
) -> Iterator[frozenset[Worker]]:
    """Yields the failure sets one return or one failure away, except sets that leave a stage or chunk without a worker.

    >>> [sorted(other) for other in neighbours(Topology(2, 2), frozenset({(0, 1)}))]
    [[], [(0, 0), (0, 1)], [(0, 1), (1, 0)]]
    """
    yield from (failed - {worker} for worker in sorted(failed))
    for worker in topology.workers:
        if worker not in failed and survives(topology, failed | {worker}, chunks):
            yield failed | {worker}


def survives(topology: Topology, failed: frozenset[Worker], chunks: Chunks | None = None) -> bool:
    """Whether every stage has a live worker and, given ``chunks``, every chunk does, too."""
    stages = [(p,) * topology.num_pipelines for p in range(topology.num_stages)]
    stages += [] if chunks is None else zip(*chunks.stage_DC, strict=True)
    return all(any((d, p) not in failed for d, p in enumerate(stage_D)) for stage_D in stages)


def batch_of_rows(
    batches: Sequence[Batch],
    table: TickTable,
    pipeline_D: Sequence[int],
    num_ranks: int,
    microbatches_D: Sequence[int] | None = None,
) -> Batch:
    """Collects the micro-batches of every mesh row in a window.

    Args:
        batches: batches of the window's iterations, ``[micro-batches, B, T]`` each, pipeline by pipeline.
        table: tick table, which assigns micro-batches to mesh rows.
        pipeline_D: see ``Configuration``.
        num_ranks: N, the ranks that share the sequences of a micro-batch.
        microbatches_D: number of micro-batches of each pipeline, or None if all have equally many.

    Returns:
        ``[R, n, N, B / N, T]``, see ``share_sequences``; rows with fewer micro-batches than others are padded with
        invalid tokens.
    """
    iteration_Rn, pipeline_Rn, microbatch_Rn = np.moveaxis(table.data_Rn, -1, 0)
    total = len(batches[0].inputs)
    counts_D = microbatches_D or [total // len(pipeline_D)] * len(pipeline_D)
    first_D = np.cumsum([0, *counts_D])
    assert first_D[-1] == total, f"{counts_D} micro-batches of {total}"
    index_Rn = first_D[np.asarray(pipeline_D)[pipeline_Rn]] + microbatch_Rn
    has_microbatch_Rn = iteration_Rn >= 0

    def chosen(leaf_KX: np.ndarray) -> np.ndarray:
        leaf_RnX = leaf_KX[iteration_Rn, index_Rn] * has_microbatch_Rn[..., None, None]
        return share_sequences(leaf_RnX.astype(leaf_KX.dtype), num_ranks)

    stacked = (None if leaves[0] is None else chosen(np.stack(leaves)) for leaves in zip(*batches, strict=True))
    return Batch(*stacked)  # type: ignore[arg-type]
