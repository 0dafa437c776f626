"""Swift, and ReCycle (arXiv 2405.14009): peers of a failed worker run its micro-batches, and nobody restarts.

P: stages. D: pipelines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from swift.tools.simulate.job import DETECTION_S, MEASURED_JOIN_S, MEASURED_RECOVERY_S, Job, iterations_of
from swift.tools.simulate.periods import Periods
from swift.tools.simulate.strategies.strategy import Moment, Pace, Pause, Saves, Turn


class _Crew(NamedTuple):
    """Who works where.

    Attributes:
        stage_of: the stage of every node that has a place.
        live_P: how many there are in every stage.
        spare: nodes for which there was no place, in the order in which they came.
        is_lost: a stage had no survivor, and the state has not been restored yet.
    """

    stage_of: Mapping[str, int]
    live_P: tuple[int, ...]
    spare: tuple[str, ...]
    is_lost: bool = False


@dataclass(frozen=True)
class Rerouting:
    """Swift as it runs: whoever is left goes on with the plan for who is down, and who comes back joins.

    A failure costs its detection, the recovery and the iteration under way; a join the end of an iteration, the
    measured time to take a process in and the copy of a stage. Who comes takes a place of the stage with the fewest
    survivors. A stage without a survivor is filled again before the newest checkpoint on storage is restored;
    checkpoints are written behind training, one at a time, and what training waits for is the copy to the host.

    Attributes:
        job: what is trained on what.
        periods: of its problem.
        moves_roles: as in ReCycle's paper, and with ``Experiment.move_roles`` (``swift launch`` does not do that yet):
            after each change live workers leave their stages for others, so that the failures are spread as
            ``schedules.spread`` has it; one copy of a stage.
    """

    job: Job
    periods: Periods
    moves_roles: bool = False

    @property
    def name(self) -> str:
        """``swift``, or with roles moved ``recycle``."""
        return "recycle" if self.moves_roles else "swift"

    @property
    def source(self) -> str:
        """What its figures are."""
        kind = "periods of the planner" if self.periods.are_planned else "tight bounds of the periods"
        roles = "roles moved as in ReCycle's paper" if self.moves_roles else "roles stay"
        return f"{kind}, {roles}; recovery times of our own kills"

    @property
    def iteration_s(self) -> float:
        """That of the job."""
        return self.job.iteration_s

    @property
    def samples(self) -> None:
        """Not known."""

    def start(self, nodes: tuple[str, ...]) -> tuple[_Crew, Turn]:
        """Nodes take their places pipeline by pipeline."""
        crew, _ = self._fill(_Crew({}, (0,) * self.job.problem.num_stages, nodes))
        return crew, Turn(self._pace(crew))

    def change(self, state: _Crew, moment: Moment) -> tuple[_Crew, Turn | None]:
        """Survivors go on without those who are gone, then those who come are taken in."""
        left = _without(state, moment.removed)
        num_lost = len(state.stage_of) - len(left.stage_of)
        was_running = not state.is_lost and all(state.live_P)
        left = left._replace(
            spare=left.spare + moment.added, is_lost=state.is_lost or (was_running and not all(left.live_P))
        )
        crew, num_placed = self._fill(left)
        crew, num_moved = self._balance(crew) if self.moves_roles else (crew, 0)
        pace = self._pace(crew)
        if left.is_lost:
            return self._restored(crew, pace, was_running)
        if not num_lost and not num_placed:
            return crew, None
        pauses = (self._recovery() if num_lost else ()) + (self._join() if num_placed or num_moved else ())
        return crew, Turn(pace, "iteration" if num_lost else "nothing", pauses)

    def _restored(self, crew: _Crew, pace: Pace | None, was_running: bool) -> tuple[_Crew, Turn]:
        """What a lost stage costs: all since the newest checkpoint, and waiting until the stage is filled."""
        pauses = self._recovery()[:1] if was_running else ()
        if pace is not None:
            restore_s = self.job.restart_s + self.job.per_worker_s + self.job.stored_s
            pauses = (*pauses, Pause("reconfiguration", restore_s))
        return crew._replace(is_lost=pace is None), Turn(pace, "storage" if was_running else "iteration", pauses)

    def _recovery(self) -> tuple[Pause, ...]:
        recovery_s = MEASURED_RECOVERY_S + self.job.per_worker_s
        return Pause("detection", DETECTION_S), Pause("reconfiguration", recovery_s)

    def _join(self) -> tuple[Pause, ...]:
        join_s = MEASURED_JOIN_S + self.job.per_worker_s + self.job.stage_copy_s
        return (Pause("reconfiguration", join_s),)

    def _pace(self, crew: _Crew) -> Pace | None:
        if not all(crew.live_P):
            return None
        D = self.job.problem.num_pipelines
        iteration_s = self.job.iteration_s * self.periods.ratio(tuple(D - live for live in crew.live_P))
        stored = iterations_of(self.job.stored_s, iteration_s)
        every = self.job.checkpoint_every or stored
        return Pace(iteration_s, Saves(every, self.job.snapshot_s, lag=min(every, stored)))

    def _fill(self, crew: _Crew) -> tuple[_Crew, int]:
        """Spare nodes take the places that are free, and how many do."""
        num_placed = min(len(crew.spare), self.job.num_workers - len(crew.stage_of))
        if not num_placed:
            return crew, 0
        live_P, stage_of = list(crew.live_P), dict(crew.stage_of)
        for node in crew.spare[:num_placed]:
            stage = min(range(len(live_P)), key=live_P.__getitem__)
            stage_of[node] = stage
            live_P[stage] += 1
        return crew._replace(stage_of=stage_of, live_P=tuple(live_P), spare=crew.spare[num_placed:]), num_placed

    def _balance(self, crew: _Crew) -> tuple[_Crew, int]:
        """The fewest workers change their stage, and how many; none do where there are too few for all stages."""
        D, live_P = self.job.problem.num_pipelines, list(crew.live_P)
        if sum(live_P) < len(live_P):
            return crew, 0
        target_P = tuple(D - count for count in self.periods.spread(self.job.num_workers - sum(live_P)))
        wanted = [p for p, live in enumerate(live_P) for _ in range(target_P[p] - live)]
        if not wanted:
            return crew, 0
        stage_of, num_moved = dict(crew.stage_of), len(wanted)
        for node, stage in crew.stage_of.items():
            if wanted and live_P[stage] > target_P[stage]:
                live_P[stage] -= 1
                stage_of[node] = wanted.pop()
        return crew._replace(stage_of=stage_of, live_P=target_P), num_moved


def _without(crew: _Crew, removed: tuple[str, ...]) -> _Crew:
    """Those who are left."""
    live_P, stage_of = list(crew.live_P), dict(crew.stage_of)
    for node in removed:
        if node in stage_of:
            live_P[stage_of.pop(node)] -= 1
    spare = tuple(node for node in crew.spare if node not in removed)
    return crew._replace(stage_of=stage_of, live_P=tuple(live_P), spare=spare)
