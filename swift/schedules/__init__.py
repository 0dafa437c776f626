"""Pipeline schedules that survive failures, in plain Python and NumPy: usable as a separate library.

``problem`` says what is to be planned. A planner from ``planners`` or ``milp``, found by name in ``registry``, makes a
``schedule`` of it, in which peers run the micro-batches of failed workers (re-routing); ``adapt`` weighs that against
pipelines cut anew. ``sequences`` times ops in a given order, ``bounds`` says how short a period could be, and ``rules``
checks a schedule. ``plans`` stores it for every failure, and ``lowering`` turns it into the tick table of an SPMD
program.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.schedules.bounds import lower_bound, tight_bound
    from swift.schedules.lowering.lower import LiveBytes, SlotBytes, allocated_bytes, live_bytes, lower
    from swift.schedules.lowering.tick_table import NOTHING, TableShape, TickTable, common_shape
    from swift.schedules.lowering.ticks import assign_ticks, lockstep_period
    from swift.schedules.planners.adaptive import adaptive
    from swift.schedules.planners.baselines import gpipe, one_f_one_b, zero_bubble
    from swift.schedules.planners.lockstep import lockstep
    from swift.schedules.planners.names import FAULT_FREE, SHAPES, CustomPlanner, shape_of
    from swift.schedules.planners.v import v
    from swift.schedules.plans.normalize import (
        Normalized,
        denormalize,
        normalize,
        num_plans,
        plans_to_prepare,
        role_moves,
        spread,
    )
    from swift.schedules.plans.store import CorruptPlanError, PlanStore, plan_document, read_plan
    from swift.schedules.problem import Chunk, Costs, Kind, Op, Problem, TimedOp, common_chunks, cut_by_costs, joined
    from swift.schedules.registry import PLANNERS, Planner, plan_with, with_chunk_shape
    from swift.schedules.rules import ScheduleError, verify, violations
    from swift.schedules.schedule import (
        Round,
        Schedule,
        bubble_share,
        iteration_ends,
        makespan,
        peak_memory,
        period,
        round_of,
        window_period,
    )
    from swift.schedules.sequences import time_round

_MODULES = {
    "swift.schedules.bounds": ["lower_bound", "tight_bound"],
    "swift.schedules.lowering.lower": ["LiveBytes", "SlotBytes", "allocated_bytes", "live_bytes", "lower"],
    "swift.schedules.lowering.tick_table": ["NOTHING", "TableShape", "TickTable", "common_shape"],
    "swift.schedules.lowering.ticks": ["assign_ticks", "lockstep_period"],
    "swift.schedules.planners.adaptive": ["adaptive"],
    "swift.schedules.planners.baselines": ["gpipe", "one_f_one_b", "zero_bubble"],
    "swift.schedules.planners.lockstep": ["lockstep"],
    "swift.schedules.planners.names": ["FAULT_FREE", "CustomPlanner", "SHAPES", "shape_of"],
    "swift.schedules.planners.v": ["v"],
    "swift.schedules.plans.normalize": [
        "Normalized",
        "denormalize",
        "role_moves",
        "normalize",
        "num_plans",
        "plans_to_prepare",
        "spread",
    ],
    "swift.schedules.plans.store": ["CorruptPlanError", "PlanStore", "plan_document", "read_plan"],
    "swift.schedules.problem": [
        "Chunk",
        "Costs",
        "Kind",
        "Op",
        "Problem",
        "TimedOp",
        "common_chunks",
        "cut_by_costs",
        "joined",
    ],
    "swift.schedules.registry": ["PLANNERS", "Planner", "with_chunk_shape", "plan_with"],
    "swift.schedules.rules": ["ScheduleError", "verify", "violations"],
    "swift.schedules.schedule": [
        "Round",
        "Schedule",
        "bubble_share",
        "iteration_ends",
        "makespan",
        "peak_memory",
        "period",
        "round_of",
        "window_period",
    ],
    "swift.schedules.sequences": ["time_round"],
}
__all__ = [
    "FAULT_FREE",
    "NOTHING",
    "PLANNERS",
    "SHAPES",
    "Chunk",
    "CorruptPlanError",
    "Costs",
    "CustomPlanner",
    "Kind",
    "LiveBytes",
    "Normalized",
    "Op",
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
    "iteration_ends",
    "joined",
    "live_bytes",
    "lockstep",
    "lockstep_period",
    "lower",
    "lower_bound",
    "makespan",
    "normalize",
    "num_plans",
    "one_f_one_b",
    "peak_memory",
    "period",
    "plan_document",
    "plan_with",
    "plans_to_prepare",
    "read_plan",
    "role_moves",
    "round_of",
    "shape_of",
    "spread",
    "tight_bound",
    "time_round",
    "v",
    "verify",
    "violations",
    "window_period",
    "with_chunk_shape",
    "zero_bubble",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
