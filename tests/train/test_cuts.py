"""Stages of unequal layers: a run that another cut of the same layers continues."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.config.experiment import Experiment
from swift.experts.config import ExpertConfig, SlotCapacity
from swift.experts.optimizer import OptimizerConfig
from swift.models.config import ModelConfig
from swift.runlog.reading import read_run
from swift.topology import Topology
from tests.train.runs import run
from tests.train.stored_layers import layers

pytestmark = pytest.mark.usefixtures("double_precision")
SAVED, LAST = 4, 6
PATTERN = (False, True, True, True)


@pytest.fixture(scope="module")
def experiment(corpus):
    """A dense layer and three with experts, which a stage with one and a stage with three hold on two ranks each."""
    return Experiment(
        model=ModelConfig(num_layers=4, model_dim=12, num_heads=2, ffn_dim=9, sequence_length=8, moe_pattern=PATTERN),
        experts=ExpertConfig(num_classes=3, slots_per_rank=2, capacity=SlotCapacity(None), aux_loss_coefficient=1e-2),
        topology=Topology(1, 2, 2),
        data=corpus,
        optimizer=OptimizerConfig(warmup_steps=4, peak_learning_rate=1e-2),
        compute_dtype="float64",
        num_steps=LAST,
        num_microbatches=4,
        sequences_per_microbatch=2,
        cut=(3, 1),
        eval_every=0,
        checkpoint=CheckpointConfig(every=2, num_kept=5, snapshot_every=1),
    )


@pytest.fixture(scope="module")
def whole(experiment, tmp_path_factory):
    """The directory of a run on one pipeline, to the end."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    return run(experiment, directory).path


APART = {
    "topology": Topology(2, 2, 2),
    "num_microbatches": 2,
    "cut": ((1, 3), (2, 2)),
    "microbatches": (1, 3),
    "checkpoint": CheckpointConfig(every=2, num_kept=5),
}
"""Two pipelines that are cut differently, one of which runs most of the same micro-batches."""
TWO_RUNS = {
    "topology": Topology(2, 2, 2),
    "num_microbatches": 2,
    "cut": None,
    "planner": "v",
    "checkpoint": CheckpointConfig(every=2, num_kept=5),
    "failures": ("step 5: fail 0:1", "step 6: rejoin 0:1"),
}
"""Two pipelines whose workers hold two runs of a layer each, one of which is lost for a step."""


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"cut": (1, 3)}, marks=pytest.mark.slow),
        pytest.param(APART, marks=pytest.mark.long),
        pytest.param({**APART, "failures": ("step 5: fail 0:1", "step 6: rejoin 0:1")}, marks=pytest.mark.slow),
        pytest.param(TWO_RUNS, marks=pytest.mark.slow),
    ],
    ids=["cut", "pipelines", "failure", "two runs"],
)
def test_a_run_goes_on_with_another_cut(experiment, whole, tmp_path, changes):
    half = shutil.copytree(whole, tmp_path / "half")
    shutil.rmtree(half / f"checkpoints/step-{LAST:08d}")
    (half / "summary.json").unlink()

    anew = replace(experiment, **changes)
    (before, placed), (after, placed_anew) = (layers(setup, half, SAVED) for setup in (experiment, anew))
    assert len(before) == 3
    for mine, theirs in zip(before, after, strict=True):
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name])
            assert name == "router" or np.abs(mine[name]).max() > 0
    for mine, theirs in zip(placed, placed_anew, strict=True):
        assert sorted(mine.ravel()) == sorted(theirs.ravel())

    was, record = read_run(whole), run(anew, half, resume=True)
    distance = np.abs([m["loss"] / w["loss"] - 1 for m, w in zip(record.metrics, was.metrics, strict=True)])
    assert distance.max() < 1e-8
    assert [step["popularity"] for step in record.metrics] == [step["popularity"] for step in was.metrics]
    for mine, theirs in zip(layers(experiment, whole, LAST)[0], layers(anew, half, LAST)[0], strict=True):
        for name in mine:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-6, atol=1e-10)
