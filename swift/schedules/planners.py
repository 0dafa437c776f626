"""The planners by name: all of them take a problem and give a schedule that ``verify`` accepts."""

from collections.abc import Callable, Mapping

from swift.schedules.adaptive import adaptive
from swift.schedules.baselines import gpipe, one_f_one_b, zero_bubble
from swift.schedules.lockstep import lockstep
from swift.schedules.problem import Problem
from swift.schedules.schedule import Schedule

Planner = Callable[[Problem], Schedule]


def _milp(problem: Problem) -> Schedule:
    # Only those who ask for the solver wait for it to be loaded.
    from swift.schedules.milp import milp

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
