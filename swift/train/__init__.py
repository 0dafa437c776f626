"""Training: the loop, and runs in one process with emulated failures. Real processes are in ``swift.elastic``.

``trainer`` runs an experiment: ``start`` finds where it begins, ``initial_weights`` what from, ``fitting`` whether it
has enough memory. ``loop`` runs the windows, the same for processes; ``emulated`` has the live workers of one process,
``emulated_run`` hands them to the loop, and ``hosts`` are the machines that such a run may be on. ``checkpointer``
saves, ``saved_state`` says what is saved, ``model_directory`` holds models alone. ``records`` and ``display`` tell how
it goes, ``interrupt`` stops it, and ``build`` derives experiments from others.

What is documented for users can be imported from here.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.config.experiment import Experiment
    from swift.train.build import for_storage, on_ranks
    from swift.train.display import Series, StepTimer, Terminal, describe, format_duration, progress_lines, saved_text
    from swift.train.emulated import Down
    from swift.train.fitting import check_processes
    from swift.train.hosts import ALONE, HostPlace, Hosts, join_hosts, own_devices
    from swift.train.initial_weights import ModelSource, WeightSource
    from swift.train.interrupt import Interrupt
    from swift.train.loop import LiveWorkers, StateKeeper, TrainLoop, is_due, window_length
    from swift.train.model_directory import is_model, load_exported, weights_digest, widened
    from swift.train.records import mean_loss, plan_facts, summarize
    from swift.train.start import (
        TrainOptions,
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
    from swift.train.trainer import check_before, train

_MODULES = {
    "swift.config.experiment": ["Experiment"],
    "swift.train.build": ["for_storage", "on_ranks"],
    "swift.train.display": [
        "Series",
        "StepTimer",
        "Terminal",
        "describe",
        "format_duration",
        "progress_lines",
        "saved_text",
    ],
    "swift.train.emulated": ["Down"],
    "swift.train.fitting": ["check_processes"],
    "swift.train.hosts": ["ALONE", "HostPlace", "Hosts", "join_hosts", "own_devices"],
    "swift.train.initial_weights": ["ModelSource", "WeightSource"],
    "swift.train.interrupt": ["Interrupt"],
    "swift.train.loop": ["LiveWorkers", "StateKeeper", "TrainLoop", "is_due", "window_length"],
    "swift.train.model_directory": ["is_model", "load_exported", "weights_digest", "widened"],
    "swift.train.records": ["mean_loss", "plan_facts", "summarize"],
    "swift.train.start": [
        "TrainOptions",
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
    "swift.train.trainer": ["check_before", "train"],
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
    "find_start",
    "find_weights",
    "for_storage",
    "format_duration",
    "is_due",
    "is_model",
    "is_to_conclude",
    "join_hosts",
    "load_exported",
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
