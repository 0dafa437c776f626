"""Pipelines from the command line: refused in one line, ended by the death of a stage, interrupted, resumed."""

import os
import signal
import subprocess
import sys
from functools import partial

import jax
import pytest

from swift.checkpoint.manifest import checkpoint_steps
from swift.cli import train
from swift.runlog.reading import read_run

PIPELINES = """
include 'tiny.gin'
ModelConfig.moe_pattern = (True,)
Topology.num_pipelines = 2
Topology.num_stages = 2
Topology.num_expert_ranks = 1
Experiment.num_microbatches = 2
"""


@pytest.fixture(autouse=True)
def pipelines(here):
    """tiny.gin on two pipelines of two stages, in the working directory."""
    (here / "pipelines.gin").write_text(PIPELINES)


def options(*settings):
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ["Topology.num_stages=4"],
            "Topology.num_stages = 4: must be at most ModelConfig.num_layers = 2: every stage needs a layer",
        ),
        (
            ["Experiment.cut=(2, 1)"],
            "Experiment.cut = (2, 1): must sum to ModelConfig.num_layers = 2, not 3",
        ),
        (
            ["Experiment.cut=((1, 1), (2, 1))"],
            "Experiment.cut[1] = (2, 1): must sum to ModelConfig.num_layers = 2, not 3",
        ),
        (
            ["Experiment.microbatches=(1, 4)"],
            "Experiment.microbatches = (1, 4): must sum to 2 times Experiment.num_microbatches = 2, not 5",
        ),
        (
            ["Experiment.failures=['step 2: fail 0:0', 'step 3: fail 1:0']"],
            "Experiment.failures = 'step 3: fail 1:0': leaves stage 0 without a live worker",
        ),
        (
            [
                "Experiment.window=3",
                "CheckpointConfig.every=0",
                "Experiment.failures=['step 2: fail 0:0', 'step 3: rejoin 0:0', 'step 4: fail 1:0']",
            ],
            "Experiment.failures = 'step 4: fail 1:0': may leave stage 0 without a live worker: in a window of "
            "Experiment.window = 3 iterations, what fails is down from the start, and what rejoins is back after the "
            "end",
        ),
        (
            ["Experiment.failures=step 2: fail 0:0"],
            "Experiment.failures = 'step 2: fail 0:0': must be a list, each item a text",
        ),
        (
            ["OptimizerConfig.layout=coupled"],
            "OptimizerConfig.layout = 'coupled': runs with one pipeline of one stage only, and the topology has (2, 2)"
            ": use decoupled",
        ),
        (
            ["Experiment.planner=magic"],
            "Experiment.planner = 'magic': choose one of adaptive, lockstep, milp, gpipe, one_f_one_b, zero_bubble, v",
        ),
        (
            ["Experiment.ranks=virtual"],
            "Experiment.ranks = 'virtual': needs one pipeline of one stage, the topology has (2, 2)",
        ),
        (
            ["Experiment.memory_limit=1"],
            "Experiment.memory_limit = 1: must be at least 1.157, which a single micro-batch takes with its message "
            "and while B runs",
        ),
        (
            ["Experiment.ranks=devices", "Topology.num_pipelines=9"],
            "Topology.num_expert_ranks = 1: 18 worker(s) with that many ranks need 18 devices and there are 12; "
            "use fewer, or ranks 'emulated' or 'virtual'",
        ),
    ],
    ids=lambda value: value.split(" = ")[0] if isinstance(value, str) else None,
)
def test_pipelines_that_cannot_run_are_told_and_nothing_is_written(refusal, settings, line):
    assert refusal("train", "pipelines.gin", *options(*settings)) == line


class StageDies:
    """A worker goes before iteration 2, and before iteration 4 the last one of its stage."""

    def failed(self, first_step, last_step):  # noqa: ARG002 - a window of one iteration
        return frozenset([(0, 0)][: first_step >= 2] + [(1, 0)][: first_step >= 4])

    def lost_ranks(self, first_step, last_step):  # noqa: ARG002 - there are peers
        return frozenset()


@pytest.mark.slow
def test_a_stage_that_dies_exits_with_3_and_says_how_to_go_on(tell, here, monkeypatch):
    one_stage = options("Topology.num_stages=1")  # compiles in a third of the time
    with monkeypatch.context() as patch:
        patch.setattr(train, "run_training", partial(train.run_training, failures=StageDies()))
        told = tell("train", "pipelines.gin", "--run-dir", "new", "--prepare", "none", *one_stage)
    assert told.code == 3, told.err
    assert "Traceback" not in told.err
    assert told.err.splitlines()[-1] == (
        "swift: stage 0 has no live worker left at iteration 4: stopped; the checkpoint of iteration 2 is kept; "
        "continue with --run-dir new --resume and an Experiment.failures that leaves it one"
    )
    assert [event["event"] for event in read_run(here / "new").events][-1] == "stage_lost"
    told = tell("train", "pipelines.gin", "--run-dir", "new", "--resume", "--prepare", "none", *one_stage)
    assert told.code == 0, told.err
    assert [record["step"] for record in read_run(here / "new").metrics] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_ctrl_c_ends_the_process_though_programs_are_compiled_ahead(here):
    settings = options(
        "Experiment.num_steps=100000",
        "CheckpointConfig.every=0",
        "Experiment.window=3",
        "OptimizerConfig.clip_norm=None",
    )
    command = [sys.executable, "-m", "swift", "train", "pipelines.gin", "--run-dir", "new", *settings]
    cache = {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    with subprocess.Popen(
        command, cwd=here, env=os.environ | cache, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        while "step 1/" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=300) == 130
    assert "Traceback" not in rest
    assert "interrupted after iteration" in rest
    run = read_run(here / "new")
    last = run.events[-1]
    assert last["event"] == "interrupt"
    assert [record["step"] for record in run.metrics] == [*range(1, last["step"] + 1)]
    assert last["step"] % 3 == 0
    assert checkpoint_steps(here / "new/checkpoints") == [last["step"]]
