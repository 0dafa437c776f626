"""Strategies for training on failing nodes: the interface, the fault-scaled ideal, re-routing, and adapting.

A strategy decides the pace at which the present nodes train, and what a change of nodes costs. The throughput of
``Ideal`` is proportional to the number of live workers, and changes cost nothing. With ``Rerouting``, as in Swift and
ReCycle (arXiv 2405.14009), peers run a failed worker's micro-batches, without a restart. With ``Adapting`` survivors
re-route or re-partition their pipelines, whichever completes more work until the next change of nodes.

Shape suffixes: P stages, D pipelines.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from swift.simulate.job import DETECTION_S, MEASURED_JOIN_S, MEASURED_RECOVERY_S, Job, Periods, iterations_of
from swift.simulate.traces import Trace

State: TypeAlias = Any
"""A strategy's own state: frozen, or at least never changed in place."""


@dataclass(frozen=True)
class Saves:
    """Times at which the state is saved, and from which it can be restored.

    Attributes:
        every: number of iterations between saves.
        stall_s: time that training waits for each save, in seconds.
        lag: number of iterations after a save until it can be restored, since it is written in the background; at most
            ``every``.
        first: numbers of iterations before the first saves, if they differ from ``every``.
        storage_every: number of iterations between background saves to storage, if ``every`` refers to saves to memory;
            None if all saves are to storage.
    """

    every: int
    stall_s: float = 0.0
    lag: int = 0
    first: tuple[int, ...] = ()
    storage_every: int | None = None

    def __post_init__(self) -> None:
        assert min(self.every, *self.first, self.storage_every or 1) >= 1, self
        assert 0 <= self.lag <= self.every, self


@dataclass(frozen=True)
class IterationTiming:
    """Pace of training while the nodes stay the same.

    Attributes:
        iteration_s: duration of an iteration in seconds, excluding saves.
        saves: schedule of saves; None if nothing is saved.
    """

    iteration_s: float
    saves: Saves | None = None


class Pause(NamedTuple):
    """An interruption of training.

    Attributes:
        cause: cause to which the time is attributed, one of ``engine.CAUSES``.
        seconds: duration of the pause.
    """

    cause: str
    seconds: float


@dataclass(frozen=True)
class Decision:
    """Effect of a node change on training.

    Attributes:
        pace: pace after the pauses; None if training has to wait for nodes.
        loses: progress that is lost. ``nothing``: the current iteration is finished first. ``iteration``: the current
            iteration. ``checkpoint``: everything since the newest save. ``storage``: everything since the newest save
            to storage.
        pauses: consecutive pauses. If anything is lost, they replace the remaining pauses of previous decisions;
            otherwise they follow them.
        stretch: factor on the remaining time of the current iteration, if nothing is lost.
        saved: whether the state counts as saved from the start of the pauses, which include the time to save it.
        waits_for: cause to which time is attributed while ``pace`` is None.
    """

    pace: IterationTiming | None
    loses: Literal["nothing", "iteration", "checkpoint", "storage"] = "nothing"
    pauses: tuple[Pause, ...] = ()
    stretch: float = 1.0
    saved: bool = False
    waits_for: str = "waiting"


class ClusterChange(NamedTuple):
    """A change of nodes, as described to a strategy.

    Attributes:
        removed: nodes that leave.
        added: nodes that join, or that leave and rejoin at the same time.
        iterations_run: number of iterations run so far, including lost ones.
        iterations_kept: number of iterations kept so far.
        is_running: whether training is running, that is, neither paused nor waiting.
    """

    removed: tuple[str, ...]
    added: tuple[str, ...]
    iterations_run: int
    iterations_kept: int
    is_running: bool


class Strategy(Protocol):
    """Interface of a strategy for training on nodes that leave and join: a frozen dataclass with two pure functions."""

    @property
    def name(self) -> str:
        """Name of the strategy on the command line."""

    @property
    def source(self) -> str:
        """Source of its figures, for the report."""

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration with as many nodes as the strategy can use, in seconds; reference for goodput."""

    @property
    def samples(self) -> float | None:
        """Samples per iteration; None if unknown."""

    def start(self, nodes: tuple[str, ...]) -> tuple[State, Decision]:
        """Returns the initial state for these nodes, and the first decision."""

    def change(self, state: State, moment: ClusterChange) -> tuple[State, Decision | None]:
        """Returns the state after a change of nodes, and the decision, or None if the change has no effect."""


@dataclass(frozen=True)
class Ideal:
    """Fault-free throughput times the fraction of live workers (ReCycle, arXiv 2405.14009).

    No work is lost and no worker waits. It is not an upper bound: the work of a failed worker may fit into the bubbles
    of the pipelines.
    """

    job: Job
    name = "ideal"
    source = "fault-free throughput x live share"
    samples = None

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration, as in the job."""
        return self.job.iteration_s

    def start(self, nodes: tuple[str, ...]) -> tuple[int, Decision]:
        """Starts with all nodes; the state is their number."""
        return len(nodes), Decision(self._pace(len(nodes)))

    def change(self, state: int, moment: ClusterChange) -> tuple[int, Decision]:
        """Changes the pace immediately, in the middle of an iteration."""
        num_nodes = state + len(moment.added) - len(moment.removed)
        # The rest of the current iteration runs at the new pace.
        before, pace = self._pace(state), self._pace(num_nodes)
        if before is None or pace is None:
            return num_nodes, Decision(pace, "iteration")
        return num_nodes, Decision(pace, stretch=pace.iteration_s / before.iteration_s)

    def _pace(self, num_nodes: int) -> IterationTiming | None:
        live = min(num_nodes, self.job.num_workers)
        return IterationTiming(self.job.iteration_s * self.job.num_workers / live) if live else None


class _Assignment(NamedTuple):
    """Assignment of nodes to stages.

    Attributes:
        stage_of: stage of every node that has a place.
        live_P: number of live nodes in each stage.
        spare: nodes without a place, in the order in which they joined.
        is_lost: whether a stage lost its last survivor and the state has not been restored yet.
    """

    stage_of: Mapping[str, int]
    live_P: tuple[int, ...]
    spare: tuple[str, ...]
    is_lost: bool = False


@dataclass(frozen=True)
class Rerouting:
    """Swift's default: survivors continue with the plan for the failures, and returning nodes rejoin.

    A failure costs the time to detect it and to recover, and the current iteration. A join, at the end of an iteration,
    costs the measured time to admit a process and the time to copy a stage. A joining node takes a place in the stage
    with the fewest survivors. If a stage has no survivors, training waits until a node fills it, and then restores the
    newest checkpoint on storage. Checkpoints are written in the background, one at a time; training waits only for the
    copy to the host.

    Attributes:
        job: training job.
        periods: periods of the job's problem.
        moves_roles: whether live workers move to other stages after each change, at the cost of copying a stage, so
            that failures are distributed as by ``schedules.plans.normalize.spread``. True in ReCycle's paper and with
            ``Experiment.adapt = 'reassign'``.
    """

    job: Job
    periods: Periods
    moves_roles: bool = False

    @property
    def name(self) -> str:
        """Name of the strategy: ``recycle`` if roles are moved, otherwise ``swift``."""
        return "recycle" if self.moves_roles else "swift"

    @property
    def source(self) -> str:
        """Source of its figures, for the report."""
        kind = "periods of the planner" if self.periods.are_planned else "tight bounds of the periods"
        option = "'reassign': {}, roles moved" if self.moves_roles else "'reroute', the default: {}, roles stay"
        return f"Experiment.adapt = {option.format(kind)}; recovery times of our own kills"

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration, as in the job."""
        return self.job.iteration_s

    @property
    def samples(self) -> None:
        """Samples per iteration, which are unknown."""

    def start(self, nodes: tuple[str, ...]) -> tuple[_Assignment, Decision]:
        """Starts with nodes placed in order, each in the stage with the fewest nodes."""
        assignment, _ = self._fill(_Assignment({}, (0,) * self.job.problem.num_stages, nodes))
        return assignment, Decision(self._pace(assignment))

    def change(self, state: _Assignment, moment: ClusterChange) -> tuple[_Assignment, Decision | None]:
        """Continues without the removed nodes, then admits the added ones."""
        left = _without(state, moment.removed)
        num_lost = len(state.stage_of) - len(left.stage_of)
        was_running = not state.is_lost and all(state.live_P)
        left = left._replace(
            spare=left.spare + moment.added, is_lost=state.is_lost or (was_running and not all(left.live_P))
        )
        assignment, num_placed = self._fill(left)
        assignment, num_moved = self._balance(assignment) if self.moves_roles else (assignment, 0)
        pace = self._pace(assignment)
        if left.is_lost:
            return self._restored(assignment, pace, was_running)
        if not num_lost and not num_placed:
            return assignment, None
        pauses = (self._recovery() if num_lost else ()) + (self._join() if num_placed or num_moved else ())
        return assignment, Decision(pace, "iteration" if num_lost else "nothing", pauses)

    def _restored(
        self, assignment: _Assignment, pace: IterationTiming | None, was_running: bool
    ) -> tuple[_Assignment, Decision]:
        """Decides, after the loss of a stage, whether to restore the newest checkpoint or to wait for nodes."""
        pauses = self._recovery()[:1] if was_running else ()
        if pace is not None:
            restore_s = self.job.restart_s + self.job.per_worker_s + self.job.stored_s
            pauses = (*pauses, Pause("reconfiguration", restore_s))
        return assignment._replace(is_lost=pace is None), Decision(
            pace, "storage" if was_running else "iteration", pauses
        )

    def _recovery(self) -> tuple[Pause, ...]:
        recovery_s = MEASURED_RECOVERY_S + self.job.per_worker_s
        return Pause("detection", DETECTION_S), Pause("reconfiguration", recovery_s)

    def _join(self) -> tuple[Pause, ...]:
        join_s = MEASURED_JOIN_S + self.job.per_worker_s + self.job.stage_copy_s
        return (Pause("reconfiguration", join_s),)

    def _pace(self, assignment: _Assignment) -> IterationTiming | None:
        if not all(assignment.live_P):
            return None
        D = self.job.problem.num_pipelines
        iteration_s = self.job.iteration_s * self.periods.ratio(tuple(D - live for live in assignment.live_P))
        stored = iterations_of(self.job.stored_s, iteration_s)
        every = self.job.checkpoint_every or stored
        return IterationTiming(iteration_s, Saves(every, self.job.snapshot_s, lag=min(every, stored)))

    def _fill(self, assignment: _Assignment) -> tuple[_Assignment, int]:
        """Moves spare nodes into free places; also returns the number of nodes moved."""
        num_placed = min(len(assignment.spare), self.job.num_workers - len(assignment.stage_of))
        if not num_placed:
            return assignment, 0
        live_P, stage_of = list(assignment.live_P), dict(assignment.stage_of)
        for node in assignment.spare[:num_placed]:
            stage = min(range(len(live_P)), key=live_P.__getitem__)
            stage_of[node] = stage
            live_P[stage] += 1
        return assignment._replace(
            stage_of=stage_of, live_P=tuple(live_P), spare=assignment.spare[num_placed:]
        ), num_placed

    def _balance(self, assignment: _Assignment) -> tuple[_Assignment, int]:
        """Moves the fewest workers that balance the stages; also returns the number of workers moved.

        Moves no worker if there are too few to fill every stage.
        """
        D, live_P = self.job.problem.num_pipelines, list(assignment.live_P)
        if sum(live_P) < len(live_P):
            return assignment, 0
        target_P = tuple(D - count for count in self.periods.spread(self.job.num_workers - sum(live_P)))
        short_stages = [p for p, live in enumerate(live_P) for _ in range(target_P[p] - live)]
        if not short_stages:
            return assignment, 0
        stage_of, num_moved = dict(assignment.stage_of), len(short_stages)
        for node, stage in assignment.stage_of.items():
            if short_stages and live_P[stage] > target_P[stage]:
                live_P[stage] -= 1
                stage_of[node] = short_stages.pop()
        return assignment._replace(stage_of=stage_of, live_P=target_P), num_moved


def _without(assignment: _Assignment, removed: tuple[str, ...]) -> _Assignment:
    """Removes nodes from an assignment, whether they have a place or are spare."""
    live_P, stage_of = list(assignment.live_P), dict(assignment.stage_of)
    for node in removed:
        if node in stage_of:
            live_P[stage_of.pop(node)] -= 1
    spare = tuple(node for node in assignment.spare if node not in removed)
    return assignment._replace(stage_of=stage_of, live_P=tuple(live_P), spare=spare)


class Gaps(NamedTuple):
    """Mean times until the next node change, by the kind of the last one.

    Attributes:
        after_loss_s: mean time after a change in which a node left, in seconds.
        after_join_s: mean time after a change in which nodes only joined, in seconds.
    """

    after_loss_s: float
    after_join_s: float

    @classmethod
    def of(cls, trace: Trace) -> "Gaps":
        """Computes the mean times over a trace; infinite for a kind of change that does not occur."""
        changes = list(trace.changes)
        ends = [*(change.time_s for change in changes), trace.horizon_s][1:]
        after: dict[bool, list[float]] = {True: [], False: []}
        for change, end in zip(changes, ends, strict=True):
            after[bool(change.removed)].append(end - change.time_s)
        means = (sum(gaps) / len(gaps) if gaps else math.inf for gaps in (after[True], after[False]))
        return cls(*means)


class _Places(NamedTuple):
    """Nodes and the stages that they hold, after recuts.

    Attributes:
        stage_of: for each node with a place, a stage of the fault-free cut of which it holds at least one block.
        spare: nodes without a place.
        cut_for: number of nodes for which the current pipelines were cut.
        is_lost: whether the state is lost and has not been restored yet.
    """

    stage_of: dict[str, int]
    spare: tuple[str, ...]
    cut_for: int
    is_lost: bool = False


@dataclass(frozen=True)
class Adapting:
    """Adapts the survivors to the best plan, judged by its throughput and the cost of moving to it.

    A failure costs the time to detect it and to recover, and the current iteration, as for ``swift``. Survivors then
    either re-route, or re-partition their pipelines. Re-partitioning costs the time to copy a stage and one change of
    programs, during which training waits. Survivors choose the option that completes more work until the next change,
    which is expected after the mean time of the trace. If a stage loses all workers at once, the remaining nodes
    restore the newest checkpoint on storage.

    Attributes:
        job: training job.
        periods: periods of the job's problem.
        gaps: expected times until the next change of nodes.
        way: ``auto`` chooses the better option, ``reroute`` re-partitions only if a stage is lost, and ``recut``
            re-partitions whenever that shortens the period.
    """

    job: Job
    periods: Periods
    gaps: Gaps
    way: Literal["auto", "reroute", "recut"] = "auto"
    samples = None
    name = "adapt"

    @property
    def source(self) -> str:
        """Source of its figures, for the report."""
        kind = "periods of the planners" if self.periods.are_planned else "bounds of the periods"
        label = f"{kind}, pipelines cut anew where it pays"
        return f"Experiment.adapt = 'auto': {label}; recovery times of our own kills"

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration, as in the job."""
        return self.job.iteration_s

    def start(self, nodes: tuple[str, ...]) -> tuple[_Places, Decision]:
        """Starts with pipelines cut for the nodes present."""
        places = self._cut(_Places({}, nodes, 0))
        return places, Decision(self._pace(self._recut_ratio(len(places.stage_of))))

    def change(self, state: _Places, moment: ClusterChange) -> tuple[_Places, Decision | None]:
        """Continues without the removed nodes, then admits the added ones."""
        P = self.job.problem.num_stages
        left = {node: stage for node, stage in state.stage_of.items() if node not in moment.removed}
        num_lost = len(state.stage_of) - len(left)
        spare = (*(node for node in state.spare if node not in moment.removed), *moment.added)
        was_running = not state.is_lost and len(state.stage_of) >= P
        places = _Places(left, spare, state.cut_for, state.is_lost)
        if not was_running or len(set(left.values())) < P:
            return self._restored(places, was_running)
        can_join = min(len(spare), self.job.num_workers - len(left))
        if not num_lost and not can_join:
            return places, None
        pauses = self._recovery() if num_lost else ()
        join_s = MEASURED_JOIN_S + self.job.per_worker_s + self.job.stage_copy_s
        pauses += (Pause("reconfiguration", join_s),) if can_join else ()
        filled = self._fill(places)
        stays, cut = self._stay_ratio(filled), self._recut_ratio(len(filled.stage_of))
        loses: Any = "iteration" if num_lost else "nothing"
        if self._moves(stays, cut, self.gaps.after_loss_s if num_lost else self.gaps.after_join_s):
            pauses += (Pause("reconfiguration", self.move_s),)
            return self._cut(places), Decision(self._pace(cut), loses, pauses)
        return filled, Decision(self._pace(stays), loses, pauses)

    @property
    def move_s(self) -> float:
        """Time that training waits for blocks to move, in seconds."""
        return self.job.stage_copy_s + MEASURED_RECOVERY_S

    def _moves(self, stays: float, cut: float, expected_s: float) -> bool:
        if cut >= stays * (1 - 1e-9) or self.way == "reroute":
            return math.isinf(stays)
        if self.way == "recut" or math.isinf(stays):
            return True
        # Iterations until the next change of nodes, with the move and without it.
        return (expected_s - self.move_s) / cut > expected_s / stays

    def _restored(self, places: _Places, was_running: bool) -> tuple[_Places, Decision]:
        """Decides, after the loss of blocks, whether to restore the newest checkpoint or to wait for nodes."""
        pauses: tuple[Pause, ...] = (Pause("detection", DETECTION_S),) if was_running else ()
        loses: Any = "storage" if was_running else "iteration"
        if len(places.stage_of) + len(places.spare) < self.job.problem.num_stages:
            return places._replace(is_lost=True), Decision(None, loses, pauses)
        cut = self._cut(places)
        restore_s = self.job.restart_s + self.job.per_worker_s + self.job.stored_s
        pace = self._pace(self._recut_ratio(len(cut.stage_of)))
        return cut, Decision(pace, loses, (*pauses, Pause("reconfiguration", restore_s)))

    def _recovery(self) -> tuple[Pause, ...]:
        recovery_s = MEASURED_RECOVERY_S + self.job.per_worker_s
        return Pause("detection", DETECTION_S), Pause("reconfiguration", recovery_s)

    def _cut(self, places: _Places) -> _Places:
        """Cuts pipelines for all nodes: as many complete pipelines as possible, and a shorter one for the rest."""
        P, nodes = self.job.problem.num_stages, (*places.stage_of, *places.spare)
        used = nodes[: self.job.num_workers]
        whole, rest = divmod(len(used), P)
        # Each worker of the shorter pipeline holds blocks of several stages, and is recorded under the first of them.
        stages = [*(list(range(P)) * whole), *(index * P // rest for index in range(rest))]
        return _Places(dict(zip(used, stages, strict=True)), nodes[len(used) :], len(used))

    def _fill(self, places: _Places) -> _Places:
        """Moves spare nodes into the stages with the fewest nodes; other nodes stay."""
        stage_of, spare = dict(places.stage_of), list(places.spare)
        counts = [sum(stage == p for stage in stage_of.values()) for p in range(self.job.problem.num_stages)]
        while spare and len(stage_of) < self.job.num_workers:
            stage = counts.index(min(counts))
            counts[stage] += 1
            stage_of[spare.pop(0)] = stage
        return places._replace(stage_of=stage_of, spare=tuple(spare))

    def _stay_ratio(self, places: _Places) -> float:
        """Returns the relative period if the cut is kept and survivors re-route around missing nodes."""
        D, P = self.job.problem.num_pipelines, self.job.problem.num_stages
        if places.cut_for == len(places.stage_of) < self.job.num_workers:
            return self._recut_ratio(places.cut_for)
        counts = [sum(stage == p for stage in places.stage_of.values()) for p in range(P)]
        if not all(counts):
            return math.inf
        return self.periods.ratio(tuple(max(0, D - count) for count in counts))

    def _recut_ratio(self, num_nodes: int) -> float:
        return self.periods.recut_ratio(num_nodes) if num_nodes >= self.job.problem.num_stages else math.inf

    def _pace(self, ratio: float) -> IterationTiming | None:
        if math.isinf(ratio):
            return None
        iteration_s = self.job.iteration_s * ratio
        stored = iterations_of(self.job.stored_s, iteration_s)
        every = self.job.checkpoint_every or stored
        return IterationTiming(iteration_s, Saves(every, self.job.snapshot_s, lag=min(every, stored)))
