"""Pipeline schedules that survive failures, in plain Python and NumPy: usable as a separate library.

A ``Problem`` says what is to be planned. A planner from ``planners`` makes a ``Schedule`` of it, in which peers run the
micro-batches of failed workers (re-routing); ``adapt`` weighs that against pipelines cut anew. ``verify`` checks a
schedule, ``plans`` stores it for every failure, and ``lowering`` turns it into the tick table of an SPMD program.
"""

from swift.schedules.bounds import lower_bound, tight_bound
from swift.schedules.chunks import Chunk, common_chunks, cut_by_costs, joined
from swift.schedules.lowering import (
    NOTHING,
    HeldBytes,
    SlotBytes,
    TableShape,
    TickTable,
    allocated_bytes,
    assign_ticks,
    common_shape,
    held_bytes,
    lockstep_period,
    lower,
)
from swift.schedules.measures import bubble_share, iteration_ends, makespan, period, window_period
from swift.schedules.memory import peak_memory
from swift.schedules.ops import Kind, Op, TimedOp
from swift.schedules.planners import (
    FAULT_FREE,
    PLANNERS,
    SHAPES,
    OwnPlanner,
    Planner,
    adaptive,
    gpipe,
    in_shape,
    lockstep,
    one_f_one_b,
    plan_with,
    shape_of,
    v,
    zero_bubble,
)
from swift.schedules.plans import (
    DamagedPlanError,
    Normalized,
    PlanStore,
    denormalize,
    moves,
    normalize,
    num_plans,
    plan_document,
    plans_to_prepare,
    read_plan,
    spread,
)
from swift.schedules.problem import Costs, Problem
from swift.schedules.rounds import round_of
from swift.schedules.schedule import Round, Schedule
from swift.schedules.sequences import time_round
from swift.schedules.verify import ScheduleError, verify, violations

__all__ = [
    "FAULT_FREE",
    "NOTHING",
    "PLANNERS",
    "SHAPES",
    "Chunk",
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
    "common_chunks",
    "common_shape",
    "cut_by_costs",
    "denormalize",
    "gpipe",
    "held_bytes",
    "in_shape",
    "iteration_ends",
    "joined",
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
    "round_of",
    "shape_of",
    "spread",
    "tight_bound",
    "time_round",
    "v",
    "verify",
    "violations",
    "window_period",
    "zero_bubble",
]
