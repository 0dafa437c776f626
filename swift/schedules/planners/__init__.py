"""Planners, from a problem to a schedule.

``rerouting`` gives the micro-batches of failed workers to their peers. ``adaptive`` is ReCycle's planner, which tries
many policies (``search``) by ``list_scheduling``; ``lockstep`` plans for execution as one SPMD program; ``milp`` is
exact; ``baselines`` plan without failures; ``two_runs`` has the planner ``v``, for two runs of blocks a worker.
``registry`` lists them by name.
"""

from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.baselines import gpipe, one_f_one_b, zero_bubble
from swift.schedules.planners.list_scheduling import list_schedule
from swift.schedules.planners.lockstep import lockstep
from swift.schedules.planners.policy import Listing, Policy, names_of
from swift.schedules.planners.registry import (
    FAULT_FREE,
    PLANNERS,
    SHAPES,
    OwnPlanner,
    Planner,
    in_shape,
    plan_with,
    shape_of,
)
from swift.schedules.planners.search import first_policies
from swift.schedules.planners.two_runs import v

__all__ = [
    "FAULT_FREE",
    "PLANNERS",
    "SHAPES",
    "Listing",
    "OwnPlanner",
    "Planner",
    "Policy",
    "adaptive",
    "first_policies",
    "gpipe",
    "in_shape",
    "list_schedule",
    "lockstep",
    "names_of",
    "one_f_one_b",
    "plan_with",
    "shape_of",
    "v",
    "zero_bubble",
]
