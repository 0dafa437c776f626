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
    from swift.train.display import Terminal, describe, format_duration
    from swift.train.hosts import HostSettings, join_hosts
    from swift.train.initial_weights import ModelSource, WeightSource
    from swift.train.interrupt import Interrupt
    from swift.train.loop import LiveWorkers, StateStore, TrainLoop
    from swift.train.model_directory import load_exported
    from swift.train.start import TrainOptions
    from swift.train.trainer import check_before, train

_MODULES = {
    "swift.config.experiment": ["Experiment"],
    "swift.train.display": ["Terminal", "describe", "format_duration"],
    "swift.train.hosts": ["HostSettings", "join_hosts"],
    "swift.train.initial_weights": ["ModelSource", "WeightSource"],
    "swift.train.interrupt": ["Interrupt"],
    "swift.train.loop": ["LiveWorkers", "StateStore", "TrainLoop"],
    "swift.train.model_directory": ["load_exported"],
    "swift.train.start": ["TrainOptions"],
    "swift.train.trainer": ["check_before", "train"],
}
__all__ = [
    "Experiment",
    "HostSettings",
    "Interrupt",
    "LiveWorkers",
    "ModelSource",
    "StateStore",
    "Terminal",
    "TrainLoop",
    "TrainOptions",
    "WeightSource",
    "check_before",
    "describe",
    "format_duration",
    "join_hosts",
    "load_exported",
    "train",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
