"""Checkpoints of a training run.

The division of its state, its saving and reading, and a place for it when the disk cannot take it.
"""

from swift.train.checkpoints.checkpointer import Checkpointer
from swift.train.checkpoints.fork import WeightSource
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
    "WeightSource",
    "check_savable",
    "extra_of",
    "first_ledger",
    "keep_elsewhere",
    "ledger_after",
    "ledger_for",
    "load_state",
    "put_state",
    "split_of",
    "take_back",
]
