"""Numbers of layers that no number of stages divides: planned, drawn, run, saved, read by another cut, compiled."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.config.cuts import checkpoint_cut, layer_costs
from swift.config.experiment import Experiment
from swift.config.stored import config_text
from swift.draw.picture import picture_file
from swift.draw.text import draw_chart
from swift.experts.config import ExpertConfig, SlotCapacity
from swift.experts.optimizer import OptimizerConfig
from swift.mesh.live import storage_mesh
from swift.models.config import ModelConfig
from swift.pipeline.reconfigure.configuration import Configurator
from swift.pod_compile.compile import FITS, compile_one
from swift.pod_compile.pods import Pod
from swift.runlog.reading import read_run
from swift.schedules.rules import verify
from swift.topology import Topology
from swift.train.build import make_plan_settings, make_step_spec
from swift.train.emulated import FailedSet
from swift.train.start import TrainOptions
from swift.train.trainer import train
from tests.train.stored_layers import layers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double_precision")]
SAVED, LAST, DEVICES = 2, 4, 12
DEPTHS = [
    pytest.param(7, 4, (3, 4), id="7 on 4"),
    pytest.param(43, 8, (11, 10, 11, 11), id="43 on 8"),
    pytest.param(61, 16, (21, 20, 20), id="61 on 16"),
]
"""Layers, stages, and another cut of them."""


def experiment(corpus, num_layers, num_stages):
    """A dense layer, then layers with experts; one narrow pipeline."""
    pattern = (False, *[True] * (num_layers - 1))
    return Experiment(
        model=ModelConfig(num_layers, 8, 2, 6, sequence_length=4, moe_pattern=pattern),
        experts=ExpertConfig(num_classes=2, slots_per_rank=3, capacity=SlotCapacity(None), aux_loss_coefficient=1e-2),
        topology=Topology(1, num_stages, 1),
        data=corpus,
        optimizer=OptimizerConfig(warmup_steps=2, peak_learning_rate=1e-2),
        compute_dtype="float64",
        num_steps=LAST,
        num_microbatches=3,
        sequences_per_microbatch=2,
        eval_every=0,
        checkpoint=CheckpointConfig(every=SAVED, num_kept=5),
    )


def run(setup, directory, *, resume=False):
    """Trains in this process, or where it has too few devices in another."""
    if setup.topology.num_devices <= DEVICES:
        train(setup, TrainOptions(directory, config_text(setup), prepare="none", resume=resume))
    else:
        assert not resume
        swift("train", setup, directory.parent, "--run-dir", str(directory), "--prepare", "none")


def swift(command, setup, directory, *options):
    """Output of a command that prints an experiment's settings."""
    (directory / "setup.gin").write_text(config_text(setup))
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "", "PYTHONPATH": os.getcwd()}
    arguments = [sys.executable, "-m", "swift", command, str(directory / "setup.gin"), *options]
    return subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment).stdout


def shortest(costs, num_stages, first, last):
    """The shortest longest stage of any cut, which is found from its end."""

    @cache
    def from_(begin, stages):
        begins = first * (begin == 0)
        if stages == 1:
            return begins + sum(costs[begin:]) + last
        ends = range(begin + 1, len(costs) - stages + 2)
        return min(max(begins + sum(costs[begin:end]), from_(end, stages - 1)) for end in ends)

    return from_(0, num_stages)


@pytest.mark.parametrize(("num_layers", "num_stages", "other"), DEPTHS)
def test_any_depth_on_any_number_of_stages(corpus, tmp_path, num_layers, num_stages, other):
    setup = experiment(corpus, num_layers, num_stages)
    sizes = checkpoint_cut(setup).sizes
    assert (sum(sizes), len(sizes), min(sizes) > 0) == (num_layers, num_stages, True)
    check_cut(setup)
    check_plan(setup)

    run(setup, tmp_path / "run")
    assert [len(step["popularity"]) for step in read_run(tmp_path / "run").metrics] == [num_layers - 1] * LAST
    half = shutil.copytree(tmp_path / "run", tmp_path / "half")
    shutil.rmtree(half / f"checkpoints/step-{LAST:08d}")
    (half / "summary.json").unlink()
    anew = replace(setup, topology=Topology(1, len(other), 1), cut=other)
    (before, placed), (after, placed_anew) = (layers(one, half, SAVED) for one in (setup, anew))
    for mine, theirs in zip(before, after, strict=True):
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name])
    np.testing.assert_array_equal(np.sort(placed, axis=None), np.sort(placed_anew, axis=None))
    run(anew, half, resume=True)
    was, record = (read_run(directory) for directory in (tmp_path / "run", half))
    distance = np.abs([m["loss"] / w["loss"] - 1 for m, w in zip(record.metrics, was.metrics, strict=True)])
    assert distance.max() < 1e-8
    assert [step["popularity"] for step in record.metrics] == [step["popularity"] for step in was.metrics]
    assert compiled(setup, tmp_path)["result"] == FITS


def check_cut(setup):
    """The longest stage is as short as it can be."""
    costs, first, last = layer_costs(setup.model, setup.experts, setup.vocab_size)
    ends = [0, *accumulate(checkpoint_cut(setup).sizes)]
    stages = [sum(costs[begin:end]) for begin, end in pairwise(ends)]
    stages[0] += first
    stages[-1] += last
    assert max(stages) == pytest.approx(shortest(costs, len(stages), first, last), rel=1e-6)


def check_plan(setup):
    """The plan of the run is sound, says which layers each worker holds, and can be drawn."""
    settings = make_plan_settings(setup, make_step_spec(setup, storage_mesh(setup.topology)))
    schedule = Configurator(settings).configure(frozenset()).plans[1].schedule
    verify(schedule)
    ends = [0, *accumulate(checkpoint_cut(setup).sizes)]
    for stage, (begin, end) in enumerate(pairwise(ends)):
        assert schedule.problem.runs_of((0, stage)) == ((begin, end),)
    assert f"0:{len(ends) - 2}" in draw_chart(schedule, 120).plain
    assert picture_file(schedule).startswith(b"<?xml")


def compiled(setup, directory: Path):
    """The report of a program for a pod of CPUs."""
    pod = f"cpu:{setup.topology.num_devices}"
    if setup.topology.num_devices <= DEVICES:
        return compile_one(setup, Pod.parse(pod), FailedSet(frozenset(), frozenset()))
    (report,) = json.loads(swift("compile", setup, directory, "--topology", pod, "--format", "json"))["configurations"]
    return report
