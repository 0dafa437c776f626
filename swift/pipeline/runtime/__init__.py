"""The step functions of a training run.

The spec of a step and its state, a stage's ops, the interpreter of tick tables, the update, and the step of a single
worker.
"""

from swift.pipeline.batch_layout import sequences_per_rank, share_sequences
from swift.pipeline.runtime.chunk_layers import ChunkLayers, group_of
from swift.pipeline.runtime.costs import (
    counted_stage,
    embedding_and_head,
    plan_costs,
    rank_weights,
    split_stage,
    stage_costs,
    stash_bytes,
)
from swift.pipeline.runtime.metrics import Sums, by_iteration
from swift.pipeline.runtime.single_worker import (
    put_batch,
    single_worker_batch,
    single_worker_evaluation,
    single_worker_gradients,
    single_worker_step,
)
from swift.pipeline.runtime.stage import Stage, block_function, block_shapes
from swift.pipeline.runtime.step_spec import Remat, StepSpec, materialize_all
from swift.pipeline.runtime.tick_arrays import table_arrays
from swift.pipeline.runtime.train_step import barrier_step, evaluation_step, window_step
from swift.pipeline.train_state import EMBEDDING_AND_HEAD, KINDS, DeviceBatch, TrainState

__all__ = [
    "EMBEDDING_AND_HEAD",
    "KINDS",
    "ChunkLayers",
    "DeviceBatch",
    "Remat",
    "Stage",
    "StepSpec",
    "Sums",
    "TrainState",
    "barrier_step",
    "block_function",
    "block_shapes",
    "by_iteration",
    "counted_stage",
    "embedding_and_head",
    "evaluation_step",
    "group_of",
    "materialize_all",
    "plan_costs",
    "put_batch",
    "rank_weights",
    "sequences_per_rank",
    "share_sequences",
    "single_worker_batch",
    "single_worker_evaluation",
    "single_worker_gradients",
    "single_worker_step",
    "split_stage",
    "stage_costs",
    "stash_bytes",
    "table_arrays",
    "window_step",
]
