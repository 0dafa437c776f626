"""Pipeline schedules that survive failures, in plain Python and numpy: a library of its own."""

from swift.schedules.adaptive import adaptive
from swift.schedules.bound import lower_bound, tight_bound
from swift.schedules.measures import bubble_share, makespan, period, window_period
from swift.schedules.memory import peak_memory
from swift.schedules.ops import Kind, Op, TimedOp
from swift.schedules.planners import PLANNERS, Planner
from swift.schedules.problem import Costs, Problem
from swift.schedules.schedule import Round, Schedule
from swift.schedules.verify import verify

__all__ = [
    "PLANNERS",
    "Costs",
    "Kind",
    "Op",
    "Planner",
    "Problem",
    "Round",
    "Schedule",
    "TimedOp",
    "adaptive",
    "bubble_share",
    "lower_bound",
    "makespan",
    "peak_memory",
    "period",
    "tight_bound",
    "verify",
    "window_period",
]
