"""Other cuts and numbers of micro-batches than those of the run, for as long as some workers are down.

A pipeline that has lost a worker may hold its blocks on the others, and run fewer micro-batches. The batch, the sums
and the checkpoints stay what they are.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from swift.errors import RunError, SettingError, check_count
from swift.models import Chunks
from swift.pipeline.reconfigure.executable_cache import ExecutableCache
from swift.pipeline.reconfigure.failure_config import Configuration, Configurator, Plan, PlanSettings
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


@dataclass(frozen=True)
class BetterCut:
    """A cut for the survivors of some failures.

    Attributes:
        recut: cuts and micro-batches.
        gain: share of the planned time of a re-routed iteration that it saves.
        most_bytes: about how many bytes of state the worker that gets the most of them has to copy.
    """

    recut: Recut
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
        gain, sizes = 1 - moved.relative_period / rerouted.relative_period, spec.cut.sizes
        return cls(recut, gain, recut.most_moved(sizes) * spec.state_bytes / max(sizes)) if gain > 0 else None


class UnknownCut(RunError):
    """The cut that the processes of a run are to use is unknown to this one, or it knows another one."""


class Cuts:
    """The step specs and plans of a run, with its own cuts and with others; safe to use from several threads.

    Args:
        spec: step spec on the mesh of all workers, or on that of a checkpoint.
        settings: settings of all plans.
        num_sequences: sequences of a micro-batch, over all expert ranks.
        store: cache in which the processes of a run share plans and cuts; None: no cache.
    """

    def __init__(
        self, spec: StepSpec, settings: PlanSettings, num_sequences: int, store: ExecutableCache | None = None
    ):
        self._settings, self._num_sequences, self._store = settings, num_sequences, store
        self._specs: dict[Recut | None, StepSpec] = {None: spec}
        self._configurators: dict[Recut | None, Configurator] = {None: Configurator(settings, store)}
        self._found: dict[frozenset[Worker], Recut | None] = {}

    def spec(self, recut: Recut | None) -> StepSpec:
        """The step spec on the mesh of all workers, with some cuts; None: those of the run."""
        found = self._specs.get(recut)
        if found is None:
            assert recut is not None, "the run's own cuts are there from the start"
            found = self._specs.setdefault(recut, recut_spec(self.spec(None), recut))
        return found

    def configurator(self, recut: Recut | None) -> Configurator:
        """The plans with some cuts; None: those of the run."""
        found = self._configurators.get(recut)
        if found is None:
            assert recut is not None, "the run's own cuts are there from the start"
            settings = recut_settings(self._settings, self.spec(recut), recut, self._num_sequences)
            found = self._configurators.setdefault(recut, Configurator(settings, self._store))
        return found

    def configure(self, recut: Recut | None, failed: frozenset[Worker]) -> Configuration:
        """The configuration for a failure set, with some cuts; None: those of the run.

        Raises:
            SettingError: a stage has no survivor, or the planner cannot plan for the failures.
        """
        if recut is None or self._store is None:
            return self.configurator(recut).configure(failed)

        def configure() -> Configuration:
            return self.configurator(recut).configure(failed).with_devices_of(self.configure(None, failed))

        return self._store.value(("configuration", recut.cuts, recut.microbatches, sorted(failed)), configure)

    def find(self, failed: frozenset[Worker]) -> Recut | None:
        """The best cut for survivors that stay in their pipelines, the same object each time; None if there is none.

        Raises:
            SettingError: the plan is not possible in the memory that there is.
        """
        with suppress(KeyError):  # without a lock, as another thread may forget it at any time
            return self._found[failed]
        spec = self.spec(None)

        def find() -> Recut | None:
            found = find_recut(self._settings, spec, failed, self._num_sequences)
            if found is not None:
                check_recut(found, spec, failed)
            return found

        recut = find() if self._store is None else self._store.value(_cut_key(failed), find)
        return self._found.setdefault(failed, recut)

    def agreed(self, failed: frozenset[Worker], stage_DB: Sequence[Sequence[int]]) -> Recut | None:
        """The cut that the processes of a run are to use, which one of them has found; all others are forgotten.

        This process does not look for it itself, since training waits meanwhile.

        Args:
            failed: workers that are down.
            stage_DB: stage that is to hold each block, by pipeline; empty: the run's own cuts are to be used.

        Raises:
            UnknownCut: none is in the cache that the processes share, or another one.
        """
        recut, held = None, tuple(map(tuple, stage_DB))
        if held:
            assert self._store is not None, "processes share a cache"
            recut = self._found.get(failed) or self._store.kept_value(_cut_key(failed))
            if recut is None:
                raise UnknownCut("the plan for it is missing among the programs of the run")
            if recut.chunks[1] != held:
                raise UnknownCut(f"the stages of the layers would be {held}, and are {recut.chunks[1]} in its own plan")
            self._found[failed] = recut
        self.keep_only([recut])
        return recut

    def keep_only(self, recuts: Collection[Recut | None]) -> None:
        """Forgets all other cuts but those of the run."""
        for failed, found in list(self._found.items()):  # other threads add to it
            if found is not None and found not in recuts:
                del self._found[failed]
        for other in self._specs.keys() - {None, *recuts}:
            del self._specs[other]
            self._configurators.pop(other, None)


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
    return _with_chunks(spec, *recut.chunks)


def blocks_spec(spec: StepSpec, stage_DB: Sequence[Sequence[int]]) -> StepSpec:
    """The step spec of a run where workers hold other blocks.

    Args:
        spec: step spec of the run.
        stage_DB: stage that holds each block, by pipeline; empty: those of the run.
    """
    return _with_chunks(spec, (1,) * len(spec.cut.moe_layers), tuple(map(tuple, stage_DB))) if stage_DB else spec


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
    of_blocks = blocks_spec(spec, (stages,) * topology.num_pipelines)
    problem, _ = _problem(settings, of_blocks, num_sequences)
    blocks = problem.chunks or (Chunk(),) * len(stages)
    of_stages = tuple(joined(blocks[first:end]) for first, end in pairwise(accumulate(size_P, initial=0)))
    work = BlockProblem(replace(problem, chunks=of_stages, stage_of_chunk=()), blocks, size_P)
    found = recut(work, failed, in_lockstep=True, stays=True)
    if found is None:
        return None
    cuts = tuple(tuple(0 if run is None else run[1] - run[0] for run in runs) for runs in found.layout.runs_DP)
    return Recut(cuts, found.schedule.problem.microbatches, found.schedule)


def _cut_key(failed: frozenset[Worker]) -> object:
    return "better cut", sorted(failed)


@dataclass(frozen=True, eq=False)
class _Planned(OwnPlanner):
    """A schedule that is planned already, as the planner of its problem."""

    schedule: Schedule
    name = "recut"

    def plan(self, problem: Problem) -> Schedule:  # noqa: ARG002
        return self.schedule


def _with_chunks(spec: StepSpec, sizes: tuple[int, ...], stage_DC: tuple[tuple[int, ...], ...]) -> StepSpec:
    chunks = Chunks(spec.cut.moe_layers, sizes, stage_DC)
    return replace(spec, chunks=chunks, worker_shapes=None)  # type: ignore[arg-type]


def _problem(settings: PlanSettings, spec: StepSpec, num_sequences: int) -> tuple[Problem, SlotBytes]:
    """The problem of a run with other chunks, with the memory that a worker had; and the bytes of its buffer slots."""
    costs, chunks, sizes = plan_costs(spec, sequences_per_rank(num_sequences, spec.live.num_ranks))
    holders, limit = spec.chunks.stage_DC, settings.problem.memory_limit
    problem = replace(settings.problem, costs=costs, chunks=chunks, stage_of_chunk=holders, memory_limit=None)
    if limit is not None:  # in F-stashes, of which those of longer chunks are larger
        before, now = (one.b_stash + one.held for one in (settings.sizes, sizes))
        problem = problem.limited(limit / settings.problem.costs.f_stash * before / now)
    return problem, sizes
