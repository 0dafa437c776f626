"""Running any schedule under any failure set: decoupled backward, tick interpreter, step functions."""

from swift.pipeline.reconfigure.compiled_steps import Steps, WindowResult
from swift.pipeline.reconfigure.engine import PREPARE, Engine, Prepare, Reconfiguration
from swift.pipeline.reconfigure.failure_config import (
    Configuration,
    Configurator,
    Plan,
    PlanSettings,
    batch_of_rows,
    neighbours,
    survives,
)
from swift.pipeline.reconfigure.reshard import StateShape, reshape_state, reshaped
from swift.pipeline.runtime.batch_layout import sequences_per_rank
from swift.pipeline.runtime.costs import split_stage, stage_costs, stage_sizes, stash_bytes
from swift.pipeline.runtime.metrics import by_iteration
from swift.pipeline.runtime.single_worker import (
    put_batch,
    single_worker_evaluation,
    single_worker_gradients,
    single_worker_step,
)
from swift.pipeline.runtime.stage import Sums
from swift.pipeline.runtime.step_spec import StepSpec, TrainState, materialize_all
from swift.pipeline.runtime.tick_arrays import table_arrays
from swift.pipeline.runtime.train_step import barrier_step, evaluation_step, window_step
from swift.pipeline.split_backward.split import SplitStage, split

__all__ = [
    "PREPARE",
    "Configuration",
    "Configurator",
    "Engine",
    "Plan",
    "PlanSettings",
    "Prepare",
    "Reconfiguration",
    "SplitStage",
    "StateShape",
    "StepSpec",
    "Steps",
    "Sums",
    "TrainState",
    "WindowResult",
    "barrier_step",
    "batch_of_rows",
    "by_iteration",
    "evaluation_step",
    "materialize_all",
    "neighbours",
    "put_batch",
    "reshape_state",
    "reshaped",
    "sequences_per_rank",
    "single_worker_evaluation",
    "single_worker_gradients",
    "single_worker_step",
    "split",
    "split_stage",
    "stage_costs",
    "stage_sizes",
    "stash_bytes",
    "survives",
    "table_arrays",
    "window_step",
]
