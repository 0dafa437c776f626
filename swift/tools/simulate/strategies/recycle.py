"""Swift, and ReCycle (arXiv 2405.14009): peers of a failed worker run its micro-batches, without any restart.

P: stages. D: pipelines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from swift.tools.simulate.job import DETECTION_S, MEASURED_JOIN_S, MEASURED_RECOVERY_S, Job, iterations_of
from swift.tools.simulate.periods import Periods
from swift.tools.simulate.strategies.strategy import Moment, Pace, Pause, Saves, Turn


class _Assignment(NamedTuple):
    """Assignment of nodes to stages.

    Attributes:
        stage_of: stage of every node that has a place.
        live_P: number of live nodes in every stage.
        spare: nodes without a place, in the order in which they joined.
        is_lost: True if a stage had no survivor, and the state has not been restored yet.
    """

    stage_of: Mapping[str, int]
    live_P: tuple[int, ...]
    spare: tuple[str, ...]
    is_lost: bool = False


@dataclass(frozen=True)
class Rerouting:
    """Swift's default: survivors continue with the plan for the failures, and returning nodes rejoin.

    A failure costs its detection, the recovery and the current iteration; a join costs the measured time to admit a
    process and the copy of a stage, at the end of an iteration. A joining node takes a place in the stage with the
    fewest survivors. A stage without a survivor is filled again before the newest checkpoint on storage is restored.
    Checkpoints are written in the background, one at a time; training waits only for the copy to the host.

    Attributes:
        job: training job.
        periods: periods of its problem.
        moves_roles: True to move live workers to other stages after each change, so that failures are distributed by
            ``schedules.spread``, at the cost of copying a stage; as in ReCycle's paper, and with
            ``Experiment.adapt = 'roles'``.
    """

    job: Job
    periods: Periods
    moves_roles: bool = False

    @property
    def name(self) -> str:
        """Name of the strategy: ``swift``, or ``recycle`` if roles are moved."""
        return "recycle" if self.moves_roles else "swift"

    @property
    def source(self) -> str:
        """Source of its figures."""
        kind = "periods of the planner" if self.periods.are_planned else "tight bounds of the periods"
        how = "'roles': {}, roles moved" if self.moves_roles else "'reroute', the default: {}, roles stay"
        return f"Experiment.adapt = {how.format(kind)}; recovery times of our own kills"

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration of the job."""
        return self.job.iteration_s

    @property
    def samples(self) -> None:
        """Samples of an iteration: unknown."""

    def start(self, nodes: tuple[str, ...]) -> tuple[_Assignment, Turn]:
        """Starts with the nodes placed pipeline by pipeline."""
        assignment, _ = self._fill(_Assignment({}, (0,) * self.job.problem.num_stages, nodes))
        return assignment, Turn(self._pace(assignment))

    def change(self, state: _Assignment, moment: Moment) -> tuple[_Assignment, Turn | None]:
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
        return assignment, Turn(pace, "iteration" if num_lost else "nothing", pauses)

    def _restored(self, assignment: _Assignment, pace: Pace | None, was_running: bool) -> tuple[_Assignment, Turn]:
        """Makes the turn after losing a stage: back to the newest checkpoint, after waiting for nodes for the stage."""
        pauses = self._recovery()[:1] if was_running else ()
        if pace is not None:
            restore_s = self.job.restart_s + self.job.per_worker_s + self.job.stored_s
            pauses = (*pauses, Pause("reconfiguration", restore_s))
        return assignment._replace(is_lost=pace is None), Turn(pace, "storage" if was_running else "iteration", pauses)

    def _recovery(self) -> tuple[Pause, ...]:
        recovery_s = MEASURED_RECOVERY_S + self.job.per_worker_s
        return Pause("detection", DETECTION_S), Pause("reconfiguration", recovery_s)

    def _join(self) -> tuple[Pause, ...]:
        join_s = MEASURED_JOIN_S + self.job.per_worker_s + self.job.stage_copy_s
        return (Pause("reconfiguration", join_s),)

    def _pace(self, assignment: _Assignment) -> Pace | None:
        if not all(assignment.live_P):
            return None
        D = self.job.problem.num_pipelines
        iteration_s = self.job.iteration_s * self.periods.ratio(tuple(D - live for live in assignment.live_P))
        stored = iterations_of(self.job.stored_s, iteration_s)
        every = self.job.checkpoint_every or stored
        return Pace(iteration_s, Saves(every, self.job.snapshot_s, lag=min(every, stored)))

    def _fill(self, assignment: _Assignment) -> tuple[_Assignment, int]:
        """Places spare nodes in free places, and counts them."""
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
        """Moves the fewest workers that balance the stages, and counts them; none if a stage would stay empty."""
        D, live_P = self.job.problem.num_pipelines, list(assignment.live_P)
        if sum(live_P) < len(live_P):
            return assignment, 0
        target_P = tuple(D - count for count in self.periods.spread(self.job.num_workers - sum(live_P)))
        wanted = [p for p, live in enumerate(live_P) for _ in range(target_P[p] - live)]
        if not wanted:
            return assignment, 0
        stage_of, num_moved = dict(assignment.stage_of), len(wanted)
        for node, stage in assignment.stage_of.items():
            if wanted and live_P[stage] > target_P[stage]:
                live_P[stage] -= 1
                stage_of[node] = wanted.pop()
        return assignment._replace(stage_of=stage_of, live_P=target_P), num_moved


def _without(assignment: _Assignment, removed: tuple[str, ...]) -> _Assignment:
    """Removes nodes from an assignment."""
    live_P, stage_of = list(assignment.live_P), dict(assignment.stage_of)
    for node in removed:
        if node in stage_of:
            live_P[stage_of.pop(node)] -= 1
    spare = tuple(node for node in assignment.spare if node not in removed)
    return assignment._replace(stage_of=stage_of, live_P=tuple(live_P), spare=spare)
