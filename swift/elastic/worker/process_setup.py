"""Setup of every process of a run: its JAX configuration, and standard output, on which it sends messages."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import jax

from swift.tasks import start_thread
from swift.train.settings.experiment import Experiment

_HEARTBEAT_S = 0.5


def configure_jax(experiment: Experiment, num_devices: int) -> None:
    """Configures JAX before it starts.

    Args:
        experiment: settings of the run.
        num_devices: number of devices of this process.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_enable_x64", experiment.compute_dtype == "float64")
    jax.config.update("jax_enable_compilation_cache", False)  # the run has an executable cache of its own


class LineWriter:
    """Writes lines to standard output, from any thread; everything else that is printed goes to standard error.

    Args:
        gone: function called when the reader is gone; does not return.
    """

    def __init__(self, gone: Callable[[], NoReturn]):
        self._output, self._gone, self._lock = os.fdopen(os.dup(sys.stdout.fileno()), "w"), gone, threading.Lock()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(self, line: str) -> None:
        """Writes a line."""
        try:
            with self._lock:
                self._output.write(line)
                self._output.flush()
        except BrokenPipeError:
            self._gone()

    def repeat(self, line: Callable[[], str]) -> None:
        """Writes a line regularly from now on, in a thread."""

        def beat() -> None:
            while True:
                time.sleep(_HEARTBEAT_S)
                self.write(line())

        start_thread(beat, name="heartbeat")
