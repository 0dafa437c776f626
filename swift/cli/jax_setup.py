"""Configures JAX before it creates a backend: devices, 64-bit types, and the compilation cache."""

import os
import sys
from collections.abc import Sequence

import jax

from swift.config.experiment import Experiment
from swift.errors import SettingError
from swift.mesh.devices import EmulationError, emulate_devices, enable_compilation_cache

_QUIET = {"TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3"}
"""Environment variables that keep libtpu, if installed, from printing pages of log output while it looks for a TPU."""
DEVICES_PER_CORE = 12
"""Maximum number of emulated devices per CPU core without a warning."""


def prepare(experiments: Sequence[Experiment], num_devices: int | None = None) -> None:
    """Configures JAX for all experiments that this process will run; must be called before JAX creates a backend.

    Args:
        experiments: settings of the experiments.
        num_devices: number of devices to emulate, or None for as many as the largest experiment needs.

    Raises:
        SettingError: the experiments need different configurations, or the devices cannot be emulated.
    """
    for name in ("ranks", "compute_dtype"):
        values = {getattr(experiment, name) for experiment in experiments}
        if len(values) > 1:
            raise SettingError(f"Experiment.{name}", sorted(values), "must be the same in all files of one comparison")
    if experiments[0].ranks == "emulated":
        num_devices = num_devices or max(experiment.topology.num_devices for experiment in experiments)
        for line in oversubscription_warning(num_devices, os.cpu_count() or 1):
            print(f"swift: {line}", file=sys.stderr)
        try:
            emulate_devices(num_devices)
        except EmulationError as error:
            raise SettingError("Experiment.ranks", "emulated", str(error)) from error
    else:
        os.environ |= {name: level for name, level in _QUIET.items() if name not in os.environ}
    jax.config.update("jax_enable_x64", experiments[0].compute_dtype == "float64")
    enable_compilation_cache()


def oversubscription_warning(num_devices: int, num_cores: int) -> list[str]:
    """Returns a warning, as a list of at most one line, if there are too many emulated devices for the CPU cores.

    >>> oversubscription_warning(8, 2)
    []
    """
    if num_devices <= DEVICES_PER_CORE * num_cores:
        return []
    return [
        f"{num_devices} emulated devices on {num_cores} cores: compiling the first step takes minutes, and so may each "
        "step; fewer, by Topology or --expert-ranks, are faster, and so is training with Experiment.ranks = 'virtual'"
    ]
