"""The step specs and plans of a run, with its own cuts and with others that suit the survivors of failures better."""

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from swift.errors import RunError, SettingError
from swift.pipeline.batch_layout import sequences_per_rank
from swift.pipeline.reconfigure.executable_cache import ExecutableCache
from swift.pipeline.reconfigure.failure_config import Configuration, Configurator, PlanSettings
from swift.pipeline.reconfigure.recut import Recut, blocks_spec, check_recut, recut_spec
from swift.pipeline.runtime.costs import plan_costs
from swift.pipeline.runtime.step_spec import StepSpec
from swift.schedules.adapt.choice import recut
from swift.schedules.adapt.work import BlockProblem
from swift.schedules.chunks import Chunk, joined
from swift.schedules.lowering.buffer_sizes import SlotBytes
from swift.schedules.planners.registry import OwnPlanner
from swift.schedules.plans.holders import BlockHolders
from swift.schedules.plans.moved_roles import moves_to_spread
from swift.schedules.plans.normalize import Move
from swift.schedules.problem import Problem
from swift.schedules.schedule import Schedule
from swift.topology import Worker

_AS_GOOD = 1.01
"""A plan that takes longer by this factor is as good, if less moves."""


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

        key = "configuration", recut.cuts, recut.microbatches, recut.moves, sorted(failed)
        return self._store.value(key, configure)

    def find(self, failed: frozenset[Worker]) -> Recut | None:
        """The best cut for the survivors, the same object each time; None if there is none.

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

    def agreed(self, failed: frozenset[Worker], holders: BlockHolders) -> Recut | None:
        """The cut that the processes of a run are to use, which one of them has found; all others are forgotten.

        This process does not look for it itself, since training waits meanwhile.

        Args:
            failed: workers that are down.
            holders: workers that are to hold each block; False: the run's own cuts are to be used.

        Raises:
            UnknownCut: none is in the cache that the processes share, or another one.
        """
        recut = None
        if holders:
            assert self._store is not None, "processes share a cache"
            recut = self._found.get(failed) or self._store.kept_value(_cut_key(failed))
            if recut is None:
                raise UnknownCut("the plan for it is missing among the programs of the run")
            if (held := recut.holders(self.spec(None).chunks)) != holders:
                raise UnknownCut(f"there would be {holders.text}, and its own plan has {held.text}")
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


def recut_settings(settings: PlanSettings, spec: StepSpec, recut: Recut, num_sequences: int) -> PlanSettings:
    """The settings of plans with other cuts, with the memory that a worker had.

    Args:
        settings: settings of the run.
        spec: step spec with these cuts.
        recut: the cuts, and the numbers of micro-batches.
        num_sequences: sequences of a micro-batch, over all expert ranks.
    """
    if not recut.cuts:
        return replace(settings, moves=recut.moves)
    planner = settings.planner if recut.schedule is None else _Planned(recut.schedule)
    problem, sizes = _problem(settings, spec, num_sequences)
    problem = replace(problem, num_microbatches=recut.microbatches)
    return replace(settings, problem=problem, planner=planner, sizes=sizes, moves=recut.moves)


def find_recut(settings: PlanSettings, spec: StepSpec, failed: frozenset[Worker], num_sequences: int) -> Recut | None:
    """Plans moved roles, and pipelines of the survivors that are cut anew; takes what has the shortest period.

    Args:
        settings: settings of the run.
        spec: step spec of the run.
        failed: workers that are down.
        num_sequences: sequences of a micro-batch, over all expert ranks.

    Returns:
        The plan with the shortest period of those of ``settings.adapt``; roles where they take at most 1 % longer, as
        they move less. None if there is none.
    """
    found = [_moved_roles(settings, failed)] if settings.adapt in ("roles", "auto") else []
    found += [_cut_anew(settings, spec, failed, num_sequences)] if settings.adapt in ("recut", "auto") else []

    def period(recut: Recut) -> float:
        of_recut = recut_settings(settings, recut_spec(spec, recut), recut, num_sequences)
        try:
            plans = Configurator(of_recut).configure(failed).plans
        except SettingError:  # there is too little memory
            return math.inf
        return plans[max(plans)].relative_period * (1 if recut.cuts else 1 / _AS_GOOD)

    timed = [(period(recut), recut) for recut in found if recut is not None]
    best, recut = min(timed, key=lambda one: one[0], default=(math.inf, None))
    return recut if best < math.inf else None


def _moved_roles(settings: PlanSettings, failed: frozenset[Worker]) -> Recut | None:
    """Plans workers in the places of others, with the cuts of the run; None if all are best where they are."""
    moves = moves_to_spread(replace(settings.problem, failed=failed))
    return Recut(moves=moves) if moves else None


def _cut_anew(settings: PlanSettings, spec: StepSpec, failed: frozenset[Worker], num_sequences: int) -> Recut | None:
    """Plans pipelines of the survivors that are cut anew, where those of the run are cut alike."""
    size_P = spec.cut.sizes
    of_blocks = blocks_spec(spec, Recut().holders(spec.chunks))
    problem, _ = _problem(settings, of_blocks, num_sequences)
    blocks = problem.chunks or (Chunk(num_blocks=1),) * sum(size_P)
    of_stages = tuple(joined(blocks[first:end]) for first, end in pairwise(accumulate(size_P, initial=0)))
    work = BlockProblem(replace(problem, chunks=of_stages, stage_of_chunk=()), blocks, size_P)
    found = recut(work, failed, in_lockstep=True, in_run=True)
    if found is None:
        return None
    places = found.relocation.place_of.items()
    cuts = tuple(tuple(0 if run is None else run[1] - run[0] for run in runs) for runs in found.layout.runs_DP)
    moves = tuple(Move(worker, place) for worker, place in places if worker != place)
    return Recut(cuts, found.schedule.problem.microbatches, found.schedule, moves)


def _cut_key(failed: frozenset[Worker]) -> object:
    return "better cut", sorted(failed)


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
