"""Checkpoints of a training run.

The division of its state, its saving and reading, and a refuge for it when the disk cannot hold it; model directories,
and what a new run begins with.
"""

from swift.train.checkpoints.checkpointer import Checkpointer
from swift.train.checkpoints.fork import ModelPlan, ModelSource, WeightSource
from swift.train.checkpoints.model_directory import (
    check_new,
    is_model,
    load_exported,
    load_wide,
    new_model,
    pure,
    weights_digest,
    widened,
    write_model,
)
from swift.train.checkpoints.rescue import keep_elsewhere, take_back
from swift.train.checkpoints.saved_state import (
    check_savable,
    extra_of,
    first_ledger,
    ledger_after,
    ledger_for,
    load_state,
    put_state,
    split_of,
)

__all__ = [
    "Checkpointer",
    "ModelPlan",
    "ModelSource",
    "WeightSource",
    "check_new",
    "check_savable",
    "extra_of",
    "first_ledger",
    "is_model",
    "keep_elsewhere",
    "ledger_after",
    "ledger_for",
    "load_exported",
    "load_state",
    "load_wide",
    "new_model",
    "pure",
    "put_state",
    "split_of",
    "take_back",
    "weights_digest",
    "widened",
    "write_model",
]
