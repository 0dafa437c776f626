"""Choice between re-routing, moved roles and a recut after a failure, by throughput and the cost of moving."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from swift.errors import SettingError
from swift.schedules.adapt.layouts import BlockLayout, BlockProblem, Run, layouts, whole_pipelines
from swift.schedules.adapt.mixture import BlockMixture, min_max_load, mixtures, parts, unrouted
from swift.schedules.adapt.moves import BANDWIDTH, BLOCK_BYTES, Relocation, assign_blocks, relocate
from swift.schedules.adapt.ordering import schedule_mixture
from swift.schedules.bounds import tight_bound
from swift.schedules.lowering.ticks import lockstep_period
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.baselines import zero_bubble
from swift.schedules.planners.lockstep import lockstep
from swift.schedules.planners.v import v
from swift.schedules.plans.normalize import after_moves, role_moves, spread
from swift.schedules.problem import Problem
from swift.schedules.rules import verify
from swift.schedules.schedule import Round, Schedule, period, round_of
from swift.topology import Worker

MODES = ("auto", "reroute", "reassign", "recut")
_MAX_OPS = 200_000
"""Number of ops that planning all layouts may schedule, which takes about a second."""
_SAME = 1 + 1e-6
"""Periods within this factor of each other count as equal; then the plan that moves fewer blocks wins."""
_LAYOUTS = 2, 6
"""Number of layouts to plan, starting with the least loaded: minimum, and maximum for problems without memory limit.

With little memory a good order is harder to find than a good layout: planning more layouts in the same time would lead
to worse plans.
"""
Planner = Callable[[BlockMixture, int], tuple[Round | None, int]]
"""Schedules a mixture within a limit on scheduled ops: returns the best round, or None, and the number of ops used."""


@dataclass(frozen=True, eq=False)
class Adaptation:
    """A plan for the survivors of a failure.

    Attributes:
        mode: ``reroute``, ``reassign`` or ``recut``.
        work: problem without failures, and its blocks.
        failed: failed workers.
        schedule: valid schedule (see ``verify``), in which workers are places; ``relocation`` maps survivors to places.
        layout: blocks of each place.
        in_lockstep: whether ops run tick by tick, where each tick takes as long as its longest op.
    """

    mode: str
    work: BlockProblem
    failed: frozenset[Worker]
    schedule: Schedule
    layout: BlockLayout
    in_lockstep: bool = False

    @cached_property
    def relocation(self) -> Relocation:
        """Moves from the fault-free layout to this one."""
        return relocate(self.work, self.layout, self.failed)

    @cached_property
    def period(self) -> float:
        """Period of the schedule; in lockstep, at least ``lockstep_period``."""
        schedule_period = period(self.schedule)
        # In a short window the last iteration drains, so the mean time per iteration may come out too short.
        return max(schedule_period, lockstep_period(self.schedule)) if self.in_lockstep else schedule_period

    @property
    def blocks_of_worker(self) -> dict[Worker, tuple[Run, ...]]:
        """Runs of blocks that each survivor holds; empty for an idle survivor."""
        places, place_of = self.layout.places, self.relocation.place_of
        live = self.work.problem.topology.without(self.failed)
        worker_runs = {worker: places[place] for worker, place in place_of.items()}
        return {worker: self.layout.order.runs(worker_runs[worker]) if worker in worker_runs else () for worker in live}

    @property
    def ideal_throughput(self) -> float:
        """Throughput proportional to the number of live workers, relative to the fault-free throughput."""
        workers = self.work.problem.topology.workers
        return 1 - len(self.failed) / len(workers)

    def pays_after_s(self, before: "Adaptation | None", seconds: float) -> float | None:
        """Returns the time in seconds after which moving to this plan and back has paid off, or None if it never does.

        Args:
            before: plan without a move; None if no such plan exists.
            seconds: duration of the move, during which training waits.
        """
        if before is None or not seconds:
            return 0.0
        gain = 1 - self.period / before.period
        return 2 * seconds / gain if gain > 0 else None


def fault_free(work: BlockProblem, *, in_lockstep: bool = False) -> Adaptation:
    """Plans the problem without failures, as the reference for throughputs.

    Uses ``v`` if stages are in a V, otherwise ``zero_bubble``; in lockstep, ``lockstep``.
    """
    problem = replace(work.problem, decoupled=True, staggered=True)
    schedule = lockstep(problem) if in_lockstep else v(problem) if work.in_v else zero_bubble(problem)
    return Adaptation("reroute", work, frozenset(), schedule, _as_cut(work, frozenset()), in_lockstep)


def adapt(
    work: BlockProblem,
    failed: frozenset[Worker],
    mode: str = "auto",
    *,
    downtime_s: float = math.inf,
    block_bytes: float = BLOCK_BYTES,
    bandwidth: float = BANDWIDTH,
    in_lockstep: bool = False,
) -> Adaptation:
    """Chooses a plan for the survivors of a failure.

    Args:
        work: problem without failures, and its blocks.
        failed: failed workers.
        mode: one of ``MODES``; ``auto`` chooses the plan that completes the most work until the workers return.
        downtime_s: time until the workers return, in seconds; infinite to maximize throughput alone.
        block_bytes: size of a block's state, in bytes.
        bandwidth: bandwidth from one worker to another, in bytes/s.
        in_lockstep: whether ops run tick by tick, where each tick takes as long as its longest op, and every op works
            on one block.

    Raises:
        SettingError: the mode is unknown, a stage has no survivor, or no plan fits in memory.
    """
    if mode not in MODES:
        raise SettingError("mode", mode, f"must be one of {', '.join(MODES)}")
    # Raises if some block has no survivor, in which case no plan exists.
    assign_blocks(work, failed)
    ways: dict[str, Callable[[], Adaptation | None]] = {
        "reroute": lambda: rerouted(work, failed, in_lockstep=in_lockstep),
        "reassign": lambda: with_roles_moved(work, failed, in_lockstep=in_lockstep),
        "recut": lambda: recut(work, failed, in_lockstep=in_lockstep),
    }
    if mode != "auto":
        adaptation = ways[mode]()
        if adaptation is None:
            raise SettingError("failed workers", sorted(failed), f"no plan of {mode} fits the memory of the survivors")
        return adaptation
    stayed = rerouted(work, failed, in_lockstep=in_lockstep)

    def done(plan: Adaptation) -> tuple[float, float]:
        """Scores a plan by its work until the workers return, relative to re-routing; shorter moves break ties.

        The move back costs the same time as the move, hence the factor 2.
        """
        seconds = plan.relocation.seconds(block_bytes, bandwidth)
        share = 1.0 if math.isinf(downtime_s) else max(0.0, 1 - 2 * seconds / downtime_s) if seconds else 1.0
        return round(share * stayed.period / plan.period, 6), -seconds

    plans = [stayed]
    for way in ("recut", "reassign"):
        shortest = min(plan.period for plan in plans)
        # Skip planning moved roles if even the lower bound on their period is no better.
        if way == "reassign" and _roles_bound(work, failed) >= shortest * (1 - 1e-9):
            continue
        plan = ways[way]()
        plans += [plan] if plan is not None else []
    return max(plans, key=done)


def rerouted(work: BlockProblem, failed: frozenset[Worker], *, in_lockstep: bool = False) -> Adaptation:
    """Plans re-routing: peers run the failed workers' micro-batches, and nothing moves."""
    return _with_peers("reroute", work, failed, failed, in_lockstep)


def with_roles_moved(work: BlockProblem, failed: frozenset[Worker], *, in_lockstep: bool = False) -> Adaptation:
    """Plans re-routing after live workers have taken places of failed ones, which spreads failures over the stages."""
    return _with_peers("reassign", work, failed, _spread(work, failed), in_lockstep)


def _with_peers(
    mode: str, work: BlockProblem, failed: frozenset[Worker], empty: frozenset[Worker], in_lockstep: bool
) -> Adaptation:
    """Plans re-routing for the fault-free cut with the places ``empty`` vacated."""
    planner = lockstep if in_lockstep else v if work.in_v else adaptive
    schedule = planner(work.with_failures(empty))
    verify(schedule)
    return Adaptation(mode, work, failed, schedule, _as_cut(work, empty), in_lockstep)


def recut(
    work: BlockProblem, failed: frozenset[Worker], *, in_lockstep: bool = False, in_run: bool = False
) -> Adaptation | None:
    """Plans re-partitioned pipelines for the survivors; returns None if none of the plans tried fits in memory.

    Args:
        work: problem without failures, and its blocks.
        failed: failed workers.
        in_lockstep: see ``adapt``.
        in_run: True for the survivors of a running job, which have no more memory than before. Every survivor then has
            a place, and no pipeline has fewer workers than the pipeline with the fewest survivors.
    """
    adaptations: list[Adaptation] = []
    left, shortest = _MAX_OPS, math.inf
    whole = whole_pipelines(work, failed)
    # In a run every survivor needs a place, so complete pipelines must not leave any survivor idle.
    if in_run and whole is not None and len(whole.empty) > len(failed):
        whole = None
    possible = _mixtures(work, layouts(work, failed, in_run=in_run), in_lockstep)
    for mixture, planner in sorted(possible + _as_whole(work, whole, in_lockstep), key=lambda pair: pair[0].load):
        is_spent = bool(adaptations) and left < mixture.reduced.num_ops and mixture.layout != whole
        if mixture.load > shortest * _SAME or is_spent:
            continue
        iteration_plan, used = planner(mixture, min(left, _MAX_OPS // 3))
        left -= used
        if iteration_plan is not None and (in_lockstep or iteration_plan.period <= shortest * _SAME):
            schedule = Schedule.from_round(mixture.problem, "recut", mixture.expanded(iteration_plan))
            verify(schedule)
            adaptations.append(Adaptation("recut", work, failed, schedule, mixture.layout, in_lockstep))
            shortest = min(shortest, adaptations[-1].period)
    as_good = [plan for plan in adaptations if plan.period <= shortest * _SAME]
    return min(as_good, key=lambda plan: (plan.relocation.moved_blocks, plan.period), default=None)


def _mixtures(
    work: BlockProblem, possible: Iterable[BlockLayout], one_block: bool
) -> list[tuple[BlockMixture, Planner]]:
    """Lists the mixtures worth planning, for the layouts with the least loaded busiest worker."""
    least, most = _LAYOUTS
    if work.problem.memory_limit is not None:
        most = least
    number = max(least, min(most, _MAX_OPS // (3 * len(work.blocks) * work.problem.total_microbatches)))
    ranked = sorted(
        (min_max_load(*parts(work, layout, layout.bounds)), index, layout) for index, layout in enumerate(possible)
    )
    candidates = [
        mixture for _, _, layout in ranked[:number] for mixture in mixtures(work, layout, one_block=one_block)
    ]
    return [(mixture, schedule_mixture) for mixture in candidates if mixture.fits_alone]


def _as_whole(work: BlockProblem, whole: BlockLayout | None, in_lockstep: bool) -> list[tuple[BlockMixture, Planner]]:
    """Lists ways to plan whole pipelines: as for other layouts, and with a re-routing planner (the only way in a V)."""
    mixture = None if whole is None else unrouted(work, whole, one_block=in_lockstep)
    if mixture is None or not mixture.fits_alone:
        return []
    if work.in_v:
        return [(mixture, _by(v))]
    if in_lockstep:
        return [(mixture, schedule_mixture)]
    # Neither search is always better. Even if all pipelines differ, and both searches order the same problem, each
    # finds a period up to 5 % shorter for some problems. For equal pipelines, the planner may find a shorter period for
    # all of them together than for a single one.
    return [(mixture, schedule_mixture), (replace(mixture, plans_each=True), _by(adaptive))]


def _by(planner: Callable[[Problem], Schedule]) -> Planner:
    """Adapts a planner of problems to mixtures in which no micro-batch changes pipelines."""
    return lambda mixture, _: (round_of(planner(mixture.reduced)), mixture.reduced.num_ops)


def _as_cut(work: BlockProblem, empty: frozenset[Worker]) -> BlockLayout:
    D, P = work.problem.num_pipelines, work.problem.num_stages
    return BlockLayout(
        work.order, tuple(tuple(None if (d, p) in empty else work.runs_P[p] for p in range(P)) for d in range(D))
    )


def _spread(work: BlockProblem, failed: frozenset[Worker]) -> frozenset[Worker]:
    problem = work.with_failures(failed)
    return after_moves(problem, role_moves(problem, spread(problem, len(failed)))).failed


def _roles_bound(work: BlockProblem, failed: frozenset[Worker]) -> float:
    return tight_bound(work.with_failures(_spread(work, failed)))
