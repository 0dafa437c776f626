"""Runs of Swift's commands on the GPU, or on this machine's CPU."""

import os
import subprocess
import sys

from swift.runlog import read_run
from tests.elastic.runs import losses, write_config

SWIFT = [sys.executable, "-m", "swift"]


def told(platform, *command, fails=False):
    """What a command prints, on ``cpu`` or on JAX's choice; tests that run at the same time share the GPU's memory."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment |= {"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {}
    found = subprocess.run(
        [*SWIFT, *map(str, command)], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert (found.returncode != 0) == fails, found.stderr[-3000:]
    return found.stdout


def trained(directory, platform, config, *options):
    """The losses of a run."""
    told(platform, "train", config, "--run-dir", directory / platform, "--prepare", "none", *options)
    started = [event for event in read_run(directory / platform).events if event["event"] == "start"]
    assert {"NVIDIA" in event["device"] for event in started} == {platform == "cuda"}
    return losses(directory / platform)


def config_of(directory, steps, *, ranks=1, **settings):
    """A tiny experiment of virtual ranks, or of one device if there is one rank."""
    kind = {"Experiment__ranks": "devices" if ranks == 1 else "virtual"}
    kind["Experiment__sequences_per_microbatch"] = max(2, ranks)
    return write_config(directory, (1, 1, ranks), steps, **(kind | settings))
