"""Other cuts and numbers of micro-batches than those of the run, for as long as some workers are down.

A pipeline that has lost a worker may hold its blocks on the others, and run fewer micro-batches; or a worker takes the
place of another one, in its own pipeline or elsewhere. The batch, the sums and the checkpoints stay what they are.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from swift.errors import SettingError, check_count
from swift.mesh.live import MeshRow
from swift.models.cuts.chunks import Chunks
from swift.pipeline.reconfigure.failure_config import Plan
from swift.pipeline.runtime.step_spec import StepSpec
from swift.schedules.chunks import common_chunks
from swift.schedules.plans.holders import BlockHolders
from swift.schedules.plans.normalize import Move
from swift.schedules.schedule import Schedule
from swift.topology import Worker


@dataclass(frozen=True)
class Recut:
    """The shares of stages and pipelines in an iteration's work.

    Attributes:
        cuts: number of blocks of each stage, by pipeline; 0 for a place that nobody has; empty, as are ``microbatches``
            then: those of the run.
        microbatches: micro-batches of each pipeline, as many together as without it.
        schedule: schedule that is run; None: that of the run's planner.
        moves: workers that have another's place.
    """

    cuts: tuple[tuple[int, ...], ...] = ()
    microbatches: tuple[int, ...] = ()
    schedule: Schedule | None = None
    moves: tuple[Move, ...] = ()

    def chunks(self, own: Chunks) -> Chunks:
        """The chunks, and the stage that holds each, by pipeline.

        Args:
            own: those of the run.
        """
        if not self.cuts:
            return own
        if self.schedule is None:
            return Chunks(own.moe_layers, *common_chunks(self.cuts))
        problem = self.schedule.problem
        sizes = tuple(chunk.num_blocks for chunk in problem.chunks)
        return Chunks(own.moe_layers, sizes, tuple(map(tuple, problem.stage_DP.tolist())))

    def holders(self, own: Chunks) -> BlockHolders:
        """The workers that hold each block.

        Args:
            own: chunks of the run.
        """
        stage_DB = self.chunks(own).stage_DB.tolist()
        has_places = [any(cut) for cut in self.cuts] or [True] * len(stage_DB)
        held = (stages if has else () for stages, has in zip(stage_DB, has_places, strict=True))
        return BlockHolders(tuple(map(tuple, held)), self.moves)

    def most_moved(self, own: Chunks) -> int:
        """Blocks that the worker that gets the most of them does not hold in the run's own cut."""
        held, most = self.holders(own), 0
        workers = {place: worker for worker, place in self.moves}
        for d, stages in enumerate(held.stage_of_chunk):
            for p in set(stages):
                pipeline, stage = workers.get((d, p), (d, p))
                most = max(most, int(((np.array(stages) == p) & (own.stage_DB[pipeline] != stage)).sum()))
        return most


@dataclass(frozen=True)
class BetterCut:
    """A cut for the survivors of some failures.

    Attributes:
        recut: cuts and micro-batches.
        holders: workers that hold each block with it.
        microbatches: micro-batches of each pipeline with it.
        gain: share of the planned time of a re-routed iteration that it saves.
        most_bytes: about how many bytes of state the worker that gets the most of them has to copy.
    """

    recut: Recut
    holders: BlockHolders
    microbatches: tuple[int, ...]
    gain: float
    most_bytes: float

    @classmethod
    def of(cls, recut: Recut, spec: StepSpec, moved: Plan, rerouted: Plan) -> "BetterCut | None":
        """A cut with what it gains; None if it saves no time.

        Args:
            recut: cuts and micro-batches.
            spec: step spec of the run.
            moved: plan of an iteration with this cut.
            rerouted: plan of an iteration with the run's own.
        """
        gain, most_blocks = 1 - moved.relative_period / rerouted.relative_period, max(map(len, spec.chunks.blocks))
        if gain <= 0:
            return None
        most_bytes = recut.most_moved(spec.chunks) * spec.state_bytes / most_blocks
        return cls(recut, recut.holders(spec.chunks), moved.schedule.problem.microbatches, gain, most_bytes)


def check_recut(recut: Recut, spec: StepSpec, failed: frozenset[Worker]) -> None:
    """Raises SettingError if these are not the blocks and micro-batches of a run, or leave a live worker without any.

    Args:
        recut: cuts and micro-batches to check.
        spec: step spec of the run.
        failed: workers that are down.
    """
    topology = spec.live.topology
    live = [worker for worker in topology.workers if worker not in failed]
    places = [BlockHolders(moves=recut.moves).place(worker) for worker in live]
    movers = [worker for worker, _ in recut.moves]
    if len(set(places)) < len(places) or not set(places) <= set(topology.workers):
        raise SettingError("Recut.moves", recut.moves, "must leave every live worker a place of its own")
    if len(set(movers)) < len(movers) or not set(movers) <= set(live):
        raise SettingError("Recut.moves", recut.moves, "must name live workers, each once")
    if {stage for _, stage in places} != set(range(topology.num_stages)):
        raise SettingError("Recut.moves", recut.moves, "must leave every stage a live worker")
    if recut.cuts or recut.microbatches:
        _check_shares(recut, spec, places)


def _check_shares(recut: Recut, spec: StepSpec, places: Collection[Worker]) -> None:
    topology, num_blocks = spec.live.topology, len(spec.cut.moe_layers)
    D, P = topology.num_pipelines, topology.num_stages
    if [len(cut) for cut in recut.cuts] != [P] * D:
        raise SettingError(
            "Recut.cuts", recut.cuts, f"must be a number for each of {P} stages, for each of {D} pipelines"
        )
    if len(recut.microbatches) != D or sum(recut.microbatches) != spec.num_microbatches:
        allowed = f"must be a number for each of {D} pipelines, which add up to {spec.num_microbatches}"
        raise SettingError("Recut.microbatches", recut.microbatches, allowed)
    for number in recut.microbatches:
        # A schedule may have a pipeline run nothing but what others re-route to it.
        check_count("Recut.microbatches", number, least=int(recut.schedule is None))
    for d, cut in enumerate(recut.cuts):
        for p, size in enumerate(cut):
            check_count(f"Recut.cuts[{d}][{p}]", size, least=int((d, p) in places))
        is_left = recut.schedule is not None and not any(cut)
        if sum(cut) != num_blocks and not is_left:
            raise SettingError(
                f"Recut.cuts[{d}]", cut, f"must add up to {num_blocks} layers, and adds up to {sum(cut)}"
            )


def recut_spec(spec: StepSpec, recut: Recut) -> StepSpec:
    """The step spec of a run with other cuts; its checkpoints have the same cut."""
    return _with_chunks(spec, recut.chunks(spec.chunks))


def blocks_spec(spec: StepSpec, holders: BlockHolders) -> StepSpec:
    """The step spec of a run whose workers have these places and hold these blocks, on the same devices.

    Args:
        spec: step spec with the run's own cuts, on any mesh.
        holders: workers that hold each block.
    """
    rows = tuple(MeshRow.at(worker, holders.place(worker)) for worker in spec.live.workers)
    there = spec if rows == spec.live.rows else spec.at(replace(spec.live, rows=rows))
    if not holders:
        return there
    # A pipeline in which nobody has a place may as well hold what another one does.
    any_B = next(filter(None, holders.stage_of_chunk))
    stage_DB = tuple(stages or any_B for stages in holders.stage_of_chunk)
    return _with_chunks(there, Chunks(spec.cut.moe_layers, (1,) * len(any_B), stage_DB))


def _with_chunks(spec: StepSpec, chunks: Chunks) -> StepSpec:
    if chunks == spec.chunks:
        return spec
    return replace(spec, chunks=chunks, worker_shapes=None)  # type: ignore[arg-type]
