"""The planners by name: all of them take a problem and give a schedule that ``verify`` accepts."""

from collections.abc import Callable, Mapping
from typing import Protocol

from swift.errors import SettingError
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.baselines import gpipe, one_f_one_b, zero_bubble
from swift.schedules.planners.lockstep import lockstep
from swift.schedules.problem import Problem
from swift.schedules.schedule import Schedule
from swift.schedules.verify import ScheduleError, verify

Planner = Callable[[Problem], Schedule]


def _milp(problem: Problem) -> Schedule:
    # Only those who ask for the solver wait for it to be loaded.
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
"""Those of them that take no problem with a failure."""


class OwnPlanner(Protocol):
    """A planner from elsewhere: a frozen dataclass, so that a configuration can name it.

    Its schedules are verified before they run. ``time_round`` gives the times of ops whose order has been decided, and
    ``Schedule.from_round`` repeats them.
    """

    @property
    def name(self) -> str:
        """Short name for messages."""

    def plan(self, problem: Problem) -> Schedule:
        """A schedule of a problem, whose failures are of its first pipelines; the same for the same problem.

        Raises:
            SettingError: it cannot plan for this problem.
        """


def plan_with(planner: str | OwnPlanner, problem: Problem) -> Schedule:
    """A planner's schedule of a problem.

    Args:
        planner: a name of ``PLANNERS``, or one from elsewhere.
        problem: what it is to plan.

    Raises:
        SettingError: the planner cannot plan for this problem, or its schedule breaks a rule.
    """
    if isinstance(planner, str):
        return PLANNERS[planner](problem)
    schedule = planner.plan(problem)
    try:
        verify(schedule)
    except ScheduleError as error:
        raise SettingError("Experiment.planner", planner.name, f"must plan by the rules: {error}") from error
    return schedule
