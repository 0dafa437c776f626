"""Survivors that re-route or cut their pipelines anew, whichever gets more done until the next change of nodes.

P: stages. D: pipelines.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from swift.tools.simulate.job import DETECTION_S, MEASURED_JOIN_S, MEASURED_RECOVERY_S, Job, iterations_of
from swift.tools.simulate.periods import Periods
from swift.tools.simulate.strategies.strategy import Moment, Pace, Pause, Saves, Turn
from swift.tools.simulate.traces.trace import Trace


class Gaps(NamedTuple):
    """Mean times until the next change of nodes, as a run's own record has them.

    Attributes:
        after_loss_s: after a node has left.
        after_join_s: after nodes have joined only.
    """

    after_loss_s: float
    after_join_s: float

    @classmethod
    def of(cls, trace: Trace) -> "Gaps":
        """Takes the means of a trace."""
        changes = list(trace.changes)
        ends = [*(change.time_s for change in changes), trace.horizon_s][1:]
        after: dict[bool, list[float]] = {True: [], False: []}
        for change, end in zip(changes, ends, strict=True):
            after[bool(change.removed)].append(end - change.time_s)
        means = (sum(gaps) / len(gaps) if gaps else math.inf for gaps in (after[True], after[False]))
        return cls(*means)


class _Places(NamedTuple):
    """Nodes and the stages that they hold.

    Attributes:
        stage_of: stage without a failure of which each node holds at least one block.
        spare: nodes without a place.
        cut_for: number of nodes for which the present pipelines are cut.
        is_lost: True if the state is lost, and not yet restored.
    """

    stage_of: dict[str, int]
    spare: tuple[str, ...]
    cut_for: int
    is_lost: bool = False


@dataclass(frozen=True)
class Adapting:
    """The survivors' best plan, by its throughput and by what moving to it costs.

    A failure costs its detection, the recovery and the current iteration, as for ``swift``. Then survivors re-route,
    or they cut their pipelines anew, for which training waits: the copy of a stage and one change of programs. They do
    what gets more done until the next change, which is expected after the mean time of the trace. A stage whose workers
    are lost at once is restored from the newest checkpoint on storage, by the nodes that are left.

    Attributes:
        job: training job.
        periods: periods of its problem.
        gaps: expected times until the next change.
        way: ``auto``; ``reroute`` never cuts anew, unless a stage is lost, and ``recut`` always does.
    """

    job: Job
    periods: Periods
    gaps: Gaps
    way: Literal["auto", "reroute", "recut"] = "auto"
    samples = None
    name = "adapt"

    @property
    def source(self) -> str:
        """Source of its figures."""
        kind = "periods of the planners" if self.periods.are_planned else "bounds of the periods"
        what = f"{kind}, pipelines cut anew where it pays"
        return f"Experiment.adapt = 'auto': {what}; recovery times of our own kills"

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration of the job."""
        return self.job.iteration_s

    def start(self, nodes: tuple[str, ...]) -> tuple[_Places, Turn]:
        """Starts with the pipelines cut for the nodes there are."""
        places = self._cut(_Places({}, nodes, 0))
        return places, Turn(self._pace(self._recut_ratio(len(places.stage_of))))

    def change(self, state: _Places, moment: Moment) -> tuple[_Places, Turn | None]:
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
            return self._cut(places), Turn(self._pace(cut), loses, pauses)
        return filled, Turn(self._pace(stays), loses, pauses)

    @property
    def move_s(self) -> float:
        """Time for which training waits while blocks move."""
        return self.job.stage_copy_s + MEASURED_RECOVERY_S

    def _moves(self, stays: float, cut: float, expected_s: float) -> bool:
        if cut >= stays * (1 - 1e-9) or self.way == "reroute":
            return math.isinf(stays)
        if self.way == "recut" or math.isinf(stays):
            return True
        return (expected_s - self.move_s) / cut > expected_s / stays

    def _restored(self, places: _Places, was_running: bool) -> tuple[_Places, Turn]:
        """Makes the turn after losing blocks: back to the newest checkpoint, on the nodes that are left."""
        pauses: tuple[Pause, ...] = (Pause("detection", DETECTION_S),) if was_running else ()
        loses: Any = "storage" if was_running else "iteration"
        if len(places.stage_of) + len(places.spare) < self.job.problem.num_stages:
            return places._replace(is_lost=True), Turn(None, loses, pauses)
        cut = self._cut(places)
        restore_s = self.job.restart_s + self.job.per_worker_s + self.job.stored_s
        pace = self._pace(self._recut_ratio(len(cut.stage_of)))
        return cut, Turn(pace, loses, (*pauses, Pause("reconfiguration", restore_s)))

    def _recovery(self) -> tuple[Pause, ...]:
        recovery_s = MEASURED_RECOVERY_S + self.job.per_worker_s
        return Pause("detection", DETECTION_S), Pause("reconfiguration", recovery_s)

    def _cut(self, places: _Places) -> _Places:
        """Gives all nodes places in pipelines as long as there are nodes for, the last one shorter."""
        P, nodes = self.job.problem.num_stages, (*places.stage_of, *places.spare)
        used = nodes[: self.job.num_workers]
        whole, rest = divmod(len(used), P)
        stages = [*(list(range(P)) * whole), *(turn * P // rest for turn in range(rest))]
        return _Places(dict(zip(used, stages, strict=True)), nodes[len(used) :], len(used))

    def _fill(self, places: _Places) -> _Places:
        """Places spare nodes in the stages with the fewest, without moving others."""
        stage_of, spare = dict(places.stage_of), list(places.spare)
        counts = [sum(stage == p for stage in stage_of.values()) for p in range(self.job.problem.num_stages)]
        while spare and len(stage_of) < self.job.num_workers:
            stage = counts.index(min(counts))
            counts[stage] += 1
            stage_of[spare.pop(0)] = stage
        return places._replace(stage_of=stage_of, spare=tuple(spare))

    def _stay_ratio(self, places: _Places) -> float:
        """Period with re-routing around the nodes that are missing from the present cut."""
        D, P = self.job.problem.num_pipelines, self.job.problem.num_stages
        if places.cut_for == len(places.stage_of) < self.job.num_workers:
            return self._recut_ratio(places.cut_for)
        counts = [sum(stage == p for stage in places.stage_of.values()) for p in range(P)]
        if not all(counts):
            return math.inf
        return self.periods.ratio(tuple(max(0, D - count) for count in counts))

    def _recut_ratio(self, num_nodes: int) -> float:
        return self.periods.recut_ratio(num_nodes) if num_nodes >= self.job.problem.num_stages else math.inf

    def _pace(self, ratio: float) -> Pace | None:
        if math.isinf(ratio):
            return None
        iteration_s = self.job.iteration_s * ratio
        stored = iterations_of(self.job.stored_s, iteration_s)
        every = self.job.checkpoint_every or stored
        return Pace(iteration_s, Saves(every, self.job.snapshot_s, lag=min(every, stored)))
