"""Runs of real processes, for tests: how they are started, watched and found again."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from swift.checkpoint.manifest import checkpoint_steps
from swift.runlog.reading import read_run

PATIENCE_S = 240
EVERY = {"CheckpointConfig__every": 20}
NO_CHECKPOINTS = "--set", "CheckpointConfig.every=0"
"""Options of the run without failures, which ends sooner with them."""
SWIFT = [sys.executable, "-m", "swift"]
KILLED = """
Experiment.model = @ModelConfig()
ModelConfig.num_layers = 2
ModelConfig.model_dim = 64
ModelConfig.num_heads = 2
ModelConfig.ffn_dim = 128
ModelConfig.sequence_length = 64
ModelConfig.moe_pattern = (True,)
Experiment.experts = @ExpertConfig()
ExpertConfig.num_classes = 4
ExpertConfig.slots_per_rank = 5
ExpertConfig.capacity = @SlotCapacity()
SlotCapacity.factor = 1.0
Experiment.topology = @Topology()
Topology.num_pipelines = {pipelines}
Topology.num_stages = {stages}
Topology.num_expert_ranks = {ranks}
Experiment.ranks = 'emulated'
Experiment.placement = @Symi()
Experiment.optimizer = @OptimizerConfig()
OptimizerConfig.warmup_steps = 2
Experiment.data = @DataConfig()
DataConfig.source = @TextFiles()
DataConfig.validation_share = 0.2
TextFiles.pattern = '{corpus}'
Experiment.num_microbatches = 2
Experiment.sequences_per_microbatch = 2
Experiment.num_steps = {steps}
Experiment.compute_dtype = 'float64'
Experiment.eval_every = 0
Experiment.checkpoint = @CheckpointConfig()
CheckpointConfig.every = 0
"""


def write_config(directory, topology, steps, **settings):
    """A tiny experiment of (pipelines, stages, ranks), and its data."""
    (directory / "corpus").mkdir(exist_ok=True)
    for number in range(20):
        text = "".join(chr(32 + (7 + number) * i * i % 90) for i in range(1000))
        (directory / "corpus" / f"{number}.txt").write_text(text)
    pipelines, stages, ranks = topology
    text = KILLED.format(
        pipelines=pipelines, stages=stages, ranks=ranks, steps=steps, corpus=directory / "corpus" / "*.txt"
    )
    written = {name: value if str(value).startswith("@") else repr(value) for name, value in settings.items()}
    text += "".join(f"{name.replace('__', '.')} = {value}\n" for name, value in written.items())
    (directory / "kill.gin").write_text(text)
    return directory / "kill.gin"


def environment(config):
    """Environment that marks all processes of a test's runs, and has them compile quickly rather than well."""
    return os.environ | {"SWIFT_TEST": str(config.parent), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def tell(config, *arguments):
    """Runs to the end: (exit code, what was said). Nothing may be left."""
    command = [*SWIFT, "launch", str(config), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment(config), **pipes) as process:
        try:
            _, said = process.communicate(timeout=500)
        finally:
            process.kill()
    assert scratch(process.pid) == []
    assert left_behind(config) == {}
    return process.returncode, said


def left_behind(config):
    """Processes of a test's runs that are still there, by what they are."""
    found, mark = {}, f"SWIFT_TEST={config.parent}\0"
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_text().split("\0")
            if mark in (path / "environ").read_text() and "swift" in words:
                found[int(path.name)] = words[words.index("swift") + 1]
    return found


def scratch(pid):
    """Paths of a run in temporary directories."""
    return [path for top in ("/dev/shm", tempfile.gettempdir()) for path in Path(top).glob(f"swift-{pid}-*")]


@contextmanager
def launched(config, *arguments, processes=2, inside=()):
    """A run under way, which does not outlive its test; ``inside`` begins its command."""
    command = [
        *inside,
        *SWIFT,
        "launch",
        "--processes",
        str(processes),
        str(config),
        "--run-dir",
        str(config.parent / "run"),
    ]
    with subprocess.Popen(
        [*command, *arguments], stderr=subprocess.PIPE, text=True, env=environment(config)
    ) as process:
        patience = threading.Timer(PATIENCE_S, process.kill)
        patience.start()
        try:
            yield process
        finally:
            patience.cancel()
            process.kill()
            for pid, kind in left_behind(config).items():
                if kind == "checkpoint-service":  # who is stopped cannot find out that it is to end
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)


def members(config):
    """The process ids of the members that are there, by name."""
    found = {}
    for pid in [pid for pid, kind in left_behind(config).items() if kind == "worker"]:
        with suppress(OSError):
            pipeline, stage, rank = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-4:-1]
            found[f"{pipeline}:{stage}" + (f" rank {rank}" if rank != "0" else "")] = pid
    return found


def checkpoint_service(config):
    """The process id of the checkpoint service, once it is there."""
    while not (found := [pid for pid, kind in left_behind(config).items() if kind == "checkpoint-service"]):
        assert left_behind(config), "all are gone"
        time.sleep(0.05)
    return found[0]


def wait_for_steps(process, config, number):
    """Waits until so many iterations are recorded."""
    path = config.parent / "run" / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert process.poll() is None
        time.sleep(0.1)


def wait_for_checkpoint(process, config):
    """Waits for one of an iteration; by then all that it takes is compiled."""
    while not newest_checkpoint(config):
        assert process.poll() is None
        time.sleep(0.1)


def wait_for(process, words):
    """Waits until it has printed the words; returns the line."""
    while words not in (line := process.stderr.readline()):
        assert line, f"it ended before it said {words}"
    return line


def whole(config, *options):
    """The losses of the same run without failures, in one process."""
    run_dir = config.parent / "whole"
    command = [*SWIFT, "train", str(config), "--run-dir", str(run_dir), *map(str, options)]
    subprocess.run(command, check=True, capture_output=True, timeout=500, env=environment(config))
    return losses(run_dir)


def losses(run_dir):
    records = read_run(run_dir).metrics
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)), "a step is missing"
    return np.array([record["loss"] for record in records])


def newest_checkpoint(config):
    """The iteration of a run's newest checkpoint; None while it has none."""
    return max(checkpoint_steps(config.parent / "run" / "checkpoints"), default=None)


def go_on(process, config, *others):
    """Ends a run after a moment, and holds its losses against those of the same run in one process."""
    time.sleep(2)
    stop(process, config)
    found = losses(config.parent / "run")
    np.testing.assert_allclose(found, whole(config, "--stop-at", len(found), *others), rtol=1e-8)


def stop(process, config, how=signal.SIGINT):
    """Ends a run, of which nothing may be left; returns what it has said since, and how many seconds it took."""
    begun = time.monotonic()
    process.send_signal(how)
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 130, rest
    took_s = time.monotonic() - begun
    assert "Traceback" not in rest
    assert left_behind(config) == {}
    assert scratch(process.pid) == []
    return rest, took_s
