"""Training: the loop, runs in one process with emulated failures, export of the model, and texts by it.

``settings`` holds the experiment and its failure list, ``checkpoints`` the checkpoints of a run; ``emulated`` has the
workers of a run in one process, ``hosts`` those of several.
"""

from swift.train.checkpoints import (
    ModelSource,
    WeightSource,
    is_model,
    load_exported,
    weights_digest,
    widened,
)
from swift.train.display import Series, StepTimer, Terminal, describe, format_duration, progress_lines, saved_text
from swift.train.emulated import Down
from swift.train.export import export_model, find_checkpoint, load_weights
from swift.train.fitting import check_processes
from swift.train.hosts import ALONE, HostPlace, Hosts, join_hosts, own_devices
from swift.train.interrupt import Interrupt
from swift.train.loop import LiveWorkers, StateKeeper, TrainLoop
from swift.train.options import TrainOptions
from swift.train.preflight import check_before
from swift.train.settings import Experiment, for_storage, on_ranks
from swift.train.start import (
    check_range,
    check_resumable,
    conclude,
    find_start,
    find_weights,
    is_to_conclude,
    made_directory,
    open_run,
    own_run,
    try_placement,
)
from swift.train.step_records import mean_loss, plan_facts
from swift.train.summary import summarize
from swift.train.text_generation import generate
from swift.train.trainer import train
from swift.train.window_rules import is_due, window_length

__all__ = [
    "ALONE",
    "Down",
    "Experiment",
    "HostPlace",
    "Hosts",
    "Interrupt",
    "LiveWorkers",
    "ModelSource",
    "Series",
    "StateKeeper",
    "StepTimer",
    "Terminal",
    "TrainLoop",
    "TrainOptions",
    "WeightSource",
    "check_before",
    "check_processes",
    "check_range",
    "check_resumable",
    "conclude",
    "describe",
    "export_model",
    "find_checkpoint",
    "find_start",
    "find_weights",
    "for_storage",
    "format_duration",
    "generate",
    "is_due",
    "is_model",
    "is_to_conclude",
    "join_hosts",
    "load_exported",
    "load_weights",
    "made_directory",
    "mean_loss",
    "on_ranks",
    "open_run",
    "own_devices",
    "own_run",
    "plan_facts",
    "progress_lines",
    "saved_text",
    "summarize",
    "train",
    "try_placement",
    "weights_digest",
    "widened",
    "window_length",
]
