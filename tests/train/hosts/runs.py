"""Runs on several hosts, each a process of its own: how they are configured, started and ended."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

import numpy as np

from tests.elastic import runs

PATIENCE_S = 900
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
SMALL = {
    "model_dim = 64": "model_dim = 16",
    "ffn_dim = 128": "ffn_dim = 32",
    "sequence_length = 64": "sequence_length = 16",
}


@dataclass(frozen=True)
class Ended:
    """The end of a host's process: its exit code and what it printed."""

    code: int
    out: str
    err: str


def write_config(directory, topology, steps, **settings):
    """A tiny experiment of (pipelines, stages, ranks) in double precision, and its data."""
    config = runs.write_config(directory, topology, steps, **settings)
    text = config.read_text()
    for before, after in SMALL.items():
        assert before in text
        text = text.replace(before, after)
    config.write_text(text)
    return config


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(config, run_dir, num_hosts, *arguments, hosts=None, address="127.0.0.1", inside=lambda _: []):
    """Starts the processes of a run, or of some of its hosts.

    Args:
        config: configuration of the run, or several, which are then compared.
        run_dir: run directory.
        num_hosts: number of hosts.
        arguments: further arguments of all hosts, or functions of the host's number.
        hosts: numbers of the hosts to start; all unless given.
        address: address of the first host.
        inside: function from a host's number to words before its command.
    """
    command = ["compare", *map(str, config)] if isinstance(config, list) else ["train", str(config)]
    coordinator = f"{address}:{free_port()}"
    place = ["--run-dir", str(run_dir), "--coordinator", coordinator, "--num-hosts", str(num_hosts)]
    place += [] if address == "127.0.0.1" else ["--insecure-network"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return [
        subprocess.Popen(
            [*inside(host), sys.executable, "-m", "swift", *command, *place, "--host", str(host)]
            + [str(argument(host) if callable(argument) else argument) for argument in arguments],
            text=True,
            env=os.environ | QUICKLY,
            **pipes,
        )
        for host in (range(num_hosts) if hosts is None else hosts)
    ]


def ended(processes, patience_s=PATIENCE_S):
    """Waits for the processes to end; those that have not in time are killed, and the test fails."""
    try:
        told = [process.communicate(timeout=patience_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(process.returncode, *both) for process, both in zip(processes, told, strict=True)]


def alone(config, run_dir, *arguments):
    """The losses of the same run on one host."""
    command = [sys.executable, "-m", "swift", "train", str(config), "--run-dir", str(run_dir), *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S, env=os.environ | QUICKLY)
    return runs.losses(run_dir)


def bytes_of_hosts(run_dir):
    """The bytes that each host has written of every checkpoint of a run."""
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [event["bytes_of_hosts"] for event in events if event["event"] == "checkpoint"]


def arrays_of(checkpoint):
    """All arrays of a checkpoint by name, read from its files as raw bytes."""
    arrays = {}
    for header in sorted((checkpoint / "arrays" / "state").glob("*/.zarray")):
        said = json.loads(header.read_bytes())
        (values,) = (path for path in header.parent.iterdir() if not path.name.startswith("."))
        arrays[header.parent.name] = np.fromfile(values, said["dtype"]).reshape(said["shape"])
    return arrays
