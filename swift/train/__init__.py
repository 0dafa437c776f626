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
    from swift.train.build import on_storage_mesh, with_num_ranks
    from swift.train.display import Series, StepTimer, Terminal, describe, format_duration, progress_lines, saved_text
    from swift.train.emulated import FailedSet
    from swift.train.fitting import check_processes
    from swift.train.hosts import SINGLE_HOST, HostIndex, Hosts, join_hosts, own_devices
    from swift.train.initial_weights import ModelSource, WeightSource
    from swift.train.interrupt import Interrupt
    from swift.train.loop import LiveWorkers, StateStore, TrainLoop, is_due, window_length
    from swift.train.model_directory import is_model, load_exported, weights_digest, widened
    from swift.train.records import mean_loss, plan_facts, summarize
    from swift.train.start import (
        TrainOptions,
        acquire_run,
        check_range,
        check_resumable,
        find_start,
        find_weights,
        made_directory,
        needs_summary,
        open_run,
        try_placement,
        write_summary,
    )
    from swift.train.trainer import check_before, train

_MODULES = {
    "swift.config.experiment": ["Experiment"],
    "swift.train.build": ["on_storage_mesh", "with_num_ranks"],
    "swift.train.display": [
        "Series",
        "StepTimer",
        "Terminal",
        "describe",
        "format_duration",
        "progress_lines",
        "saved_text",
    ],
    "swift.train.emulated": ["FailedSet"],
    "swift.train.fitting": ["check_processes"],
    "swift.train.hosts": ["SINGLE_HOST", "HostIndex", "Hosts", "join_hosts", "own_devices"],
    "swift.train.initial_weights": ["ModelSource", "WeightSource"],
    "swift.train.interrupt": ["Interrupt"],
    "swift.train.loop": ["LiveWorkers", "StateStore", "TrainLoop", "is_due", "window_length"],
    "swift.train.model_directory": ["is_model", "load_exported", "weights_digest", "widened"],
    "swift.train.records": ["mean_loss", "plan_facts", "summarize"],
    "swift.train.start": [
        "TrainOptions",
        "check_range",
        "check_resumable",
        "write_summary",
        "find_start",
        "find_weights",
        "needs_summary",
        "made_directory",
        "open_run",
        "acquire_run",
        "try_placement",
    ],
    "swift.train.trainer": ["check_before", "train"],
}
__all__ = [
    "SINGLE_HOST",
    "Experiment",
    "FailedSet",
    "HostIndex",
    "Hosts",
    "Interrupt",
    "LiveWorkers",
    "ModelSource",
    "Series",
    "StateStore",
    "StepTimer",
    "Terminal",
    "TrainLoop",
    "TrainOptions",
    "WeightSource",
    "acquire_run",
    "check_before",
    "check_processes",
    "check_range",
    "check_resumable",
    "describe",
    "find_start",
    "find_weights",
    "format_duration",
    "is_due",
    "is_model",
    "join_hosts",
    "load_exported",
    "made_directory",
    "mean_loss",
    "needs_summary",
    "on_storage_mesh",
    "open_run",
    "own_devices",
    "plan_facts",
    "progress_lines",
    "saved_text",
    "summarize",
    "train",
    "try_placement",
    "weights_digest",
    "widened",
    "window_length",
    "with_num_ranks",
    "write_summary",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
