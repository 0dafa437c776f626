"""Runs with exact capacity: nothing is dropped, whichever ranks are there, so that no loss depends on them."""

from dataclasses import replace

import numpy as np
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.config.experiment import Experiment
from swift.experts.config import ExactCapacity, ExpertConfig, SlotCapacity
from swift.experts.optimizer import OptimizerConfig
from swift.models.config import ModelConfig
from swift.topology import Topology
from tests.train.runs import run

pytestmark = [pytest.mark.usefixtures("double_precision"), pytest.mark.slow]


@pytest.fixture(scope="module")
def experiment(corpus):
    """Three ranks with three slots each, for seven experts."""
    return Experiment(
        model=ModelConfig(num_layers=1, model_dim=12, num_heads=2, ffn_dim=9, sequence_length=8, moe_pattern=(True,)),
        experts=ExpertConfig(num_classes=7, slots_per_rank=3, capacity=ExactCapacity(), top_k=2),
        topology=Topology(1, 1, 3),
        data=corpus,
        optimizer=OptimizerConfig(warmup_steps=4, peak_learning_rate=1e-2),
        compute_dtype="float64",
        num_steps=10,
        num_microbatches=2,
        sequences_per_microbatch=6,
        eval_every=0,
        checkpoint=CheckpointConfig(every=5),
    )


@pytest.fixture(scope="module")
def dropless(experiment, tmp_path_factory):
    """The run on one rank that computes every token by the experts as they are."""
    alone = replace(
        experiment,
        experts=replace(experiment.experts, capacity=SlotCapacity(None), slots_per_rank=7),
        topology=Topology(1, 1, 1),
    )
    return run(alone, tmp_path_factory.mktemp("alone") / "run")


def assert_same(record, dropless):
    loss, expected = ([step["loss"] for step in one.metrics] for one in (record, dropless))
    np.testing.assert_allclose(loss, expected, rtol=1e-8)
    assert not any(step["tokens_dropped"] for step in record.metrics)


def test_a_run_computes_every_token_and_goes_on_on_other_ranks(experiment, dropless, tmp_path):
    run(experiment, tmp_path / "run", stop_at=5)
    fewer = replace(experiment, topology=Topology(1, 1, 2), experts=replace(experiment.experts, slots_per_rank=4))
    assert_same(run(fewer, tmp_path / "run", resume=True), dropless)


def test_a_lost_rank_changes_nothing(experiment, dropless, tmp_path):
    config = CheckpointConfig(every=5, snapshot_every=1)
    losing = replace(experiment, failures=("step 4: fail 0:0 rank 1", "step 8: rejoin 0:0 rank 1"), checkpoint=config)
    assert_same(run(losing, tmp_path / "run"), dropless)
