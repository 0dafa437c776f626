"""Swift, and ReCycle (arXiv 2405.14009): peers of a failed worker run its micro-batches, and nobody restarts.

P: stages. D: pipelines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from swift.schedules import spread
from swift.simulate.job import DETECTION_S, MEASURED_JOIN_S, MEASURED_RECOVERY_S, Job
from swift.simulate.periods import Periods
from swift.simulate.strategy import Moment, Pace, Pause, Saves, Turn


class _Crew(NamedTuple):
    """Who works where.

    Attributes:
        stage_of: the stage of every node that has a place.
        spare: nodes for which there was none, in the order in which they came.
        is_lost: a stage had no survivor, and the state has not been restored yet.
    """

    stage_of: Mapping[str, int]
    spare: tuple[str, ...]
    is_lost: bool


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
        moves_roles: ReCycle's paper: after each change live workers leave their stages for others, so that the
            failures are spread as ``schedules.spread`` has it; one copy of a stage. Swift's runtime does not do that.
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
        crew, _ = self._fill(_Crew({}, nodes, False))
        return crew, Turn(self._pace(crew))

    def change(self, state: _Crew, moment: Moment) -> tuple[_Crew, Turn | None]:
        """Survivors go on without those who are gone, then those who come are taken in."""
        gone = frozenset(moment.removed)
        stage_of = {node: stage for node, stage in state.stage_of.items() if node not in gone}
        spare = tuple(node for node in (*state.spare, *moment.added) if node not in gone or node in moment.added)
        num_lost = len(state.stage_of) - len(stage_of)
        was_whole = not state.is_lost and all(self._live_P(state))
        left = _Crew(
            stage_of, spare, state.is_lost or (was_whole and not all(self._live_P(_Crew(stage_of, (), False))))
        )
        crew, num_placed = self._fill(left)
        num_moved = 0
        if self.moves_roles:
            crew, num_moved = self._balance(crew)
        pace = self._pace(crew)
        if left.is_lost:
            return self._restored(crew, pace, was_whole)
        if not num_lost and not num_placed:
            return crew, None
        pauses = (self._recovery() if num_lost else ()) + (self._join() if num_placed or num_moved else ())
        return crew, Turn(pace, "iteration" if num_lost else "nothing", pauses)

    def _restored(self, crew: _Crew, pace: Pace | None, was_whole: bool) -> tuple[_Crew, Turn]:
        """What a lost stage costs: all since the newest checkpoint, and waiting until the stage is filled."""
        if pace is None:
            return crew, Turn(None, "storage" if was_whole else "iteration", self._recovery()[:1] if was_whole else ())
        restore = Pause("reconfiguration", self.job.restart_s + self.job.per_worker_s + self.job.stored_s)
        pauses = (*self._recovery()[:1], restore) if was_whole else (restore,)
        return crew._replace(is_lost=False), Turn(pace, "storage" if was_whole else "iteration", pauses)

    def _recovery(self) -> tuple[Pause, ...]:
        recovery_s = MEASURED_RECOVERY_S + self.job.per_worker_s
        return Pause("detection", DETECTION_S), Pause("reconfiguration", recovery_s)

    def _join(self) -> tuple[Pause, ...]:
        join_s = MEASURED_JOIN_S + self.job.per_worker_s + self.job.stage_copy_s
        return (Pause("reconfiguration", join_s),)

    def _pace(self, crew: _Crew) -> Pace | None:
        live_P = self._live_P(crew)
        if not all(live_P):
            return None
        D = self.job.problem.num_pipelines
        ratio = self.periods.ratio(tuple(D - live for live in live_P))
        every = self.job.checkpoint_every or self.job.iterations_of(self.job.stored_s)
        lag = min(every, self.job.iterations_of(self.job.stored_s))
        return Pace(self.job.iteration_s * ratio, Saves(every, self.job.snapshot_s, lag))

    def _live_P(self, crew: _Crew) -> list[int]:
        live_P = [0] * self.job.problem.num_stages
        for stage in crew.stage_of.values():
            live_P[stage] += 1
        return live_P

    def _fill(self, crew: _Crew) -> tuple[_Crew, int]:
        """Spare nodes take the places that are free, and how many do."""
        live_P, stage_of = self._live_P(crew), dict(crew.stage_of)
        num_placed = min(len(crew.spare), self.job.num_workers - len(stage_of))
        for node in crew.spare[:num_placed]:
            stage = min(range(len(live_P)), key=lambda p: (live_P[p], p))
            stage_of[node] = stage
            live_P[stage] += 1
        return _Crew(stage_of, crew.spare[num_placed:], crew.is_lost), num_placed

    def _balance(self, crew: _Crew) -> tuple[_Crew, int]:
        """The fewest workers change their stage; none do where there are too few for all stages."""
        problem, live_P = self.job.problem, self._live_P(crew)
        num_failures = self.job.num_workers - sum(live_P)
        if sum(live_P) < problem.num_stages:
            return crew, 0
        target_P = [problem.num_pipelines - count for count in spread(problem, num_failures)]
        wanted = [p for p, live in enumerate(live_P) for _ in range(target_P[p] - live)]
        stage_of, num_moved = dict(crew.stage_of), len(wanted)
        for node, stage in crew.stage_of.items():
            if wanted and live_P[stage] > target_P[stage]:
                live_P[stage] -= 1
                stage_of[node] = wanted.pop()
        return crew._replace(stage_of=stage_of), num_moved
