"""A planner from elsewhere: it plans a run's schedules, and what breaks the rules does not run."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from swift.errors import SettingError
from swift.schedules import Kind, Problem, Schedule, period, plan_with, time_round
from swift.topology import Topology

PROBLEM = Problem(Topology(3, 4), 6, frozenset({(0, 1)}))


@dataclass(frozen=True)
class BreadthFirst:
    """All forwards, then all backwards; a failed worker's micro-batches go round its peers."""

    name = "breadth first"

    def plan(self, problem: Problem) -> Schedule:
        D, M, P = problem.num_pipelines, problem.num_microbatches, problem.num_stages
        executor_DMP = np.empty((D, M, P), np.int32)
        for d, m, p in np.ndindex(D, M, P):
            peers = problem.survivors[p]
            executor_DMP[d, m, p] = d if d in peers else peers[m % len(peers)]
        sequences = [
            [
                (kind, d, m)
                for kinds in ((Kind.F,), (Kind.B, Kind.W))
                for m, d in np.ndindex(M, D)
                if executor_DMP[d, m, stage] == pipeline
                for kind in kinds
            ]
            for pipeline, stage in np.ndindex(D, P)
        ]
        return Schedule.from_round(problem, self.name, time_round(problem, executor_DMP, sequences))


@dataclass(frozen=True)
class Shifted(BreadthFirst):
    """Everything of one worker begins too early."""

    name = "shifted"

    def plan(self, problem: Problem) -> Schedule:
        schedule = super().plan(problem)
        early = np.where(schedule.worker == 5, 1.0, 0.0)
        return replace(schedule, start=schedule.start - early, end=schedule.end - early)


def test_an_own_planner_plans_for_a_failure():
    schedule = plan_with(BreadthFirst(), PROBLEM)
    assert schedule.solver == "breadth first"
    assert period(schedule) >= period(plan_with("adaptive", PROBLEM))


def test_a_schedule_that_breaks_a_rule_does_not_run():
    with pytest.raises(SettingError, match=r"^planner = 'shifted': must make valid schedules"):
        plan_with(Shifted(), PROBLEM)
