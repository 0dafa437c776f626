"""What every process of a run settles before it begins: its JAX, and its standard output, on which it speaks."""

import os
import sys
from typing import TextIO

import jax

from swift.train import Experiment


def settle_jax(experiment: Experiment, num_devices: int) -> None:
    """How JAX is to start.

    Args:
        experiment: what is run.
        num_devices: of this process.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_enable_x64", experiment.compute_dtype == "float64")
    jax.config.update("jax_enable_compilation_cache", False)  # the run has a store of its own


def take_output() -> TextIO:
    """Takes over standard output: whatever else is printed from now on goes to standard error."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return output
