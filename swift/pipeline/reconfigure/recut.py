"""Other cuts and numbers of micro-batches than those of the run, for as long as some workers are down.

A pipeline that has lost a worker may hold its blocks on the others, and run fewer micro-batches. The batch, the sums
and the checkpoints stay what they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from swift.errors import SettingError, check_count
from swift.models import Chunks
from swift.pipeline.reconfigure.failure_config import PlanSettings
from swift.pipeline.runtime import StepSpec, plan_costs, sequences_per_rank
from swift.schedules import Chunk, OwnPlanner, Problem, Schedule, SlotBytes, common_chunks, joined
from swift.schedules.adapt import BlockProblem, recut
from swift.topology import Worker


@dataclass(frozen=True)
class Recut:
    """The shares of stages and pipelines in an iteration's work.

    Attributes:
        cuts: number of blocks of each stage, by pipeline; 0 for a stage of which the worker is down.
        microbatches: micro-batches of each pipeline; as many together as without it.
        schedule: schedule that is run, with ops of one block each; None: that of the run's planner.
    """

    cuts: tuple[tuple[int, ...], ...]
    microbatches: tuple[int, ...]
    schedule: Schedule | None = None

    @property
    def chunks(self) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Number of blocks of each chunk, and the stage that holds it, by pipeline."""
        if self.schedule is None:
            return common_chunks(self.cuts)
        stage_DC = tuple(map(tuple, self.schedule.problem.stage_DP.tolist()))
        return (1,) * len(stage_DC[0]), stage_DC

    def most_moved(self, sizes: Sequence[int]) -> int:
        """Blocks that the worker that gets the most of them does not hold where the stages have these sizes."""
        before, most = [*accumulate(sizes, initial=0)], 0
        for cut in self.cuts:
            for p, (first, end) in enumerate(pairwise(accumulate(cut, initial=0))):
                kept = min(end, before[p + 1]) - max(first, before[p])
                most = max(most, end - first - max(0, kept))
        return most


def check_recut(recut: Recut, spec: StepSpec, failed: frozenset[Worker]) -> None:
    """Raises SettingError if these are not the blocks and micro-batches of a run, or leave a live worker without any.

    Args:
        recut: cuts and micro-batches to check.
        spec: step spec of the run.
        failed: workers that are down.
    """
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
            check_count(f"Recut.cuts[{d}][{p}]", size, least=int((d, p) not in failed))
        if sum(cut) != num_blocks:
            raise SettingError(
                f"Recut.cuts[{d}]", cut, f"must add up to {num_blocks} layers, and adds up to {sum(cut)}"
            )


def recut_spec(spec: StepSpec, recut: Recut) -> StepSpec:
    """The step spec of a run with other cuts; its checkpoints have the same cut."""
    chunks = Chunks(spec.cut.moe_layers, *recut.chunks)
    return replace(spec, chunks=chunks, worker_shapes=None)  # type: ignore[arg-type]


def recut_settings(settings: PlanSettings, spec: StepSpec, recut: Recut, num_sequences: int) -> PlanSettings:
    """The settings of plans with other cuts, with the memory that a worker had.

    Args:
        settings: settings of the run.
        spec: step spec with these cuts.
        recut: the cuts, and the numbers of micro-batches.
        num_sequences: sequences of a micro-batch, over all expert ranks.
    """
    planner = settings.planner if recut.schedule is None else _Planned(recut.schedule)
    problem, sizes = _problem(settings, spec, num_sequences)
    problem = replace(problem, num_microbatches=recut.microbatches)
    return replace(settings, problem=problem, planner=planner, sizes=sizes, move_roles=False)


def find_recut(settings: PlanSettings, spec: StepSpec, failed: frozenset[Worker], num_sequences: int) -> Recut | None:
    """Plans pipelines of the survivors that are cut anew, each survivor in its place; None if there is no such plan.

    Args:
        settings: settings of the run, in which all pipelines are alike.
        spec: step spec of the run.
        failed: workers that are down.
        num_sequences: sequences of a micro-batch, over all expert ranks.
    """
    topology, size_P = spec.live.topology, spec.cut.sizes
    if any(all((d, p) in failed for p in range(topology.num_stages)) for d in range(topology.num_pipelines)):
        return None
    stages = tuple(p for p, size in enumerate(size_P) for _ in range(size))
    by_block = Chunks(spec.cut.moe_layers, (1,) * len(stages), (stages,) * topology.num_pipelines)
    of_blocks = replace(spec, chunks=by_block, worker_shapes=None)  # type: ignore[arg-type]
    problem, _ = _problem(settings, of_blocks, num_sequences)
    blocks = problem.chunks or (Chunk(),) * len(stages)
    of_stages = tuple(joined(blocks[first:end]) for first, end in pairwise(accumulate(size_P, initial=0)))
    work = BlockProblem(replace(problem, chunks=of_stages, stage_of_chunk=()), blocks, size_P)
    found = recut(work, failed, in_lockstep=True, stays=True)
    if found is None:
        return None
    cuts = tuple(tuple(0 if run is None else run[1] - run[0] for run in runs) for runs in found.layout.runs_DP)
    return Recut(cuts, found.schedule.problem.microbatches, found.schedule)


@dataclass(frozen=True, eq=False)
class _Planned(OwnPlanner):
    """A schedule that is planned already, as the planner of its problem."""

    schedule: Schedule
    name = "recut"

    def plan(self, problem: Problem) -> Schedule:  # noqa: ARG002
        return self.schedule


def _problem(settings: PlanSettings, spec: StepSpec, num_sequences: int) -> tuple[Problem, SlotBytes]:
    """The problem of a run with other chunks, with the memory that a worker had; and the bytes of its buffer slots."""
    costs, chunks, sizes = plan_costs(spec, sequences_per_rank(num_sequences, spec.live.num_ranks))
    holders, limit = spec.chunks.stage_DC, settings.problem.memory_limit
    problem = replace(settings.problem, costs=costs, chunks=chunks, stage_of_chunk=holders, memory_limit=None)
    if limit is not None:  # in F-stashes, of which those of longer chunks are larger
        before, now = (one.b_stash + one.held for one in (settings.sizes, sizes))
        problem = problem.limited(limit / settings.problem.costs.f_stash * before / now)
    return problem, sizes
