"""Temporary cuts and numbers of micro-batches that replace the run's own while some workers are down.

A pipeline that has lost a worker may hold that worker's blocks on its other workers and run fewer micro-batches.
Alternatively, a worker takes the place of another, in its own pipeline or in a different one. The global batch, the
gradient sums and the layout of checkpoints do not change.

A ``Recut`` describes such an assignment, and ``find_recut`` finds the best one for the survivors. ``Cuts`` caches the
step specs and plans of a run, for its own cuts and for temporary ones, and makes all processes use the same cut.
"""

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from swift.errors import RunError, SettingError, check_count
from swift.mesh.live import MeshRow
from swift.models.cuts import Chunks
from swift.pipeline.reconfigure.configuration import Configuration, Configurator, Plan, PlanSettings
from swift.pipeline.reconfigure.executables import ExecutableCache
from swift.pipeline.step.costs import plan_costs
from swift.pipeline.step.single_worker import sequences_per_rank
from swift.pipeline.step.spec import StepSpec
from swift.schedules.lowering.lower import SlotBytes
from swift.schedules.planners.names import CustomPlanner
from swift.schedules.plans.normalize import ChunkAssignment, Move, moves_to_spread
from swift.schedules.problem import Chunk, Problem, common_chunks, joined
from swift.schedules.schedule import Schedule
from swift.topology import Worker

_AS_GOOD = 1.01
"""Moved roles are preferred to new cuts, which move more state, if their period is at most this many times as long."""


@dataclass(frozen=True)
class Recut:
    """Assignment of an iteration's work to stages and pipelines.

    Attributes:
        cuts: number of blocks of each stage, by pipeline; 0 for a vacant place. Empty for the run's own cuts, in which
            case ``microbatches`` is empty, too.
        microbatches: number of micro-batches of each pipeline; they add up to the run's number.
        schedule: schedule to run, or None to let the run's planner plan it.
        moves: workers that take another worker's place.
    """

    cuts: tuple[tuple[int, ...], ...] = ()
    microbatches: tuple[int, ...] = ()
    schedule: Schedule | None = None
    moves: tuple[Move, ...] = ()

    def chunks(self, run_chunks: Chunks) -> Chunks:
        """Returns the chunks with the stage that holds each, by pipeline.

        Args:
            run_chunks: chunks under the run's own cuts.
        """
        if not self.cuts:
            return run_chunks
        if self.schedule is None:
            return Chunks(run_chunks.moe_layers, *common_chunks(self.cuts))
        problem = self.schedule.problem
        sizes = tuple(chunk.num_blocks for chunk in problem.chunks)
        return Chunks(run_chunks.moe_layers, sizes, tuple(map(tuple, problem.stage_DP.tolist())))

    def holders(self, run_chunks: Chunks) -> ChunkAssignment:
        """Returns the workers that hold each block.

        Args:
            run_chunks: chunks under the run's own cuts.
        """
        stage_DB = self.chunks(run_chunks).stage_DB.tolist()
        has_workers = [any(cut) for cut in self.cuts] or [True] * len(stage_DB)
        assigned_stages = (stages if has else () for stages, has in zip(stage_DB, has_workers, strict=True))
        return ChunkAssignment(tuple(map(tuple, assigned_stages)), self.moves)

    def most_moved(self, run_chunks: Chunks) -> int:
        """Returns the most blocks that any worker holds only because of this recut."""
        assignment, most = self.holders(run_chunks), 0
        workers = {place: worker for worker, place in self.moves}
        for d, stages in enumerate(assignment.stage_of_chunk):
            for p in set(stages):
                pipeline, stage = workers.get((d, p), (d, p))
                most = max(most, int(((np.array(stages) == p) & (run_chunks.stage_DB[pipeline] != stage)).sum()))
        return most


@dataclass(frozen=True)
class PreparedRecut:
    """Recut for the survivors of some failures, compared with re-routing.

    Attributes:
        recut: cuts and micro-batches.
        holders: workers that hold each block with this recut.
        microbatches: number of micro-batches of each pipeline with this recut.
        gain: fraction of a re-routed iteration's planned time that the recut saves.
        most_bytes: approximate bytes of state that a worker has to receive, the maximum over workers.
    """

    recut: Recut
    holders: ChunkAssignment
    microbatches: tuple[int, ...]
    gain: float
    most_bytes: float

    @classmethod
    def of(cls, recut: Recut, spec: StepSpec, moved: Plan, rerouted: Plan) -> "PreparedRecut | None":
        """Compares a recut with re-routing; returns None if it saves no time.

        Args:
            recut: cuts and micro-batches.
            spec: step spec of the run.
            moved: plan with the recut.
            rerouted: plan with the run's own cut, which re-routes micro-batches.
        """
        gain, most_blocks = 1 - moved.relative_period / rerouted.relative_period, max(map(len, spec.chunks.blocks))
        if gain <= 0:
            return None
        most_bytes = recut.most_moved(spec.chunks) * spec.state_bytes / most_blocks
        return cls(recut, recut.holders(spec.chunks), moved.schedule.problem.microbatches, gain, most_bytes)


def check_recut(recut: Recut, spec: StepSpec, failed: frozenset[Worker]) -> None:
    """Raises SettingError if a recut does not fit the run's blocks and micro-batches, or leaves a live worker idle.

    Args:
        recut: cuts and micro-batches to check.
        spec: step spec of the run.
        failed: workers that are down.
    """
    topology = spec.live.topology
    live = [worker for worker in topology.workers if worker not in failed]
    places = [ChunkAssignment(moves=recut.moves).place(worker) for worker in live]
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
        # With a given schedule, a pipeline may have no micro-batches of its own, only those that are re-routed to it.
        check_count("Recut.microbatches", number, least=int(recut.schedule is None))
    for d, cut in enumerate(recut.cuts):
        for p, size in enumerate(cut):
            check_count(f"Recut.cuts[{d}][{p}]", size, least=int((d, p) in places))
        is_left = recut.schedule is not None and not any(cut)
        if sum(cut) != num_blocks and not is_left:
            raise SettingError(f"Recut.cuts[{d}]", cut, f"must sum to {num_blocks} layers, not {sum(cut)}")


def recut_spec(spec: StepSpec, recut: Recut) -> StepSpec:
    """Returns a run's step spec with the cuts of a recut; the run's checkpoints keep their layout."""
    return _with_chunks(spec, recut.chunks(spec.chunks))


def spec_with_assignment(spec: StepSpec, holders: ChunkAssignment) -> StepSpec:
    """Returns the step spec of a run whose workers have the given places and blocks, on the same devices.

    Args:
        spec: step spec with the run's own cuts, on any mesh.
        holders: workers that hold each block.
    """
    rows = tuple(MeshRow.at(worker, holders.place(worker)) for worker in spec.live.workers)
    placed_spec = spec if rows == spec.live.rows else spec.at(replace(spec.live, rows=rows))
    if not holders:
        return placed_spec
    # For a pipeline without any worker, the assignment of another pipeline stands in.
    any_B = next(filter(None, holders.stage_of_chunk))
    stage_DB = tuple(stages or any_B for stages in holders.stage_of_chunk)
    return _with_chunks(placed_spec, Chunks(spec.cut.moe_layers, (1,) * len(any_B), stage_DB))


def _with_chunks(spec: StepSpec, chunks: Chunks) -> StepSpec:
    if chunks == spec.chunks:
        return spec
    return replace(spec, chunks=chunks, worker_shapes=None)  # type: ignore[arg-type]


class UnknownAssignment(RunError):
    """This process does not know the cut that the run's processes must use, or it knows a different one."""


class Cuts:
    """Step specs and plans of a run, with its own cuts and with others; safe to use from several threads.

    Args:
        spec: step spec on the mesh of all workers, or on a checkpoint's mesh.
        settings: settings of all plans.
        num_sequences: sequences of a micro-batch, over all expert ranks.
        store: cache in which the processes of a run share plans and cuts, or None for no cache.
    """

    def __init__(
        self, spec: StepSpec, settings: PlanSettings, num_sequences: int, store: ExecutableCache | None = None
    ):
        self._settings, self._num_sequences, self._store = settings, num_sequences, store
        self._specs: dict[Recut | None, StepSpec] = {None: spec}
        self._configurators: dict[Recut | None, Configurator] = {None: Configurator(settings, store)}
        self._found: dict[frozenset[Worker], Recut | None] = {}

    def spec(self, recut: Recut | None) -> StepSpec:
        """Returns the step spec on the mesh of all workers, with the cuts in ``recut``, or the run's own if None."""
        spec = self._specs.get(recut)
        if spec is None:
            assert recut is not None, "the run's own cuts are there from the start"
            spec = self._specs.setdefault(recut, recut_spec(self.spec(None), recut))
        return spec

    def configurator(self, recut: Recut | None) -> Configurator:
        """Returns the configurator for the cuts of ``recut``, or for the run's own if it is None."""
        configurator = self._configurators.get(recut)
        if configurator is None:
            assert recut is not None, "the run's own cuts are there from the start"
            settings = recut_settings(self._settings, self.spec(recut), recut, self._num_sequences)
            configurator = self._configurators.setdefault(recut, Configurator(settings, self._store))
        return configurator

    def configure(self, recut: Recut | None, failed: frozenset[Worker]) -> Configuration:
        """Returns the configuration for a failure set, with the cuts of ``recut``, or the run's own if it is None.

        Raises:
            SettingError: a stage has no survivor, or the planner cannot plan for the failures.
        """
        if recut is None or self._store is None:
            return self.configurator(recut).configure(failed)

        def configure() -> Configuration:
            return self.configurator(recut).configure(failed).with_devices_of(self.configure(None, failed))

        key = "configuration", recut.cuts, recut.microbatches, recut.moves, sorted(failed)
        return self._store.value(key, configure)

    def find(self, failed: frozenset[Worker]) -> Recut | None:
        """Finds the best recut for the survivors, the same object in every call, or None if there is none.

        Raises:
            SettingError: no plan fits into the available memory.
        """
        with suppress(KeyError):  # no lock: another thread may remove the entry at any time
            return self._found[failed]
        spec = self.spec(None)

        def find() -> Recut | None:
            best_recut = find_recut(self._settings, spec, failed, self._num_sequences)
            if best_recut is not None:
                check_recut(best_recut, spec, failed)
            return best_recut

        recut = find() if self._store is None else self._store.value(_cut_key(failed), find)
        return self._found.setdefault(failed, recut)

    def agreed(self, failed: frozenset[Worker], holders: ChunkAssignment) -> Recut | None:
        """Returns the recut that the run's processes agreed on, or None for the run's own cuts; removes all others.

        One of the processes has found this recut. The others do not search for it, because training is paused.

        Args:
            failed: workers that are down.
            holders: workers that are to hold each block; empty for the run's own cuts.

        Raises:
            UnknownAssignment: the cache that the processes share has no recut for these failures, or a different one.
        """
        recut = None
        if holders:
            assert self._store is not None, "processes share a cache"
            recut = self._found.get(failed) or self._store.kept_value(_cut_key(failed))
            if recut is None:
                raise UnknownAssignment("the plan for it is missing among the programs of the run")
            if (assignment := recut.holders(self.spec(None).chunks)) != holders:
                raise UnknownAssignment(f"there would be {holders.text}, and its own plan has {assignment.text}")
            self._found[failed] = recut
        self.keep_only([recut])
        return recut

    def keep_only(self, recuts: Collection[Recut | None]) -> None:
        """Removes all recuts except these, with their step specs and plans; the run's own cuts stay."""
        for failed, recut in list(self._found.items()):  # a copy: other threads add to it
            if recut is not None and recut not in recuts:
                del self._found[failed]
        for other in self._specs.keys() - {None, *recuts}:
            del self._specs[other]
            self._configurators.pop(other, None)


def recut_settings(settings: PlanSettings, spec: StepSpec, recut: Recut, num_sequences: int) -> PlanSettings:
    """Returns plan settings for other cuts, with the run's memory limit per worker.

    Args:
        settings: settings of the run's plans.
        spec: step spec with these cuts.
        recut: cuts and micro-batches.
        num_sequences: sequences of a micro-batch, over all expert ranks.
    """
    if not recut.cuts:
        return replace(settings, moves=recut.moves)
    planner = settings.planner if recut.schedule is None else _Planned(recut.schedule)
    problem, sizes = _problem(settings, spec, num_sequences)
    problem = replace(problem, num_microbatches=recut.microbatches)
    return replace(settings, problem=problem, planner=planner, sizes=sizes, moves=recut.moves)


def find_recut(settings: PlanSettings, spec: StepSpec, failed: frozenset[Worker], num_sequences: int) -> Recut | None:
    """Plans moved roles and re-partitioned pipelines for the survivors, and returns the better of the two.

    Args:
        settings: settings of the run's plans.
        spec: step spec of the run.
        failed: workers that are down.
        num_sequences: sequences of a micro-batch, over all expert ranks.

    Returns:
        The recut with the shortest planned period among those that ``settings.adapt`` allows, or moved roles if their
        period is at most 1 % longer, since they move less state. None if there is no plan.
    """
    candidates = [_moved_roles(settings, failed)] if settings.adapt in ("reassign", "auto") else []
    candidates += [_cut_anew(settings, spec, failed, num_sequences)] if settings.adapt in ("recut", "auto") else []

    def period(recut: Recut) -> float:
        adapted_settings = recut_settings(settings, recut_spec(spec, recut), recut, num_sequences)
        try:
            plans = Configurator(adapted_settings).configure(failed).plans
        except SettingError:  # too little memory
            return math.inf
        return plans[max(plans)].relative_period * (1 if recut.cuts else 1 / _AS_GOOD)

    timed = [(period(recut), recut) for recut in candidates if recut is not None]
    best, recut = min(timed, key=lambda pair: pair[0], default=(math.inf, None))
    return recut if best < math.inf else None


def _moved_roles(settings: PlanSettings, failed: frozenset[Worker]) -> Recut | None:
    """Assigns workers to the places of others, with the run's own cuts; returns None if no move helps."""
    moves = moves_to_spread(replace(settings.problem, failed=failed))
    return Recut(moves=moves) if moves else None


def _cut_anew(settings: PlanSettings, spec: StepSpec, failed: frozenset[Worker], num_sequences: int) -> Recut | None:
    """Re-partitions the layers over the survivors' pipelines, if the run's own pipelines have the same cut."""
    # Imported here: few runs search for another cut.
    from swift.schedules.adapt.choice import recut
    from swift.schedules.adapt.layouts import BlockProblem

    size_P = spec.cut.sizes
    block_spec = spec_with_assignment(spec, Recut().holders(spec.chunks))
    problem, _ = _problem(settings, block_spec, num_sequences)
    blocks = problem.chunks or (Chunk(num_blocks=1),) * sum(size_P)
    stage_chunks = tuple(joined(blocks[first:end]) for first, end in pairwise(accumulate(size_P, initial=0)))
    work = BlockProblem(replace(problem, chunks=stage_chunks, stage_of_chunk=()), blocks, size_P)
    adaptation = recut(work, failed, in_lockstep=True, in_run=True)
    if adaptation is None:
        return None
    places = adaptation.relocation.place_of.items()
    cuts = tuple(tuple(0 if run is None else run[1] - run[0] for run in runs) for runs in adaptation.layout.runs_DP)
    moves = tuple(Move(worker, place) for worker, place in places if worker != place)
    return Recut(cuts, adaptation.schedule.problem.microbatches, adaptation.schedule, moves)


def _cut_key(failed: frozenset[Worker]) -> object:
    return "better cut", sorted(failed)


@dataclass(frozen=True, eq=False)
class _Planned(CustomPlanner):
    """Planner that returns a schedule planned earlier."""

    schedule: Schedule
    name = "recut"

    def plan(self, problem: Problem) -> Schedule:  # noqa: ARG002
        return self.schedule


def _problem(settings: PlanSettings, spec: StepSpec, num_sequences: int) -> tuple[Problem, SlotBytes]:
    """Returns a run's problem with the chunks of ``spec`` and the same memory per worker, and its slots' bytes."""
    costs, chunks, sizes = plan_costs(spec, sequences_per_rank(num_sequences, spec.live.num_ranks))
    holders, limit = spec.chunks.stage_DC, settings.problem.memory_limit
    problem = replace(settings.problem, costs=costs, chunks=chunks, stage_of_chunk=holders, memory_limit=None)
    if limit is not None:  # in F-stashes, which are larger for longer chunks
        before, now = (slots.stash_for_b + slots.stash_for_b_and_w for slots in (settings.sizes, sizes))
        problem = problem.limited(limit / settings.problem.costs.f_stash * before / now)
    return problem, sizes
