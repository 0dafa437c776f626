"""Runs of Swift's commands on the GPU, or on this machine's CPU."""

import os
import subprocess

from swift.runlog.reading import read_run
from tests.elastic.runs import SWIFT, losses, write_config


def printed(command, **variables):
    """What a program prints; it takes no more of the GPU's memory than it needs, since tests run at the same time."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | variables
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def told(platform, *command):
    """What a command of Swift prints, on the CPU (``cpu``) or on what JAX chooses by itself (``cuda``)."""
    variables = {"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {}
    return printed([*SWIFT, *map(str, command)], **variables)


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
