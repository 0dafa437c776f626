"""Pipeline schedules that survive failures, in plain Python and numpy: a library of its own."""

from swift.schedules.bounds import lower_bound, tight_bound
from swift.schedules.lowering.buffer_sizes import HeldBytes, SlotBytes, allocated_bytes, held_bytes
from swift.schedules.lowering.lower import lower
from swift.schedules.lowering.tick_table import NOTHING, TableShape, TickTable, common_shape
from swift.schedules.lowering.ticks import assign_ticks, lockstep_period
from swift.schedules.measures import bubble_share, makespan, period, window_period
from swift.schedules.memory import peak_memory
from swift.schedules.ops import Kind, Op, TimedOp
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.baselines import gpipe, one_f_one_b, zero_bubble
from swift.schedules.planners.lockstep import lockstep
from swift.schedules.planners.registry import FAULT_FREE, PLANNERS, OwnPlanner, Planner, plan_with
from swift.schedules.plans.normalize import (
    Normalized,
    denormalize,
    moves,
    normalize,
    num_plans,
    plans_to_prepare,
    spread,
)
from swift.schedules.plans.store import DamagedPlanError, PlanStore, plan_document, read_plan
from swift.schedules.problem import Costs, Problem
from swift.schedules.schedule import Round, Schedule
from swift.schedules.sequences import time_round
from swift.schedules.verify import ScheduleError, verify, violations

__all__ = [
    "FAULT_FREE",
    "NOTHING",
    "PLANNERS",
    "Costs",
    "DamagedPlanError",
    "HeldBytes",
    "Kind",
    "Normalized",
    "Op",
    "OwnPlanner",
    "PlanStore",
    "Planner",
    "Problem",
    "Round",
    "Schedule",
    "ScheduleError",
    "SlotBytes",
    "TableShape",
    "TickTable",
    "TimedOp",
    "adaptive",
    "allocated_bytes",
    "assign_ticks",
    "bubble_share",
    "common_shape",
    "denormalize",
    "gpipe",
    "held_bytes",
    "lockstep",
    "lockstep_period",
    "lower",
    "lower_bound",
    "makespan",
    "moves",
    "normalize",
    "num_plans",
    "one_f_one_b",
    "peak_memory",
    "period",
    "plan_document",
    "plan_with",
    "plans_to_prepare",
    "read_plan",
    "spread",
    "tight_bound",
    "time_round",
    "verify",
    "violations",
    "window_period",
    "zero_bubble",
]
