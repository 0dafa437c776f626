"""Real processes that are really killed: the survivors go on, the dead come back, and nothing is lost."""

import itertools
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from swift.record import read_run

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
ExpertConfig.capacity_factor = 1.0
Experiment.topology = @Topology()
Topology.num_pipelines = 2
Topology.num_stages = {stages}
Topology.num_expert_ranks = 1
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
Experiment.checkpoint_every = 0
"""


@pytest.fixture
def write(tmp_path):
    (tmp_path / "corpus").mkdir()
    for number in range(20):
        text = "".join(chr(32 + (7 + number) * i * i % 90) for i in range(1000))
        (tmp_path / "corpus" / f"{number}.txt").write_text(text)

    def config(stages, steps):
        text = KILLED.format(stages=stages, steps=steps, corpus=tmp_path / "corpus" / "*.txt")
        (tmp_path / "kill.gin").write_text(text)
        return tmp_path / "kill.gin"

    return config


def tell(*arguments):
    done = subprocess.run([*SWIFT, *map(str, arguments)], capture_output=True, text=True, timeout=500)
    return done.returncode, done.stderr


def left_behind(config):
    """Processes that still run something of this test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_text())
    return [line for line in found if "member" in line.split("\0") and str(config.parent) in line]


@contextmanager
def launched(config, *arguments):
    """A run under way, which does not outlive its test."""
    command = [*SWIFT, "launch", "--processes", "2", str(config), "--run-dir", str(config.parent / "run"), *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process, words):
    """Until it has said the words."""
    while words not in process.stderr.readline():
        assert process.poll() is None, f"it ended before it said {words}"


@pytest.mark.parametrize(
    ("stages", "steps", "who", "returns"),
    [
        (1, 60, "0:0", False),
        pytest.param(1, 250, "0:0", True, marks=pytest.mark.slow),
        pytest.param(2, 400, "1:1", True, marks=pytest.mark.slow),
    ],
)
def test_a_process_is_killed_and_the_losses_are_those_without(write, tmp_path, stages, steps, who, returns):
    """The first process is killed, too; who returns has missed many iterations."""
    config = write(stages, steps)
    chaos = [f"step 30: kill {who}", *[f"step 31: restart {who}"] * returns]
    code, said = tell("launch", "--processes", 2 * stages, config, "--run-dir", tmp_path / "killed", "--chaos", *chaos)
    assert code == 0, said
    code, _ = tell("train", config, "--run-dir", tmp_path / "whole")
    assert code == 0
    killed, whole = (read_run(tmp_path / name).metrics for name in ("killed", "whole"))
    assert [record["step"] for record in killed] == list(range(1, steps + 1))
    np.testing.assert_allclose([r["loss"] for r in killed], [r["loss"] for r in whole], rtol=1e-8)
    live = [count for count, _ in itertools.groupby(record["live_workers"] for record in killed)]
    assert live == [2 * stages, 2 * stages - 1, *[2 * stages] * returns]
    assert re.findall(r"process (\S+) died \((.*)\)", said) == [(who, "signal 9")]
    assert left_behind(config) == []


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_behind(write):
    config = write(1, 10**6)
    with launched(config) as process:
        wait_for(process, "goes on")
        assert len(left_behind(config)) == 2
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 130
    assert "Traceback" not in rest
    assert left_behind(config) == []


def test_processes_end_with_their_supervisor(write):
    config = write(1, 10**6)
    with launched(config) as process:
        wait_for(process, "form")
        assert len(left_behind(config)) == 2
    deadline = time.monotonic() + 10
    while left_behind(config) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind(config) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--processes", "3"], "--processes = 3: must be 2"),
        (["--processes", "2", "--chaos", "step 3: kill 2:0"], "--chaos"),
        (["--processes", "2", "--set", "Experiment.eval_every=5"], "Experiment.eval_every = 5: must be 0"),
        (["--processes", "2", "--set", "Experiment.failures=['step 3: fail 1:0']"], "Experiment.failures"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_starts(write, tmp_path, arguments, told):
    code, said = tell("launch", write(1, 5), "--run-dir", tmp_path / "run", *arguments)
    assert code == 2
    assert told in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()
    assert Path(tmp_path / "kill.gin").exists()
