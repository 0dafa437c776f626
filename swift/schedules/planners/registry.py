"""Planners by name; each turns a problem into a schedule that ``verify`` accepts."""

import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

from swift.errors import SettingError, first_line
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.baselines import gpipe, one_f_one_b, zero_bubble
from swift.schedules.planners.lockstep import lockstep
from swift.schedules.problem import Problem
from swift.schedules.schedule import Schedule
from swift.schedules.verify import ScheduleError, verify

Planner = Callable[[Problem], Schedule]


def _milp(problem: Problem) -> Schedule:
    # Imported here, so that the solver is loaded only where it is used.
    from swift.schedules.planners.milp import milp

    return milp(problem)


PLANNERS: Mapping[str, Planner] = {
    "adaptive": adaptive,
    "lockstep": lockstep,
    "milp": _milp,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "zero_bubble": zero_bubble,
}

FAULT_FREE = frozenset({"gpipe", "one_f_one_b", "zero_bubble"})
"""Planners that accept only problems without failures."""


class OwnPlanner(Protocol):
    """Interface of a user's planner: a frozen dataclass, so that a configuration can name it.

    Its schedules are verified before they run. ``time_round`` computes the times of ops in a given order, and
    ``Schedule.from_round`` repeats the round for all iterations.
    """

    @property
    def name(self) -> str:
        """Short name for messages."""

    def plan(self, problem: Problem) -> Schedule:
        """Plans a problem whose failures are in its first pipelines; deterministic.

        Raises:
            SettingError: the planner cannot plan for this problem.
        """


def plan_with(planner: str | OwnPlanner, problem: Problem) -> Schedule:
    """Plans a problem with a planner given by name or as an object.

    Args:
        planner: name in ``PLANNERS``, or a user's planner.
        problem: problem to plan.

    Raises:
        SettingError: the planner cannot plan for this problem, or its schedule is not valid.
    """
    if isinstance(planner, str):
        return PLANNERS[planner](problem)
    try:
        schedule = planner.plan(problem)
    except SettingError:
        raise
    except Exception as error:  # of any kind: a mistake in the user's own code
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"plan raises {type(error).__name__} ({last.filename.rpartition('/')[2]}:{last.lineno})"
        raise SettingError("planner", planner.name, f"{where}: {first_line(error)}") from error
    try:
        verify(schedule)
    except ScheduleError as error:
        raise SettingError("planner", planner.name, f"must make valid schedules: {error}") from error
    return schedule
