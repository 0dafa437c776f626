"""Running any schedule under any failure set: decoupled backward, tick interpreter, step functions."""

from swift.pipeline.configuration import (
    Configuration,
    Configurator,
    Plan,
    PlanSettings,
    batch_of_rows,
    neighbours,
    survives,
)
from swift.pipeline.costs import split_stage, stage_costs, stage_sizes, stash_bytes
from swift.pipeline.engine import PREPARE, Change, Engine, Prepare
from swift.pipeline.lone import lone_evaluation, lone_gradients, lone_step, put_batch
from swift.pipeline.metrics import by_iteration
from swift.pipeline.program import Program, TrainState, materialize_all
from swift.pipeline.reshaping import StateShape, reshape_state, reshaped
from swift.pipeline.shares import sequences_per_rank
from swift.pipeline.split import Split, split
from swift.pipeline.stage import Sums
from swift.pipeline.steps import Outcome, Steps
from swift.pipeline.tables import table_arrays
from swift.pipeline.window import barrier_step, evaluation_step, window_step

__all__ = [
    "PREPARE",
    "Change",
    "Configuration",
    "Configurator",
    "Engine",
    "Outcome",
    "Plan",
    "PlanSettings",
    "Prepare",
    "Program",
    "Split",
    "StateShape",
    "Steps",
    "Sums",
    "TrainState",
    "barrier_step",
    "batch_of_rows",
    "by_iteration",
    "evaluation_step",
    "lone_evaluation",
    "lone_gradients",
    "lone_step",
    "materialize_all",
    "neighbours",
    "put_batch",
    "reshape_state",
    "reshaped",
    "sequences_per_rank",
    "split",
    "split_stage",
    "stage_costs",
    "stage_sizes",
    "stash_bytes",
    "survives",
    "table_arrays",
    "window_step",
]
