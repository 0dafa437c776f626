"""The step functions of a training run.

The spec of a step and its state, a stage's ops, the interpreter of tick tables, the update, and the step of a single
worker.
"""

from swift.pipeline.batch_layout import sequences_per_rank, share_sequences
from swift.pipeline.runtime.costs import counted_stage, plan_costs, split_stage, stage_costs, stash_bytes
from swift.pipeline.runtime.metrics import Sums, by_iteration
from swift.pipeline.runtime.single_worker import (
    put_batch,
    single_worker_evaluation,
    single_worker_gradients,
    single_worker_step,
)
from swift.pipeline.runtime.stage import Stage, block_function, block_shapes
from swift.pipeline.runtime.step_spec import StepSpec, materialize_all
from swift.pipeline.runtime.tick_arrays import table_arrays
from swift.pipeline.runtime.train_step import barrier_step, evaluation_step, window_step
from swift.pipeline.train_state import EMBEDDING_AND_HEAD, KINDS, DeviceBatch, TrainState

__all__ = [
    "EMBEDDING_AND_HEAD",
    "KINDS",
    "DeviceBatch",
    "Stage",
    "StepSpec",
    "Sums",
    "TrainState",
    "barrier_step",
    "block_function",
    "block_shapes",
    "by_iteration",
    "counted_stage",
    "evaluation_step",
    "materialize_all",
    "plan_costs",
    "put_batch",
    "sequences_per_rank",
    "share_sequences",
    "single_worker_evaluation",
    "single_worker_gradients",
    "single_worker_step",
    "split_stage",
    "stage_costs",
    "stash_bytes",
    "table_arrays",
    "window_step",
]
