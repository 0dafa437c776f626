"""Training: the loop, runs in one process with emulated failures, export of the model, and texts by it.

``settings`` holds the experiment and its failure list, ``checkpoints`` the checkpoints of a run; ``emulated`` has the
workers of a run in one process, ``hosts`` those of several.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.train.checkpoints.fork import ModelSource, WeightSource
    from swift.train.checkpoints.model_directory import is_model, load_exported, weights_digest, widened
    from swift.train.display.progress import Series, describe, progress_lines, saved_text
    from swift.train.display.step_timer import StepTimer, format_duration
    from swift.train.display.terminal import Terminal
    from swift.train.emulated.cluster import Down
    from swift.train.export import export_model, find_checkpoint, load_weights
    from swift.train.fitting import check_processes
    from swift.train.hosts.agreement import ALONE, Hosts
    from swift.train.hosts.joining import HostPlace, join_hosts, own_devices
    from swift.train.interrupt import Interrupt
    from swift.train.loop import LiveWorkers, StateKeeper, TrainLoop
    from swift.train.options import TrainOptions
    from swift.train.preflight import check_before
    from swift.train.settings.experiment import Experiment
    from swift.train.settings.fewer_ranks import on_ranks
    from swift.train.settings.for_storage import for_storage
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

_MODULES = {
    "swift.train.checkpoints.fork": ["ModelSource", "WeightSource"],
    "swift.train.checkpoints.model_directory": ["is_model", "load_exported", "weights_digest", "widened"],
    "swift.train.display.progress": ["Series", "describe", "progress_lines", "saved_text"],
    "swift.train.display.step_timer": ["StepTimer", "format_duration"],
    "swift.train.display.terminal": ["Terminal"],
    "swift.train.emulated.cluster": ["Down"],
    "swift.train.export": ["export_model", "find_checkpoint", "load_weights"],
    "swift.train.fitting": ["check_processes"],
    "swift.train.hosts.agreement": ["ALONE", "Hosts"],
    "swift.train.hosts.joining": ["HostPlace", "join_hosts", "own_devices"],
    "swift.train.interrupt": ["Interrupt"],
    "swift.train.loop": ["LiveWorkers", "StateKeeper", "TrainLoop"],
    "swift.train.options": ["TrainOptions"],
    "swift.train.preflight": ["check_before"],
    "swift.train.settings.experiment": ["Experiment"],
    "swift.train.settings.fewer_ranks": ["on_ranks"],
    "swift.train.settings.for_storage": ["for_storage"],
    "swift.train.start": [
        "check_range",
        "check_resumable",
        "conclude",
        "find_start",
        "find_weights",
        "is_to_conclude",
        "made_directory",
        "open_run",
        "own_run",
        "try_placement",
    ],
    "swift.train.step_records": ["mean_loss", "plan_facts"],
    "swift.train.summary": ["summarize"],
    "swift.train.text_generation": ["generate"],
    "swift.train.trainer": ["train"],
    "swift.train.window_rules": ["is_due", "window_length"],
}
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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
