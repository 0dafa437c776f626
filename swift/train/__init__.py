"""Training: the loop, runs in one process with emulated failures, and export of the model.

``settings`` holds the experiment and its failure list, ``checkpoints`` the checkpoints of a run.
"""

from swift.train.emulated_cluster import Down
from swift.train.export import export_model, generate, load_exported
from swift.train.interrupt import Interrupt
from swift.train.loop import LiveWorkers, StateKeeper, TrainLoop
from swift.train.progress import NUM_PLAIN_LINES, NUM_TIMED_UPDATES, describe, format_duration, saved_text
from swift.train.settings import Experiment
from swift.train.start import (
    TrainOptions,
    check_range,
    conclude,
    find_start,
    is_to_conclude,
    open_run,
    own_run,
    try_placement,
)
from swift.train.step_records import mean_loss, plan_facts, step_record
from swift.train.summary import summarize
from swift.train.trainer import train
from swift.train.window_rules import is_due, window_length

__all__ = [
    "NUM_PLAIN_LINES",
    "NUM_TIMED_UPDATES",
    "Down",
    "Experiment",
    "Interrupt",
    "LiveWorkers",
    "StateKeeper",
    "TrainLoop",
    "TrainOptions",
    "check_range",
    "conclude",
    "describe",
    "export_model",
    "find_start",
    "format_duration",
    "generate",
    "is_due",
    "is_to_conclude",
    "load_exported",
    "mean_loss",
    "open_run",
    "own_run",
    "plan_facts",
    "saved_text",
    "step_record",
    "summarize",
    "train",
    "try_placement",
    "window_length",
]
