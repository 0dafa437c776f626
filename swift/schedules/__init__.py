"""Pipeline schedules that survive failures, in plain Python and NumPy; usable as a separate library.

- ``problem`` defines the planning problem. Planners, in ``planners`` and ``milp``, turn it into a ``schedule``.
  ``registry`` finds planners by name.
- In these schedules peers run the micro-batches of failed workers (re-routing, as in ReCycle). ``adapt`` compares
  re-routing with re-partitioned pipelines.
- ``sequences`` times ops in a given order, ``bounds`` computes lower bounds on the period, and ``rules`` verifies
  schedules.
- ``plans`` stores schedules for every failure. ``lowering`` turns schedules into the tick tables of an SPMD program.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.schedules.bounds import lower_bound, tight_bound
    from swift.schedules.lowering.lower import SlotBytes, allocated_bytes, live_bytes, lower
    from swift.schedules.lowering.tick_table import TickTable
    from swift.schedules.lowering.ticks import lockstep_period
    from swift.schedules.planners.adaptive import adaptive
    from swift.schedules.planners.baselines import gpipe, one_f_one_b, zero_bubble
    from swift.schedules.planners.lockstep import lockstep
    from swift.schedules.planners.names import FAULT_FREE, CustomPlanner
    from swift.schedules.planners.v import v
    from swift.schedules.plans.normalize import Normalized, denormalize, normalize, plan_document
    from swift.schedules.plans.store import CorruptPlanError, PlanStore, read_plan
    from swift.schedules.problem import Chunk, Costs, Kind, Op, Problem, TimedOp
    from swift.schedules.registry import PLANNERS, Planner, plan_with
    from swift.schedules.rules import ScheduleError, verify, violations
    from swift.schedules.schedule import (
        Round,
        Schedule,
        bubble_share,
        iteration_ends,
        makespan,
        peak_memory,
        period,
        window_period,
    )
    from swift.schedules.sequences import time_round

_MODULES = {
    "swift.schedules.bounds": ["lower_bound", "tight_bound"],
    "swift.schedules.lowering.lower": ["SlotBytes", "allocated_bytes", "live_bytes", "lower"],
    "swift.schedules.lowering.tick_table": ["TickTable"],
    "swift.schedules.lowering.ticks": ["lockstep_period"],
    "swift.schedules.planners.adaptive": ["adaptive"],
    "swift.schedules.planners.baselines": ["gpipe", "one_f_one_b", "zero_bubble"],
    "swift.schedules.planners.lockstep": ["lockstep"],
    "swift.schedules.planners.names": ["FAULT_FREE", "CustomPlanner"],
    "swift.schedules.planners.v": ["v"],
    "swift.schedules.plans.normalize": ["Normalized", "denormalize", "normalize", "plan_document"],
    "swift.schedules.plans.store": ["CorruptPlanError", "PlanStore", "read_plan"],
    "swift.schedules.problem": ["Chunk", "Costs", "Kind", "Op", "Problem", "TimedOp"],
    "swift.schedules.registry": ["PLANNERS", "Planner", "plan_with"],
    "swift.schedules.rules": ["ScheduleError", "verify", "violations"],
    "swift.schedules.schedule": [
        "Round",
        "Schedule",
        "bubble_share",
        "iteration_ends",
        "makespan",
        "peak_memory",
        "period",
        "window_period",
    ],
    "swift.schedules.sequences": ["time_round"],
}
__all__ = [
    "FAULT_FREE",
    "PLANNERS",
    "Chunk",
    "CorruptPlanError",
    "Costs",
    "CustomPlanner",
    "Kind",
    "Normalized",
    "Op",
    "PlanStore",
    "Planner",
    "Problem",
    "Round",
    "Schedule",
    "ScheduleError",
    "SlotBytes",
    "TickTable",
    "TimedOp",
    "adaptive",
    "allocated_bytes",
    "bubble_share",
    "denormalize",
    "gpipe",
    "iteration_ends",
    "live_bytes",
    "lockstep",
    "lockstep_period",
    "lower",
    "lower_bound",
    "makespan",
    "normalize",
    "one_f_one_b",
    "peak_memory",
    "period",
    "plan_document",
    "plan_with",
    "read_plan",
    "tight_bound",
    "time_round",
    "v",
    "verify",
    "violations",
    "window_period",
    "zero_bubble",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
