"""A planner from elsewhere: it plans a run's schedules, and what breaks the rules does not run."""

import runpy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from swift.errors import SettingError
from swift.schedules.planners.names import PLANNER_NAMES
from swift.schedules.problem import Problem
from swift.schedules.registry import PLANNERS, plan_with
from swift.schedules.schedule import Schedule, period
from swift.topology import Topology

PROBLEM = Problem(Topology(3, 4), 6, frozenset({(0, 1)}))
BreadthFirst = runpy.run_path(Path(__file__).parents[2] / "examples" / "own_planner.py")["BreadthFirst"]


@dataclass(frozen=True)
class Shifted(BreadthFirst):
    """Schedules in which one worker begins everything too early."""

    name = "shifted"

    def plan(self, problem: Problem) -> Schedule:
        schedule = super().plan(problem)
        early = np.where(schedule.worker == 5, 1.0, 0.0)
        return replace(schedule, start=schedule.start - early, end=schedule.end - early)


def test_every_planner_that_a_setting_can_name_is_there():
    assert tuple(PLANNERS) == PLANNER_NAMES


def test_an_own_planner_plans_for_a_failure():
    schedule = plan_with(BreadthFirst(), PROBLEM)
    assert schedule.solver == "breadth first"
    assert period(schedule) >= period(plan_with("adaptive", PROBLEM))


def test_a_schedule_that_breaks_a_rule_does_not_run():
    with pytest.raises(SettingError, match=r"^planner = 'shifted': must make valid schedules"):
        plan_with(Shifted(), PROBLEM)
