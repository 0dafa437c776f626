"""Training: the training loop, and runs in one process with emulated failures. Real processes are in ``swift.elastic``.

- A run: ``trainer`` runs an experiment from start to end. ``start`` opens the run directory and finds the iteration to
  continue from, ``initial_weights`` loads another model's weights, and ``fitting`` checks the memory.
- The loop: ``loop`` runs windows of iterations, for one process and for many. ``emulated`` fails and restores workers
  in one process, ``emulated_run`` connects them to the loop, and ``hosts`` coordinates a run on several machines.
- State: ``checkpointer`` saves in the background, ``saved_state`` converts states to and from checkpoints, and
  ``model_directory`` exports models without optimizer state.
- Reporting and control: ``records``, ``display``, and ``interrupt`` for Ctrl-C.
- ``build`` makes the loader, mesh, step and engine of an experiment.
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
