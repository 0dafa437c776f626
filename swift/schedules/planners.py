"""The planners by name: all of them take a problem and give a schedule that ``verify`` accepts."""

from collections.abc import Callable, Mapping

from swift.schedules.adaptive import adaptive
from swift.schedules.problem import Problem
from swift.schedules.schedule import Schedule

Planner = Callable[[Problem], Schedule]

PLANNERS: Mapping[str, Planner] = {"adaptive": adaptive}
