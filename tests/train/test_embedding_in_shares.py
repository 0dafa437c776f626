"""Runs with the sharded embedding: losses, checkpoints that any other ranks read, and what comes of them."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.reader import plan_restore
from swift.config.experiment import Experiment
from swift.experts.config import ExpertConfig, SlotCapacity
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement.policy import Static
from swift.hub.exporting import find_checkpoint, load_weights
from swift.mesh.live import storage_mesh
from swift.models.config import ModelConfig
from swift.models.reference_model import plain_logits
from swift.topology import Topology
from swift.train.build import make_step_spec
from swift.train.saved_state import load_state
from tests.train.runs import run

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("double_precision")]
SAVED, LAST = 5, 10


@pytest.fixture(scope="module")
def experiment(corpus):
    """Three ranks, which do not divide the vocabulary nor the learned positions; nothing is dropped."""
    return Experiment(
        model=ModelConfig(num_layers=1, model_dim=10, num_heads=2, ffn_dim=9, sequence_length=7, moe_pattern=(True,)),
        experts=ExpertConfig(4, slots_per_rank=4, capacity=SlotCapacity(None)),
        topology=Topology(1, 1, 3),
        data=corpus,
        optimizer=OptimizerConfig(warmup_steps=2, peak_learning_rate=1e-2),
        compute_dtype="float64",
        embedding="sharded",
        num_steps=LAST,
        num_microbatches=2,
        sequences_per_microbatch=6,
        eval_every=LAST,
        num_eval_batches=1,
        checkpoint=CheckpointConfig(every=SAVED, num_kept=5),
    )


@pytest.fixture(scope="module")
def runs(experiment, tmp_path_factory):
    """The records of the run with a sharded embedding, and of that with a replicated one."""
    directory = tmp_path_factory.mktemp("runs")
    return {way: run(replace(experiment, embedding=way), directory / way) for way in ("sharded", "replicated")}


def half(record, tmp_path):
    """The directory of the same run, ended at its first checkpoint."""
    copy = shutil.copytree(record.path, tmp_path / "half")
    shutil.rmtree(copy / f"checkpoints/step-{LAST:08d}")
    (copy / "summary.json").unlink()
    return copy


def assert_alike(one, other):
    losses, others = ([step["loss"] for step in record.metrics] for record in (one, other))
    np.testing.assert_allclose(losses, others, rtol=1e-9)
    assert [step["popularity"] for step in one.metrics] == [step["popularity"] for step in other.metrics]


def test_losses_are_those_of_a_whole_embedding(runs):
    assert_alike(runs["sharded"], runs["replicated"])
    validation = [record.metrics[-1]["validation_loss"] for record in runs.values()]
    np.testing.assert_allclose(*validation, rtol=1e-9)


def whole_state(experiment, directory):
    """Master weights, and everything else that is saved, as a plain model would have it."""
    spec = make_step_spec(experiment, storage_mesh(experiment.topology))
    state = load_state(directory / "checkpoints", plan_restore(directory / "checkpoints", None, SAVED), spec)
    whole = {"master": spec.gather_master_weights(state)}
    for name in ("mu", "nu"):
        (moments,) = [getattr(part, name) for part in state.moments if hasattr(part, name)]
        whole[name] = spec.gather_master_weights(replace(state, master=moments))
    return whole


@pytest.mark.parametrize(
    ("saved", "read"),
    [
        ("sharded", {"embedding": "replicated"}),
        ("replicated", {}),
        pytest.param("sharded", {"topology": Topology(1, 1, 2)}, marks=pytest.mark.slow),
        pytest.param("sharded", {"topology": Topology(1, 1, 1)}, marks=pytest.mark.slow),
        pytest.param("sharded", {"topology": Topology(1, 1, 2), "embedding": "replicated"}, marks=pytest.mark.slow),
        pytest.param("replicated", {"topology": Topology(2, 1, 2), "num_microbatches": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_checkpoint_is_read_by_any_ranks_and_either_way(experiment, runs, tmp_path, saved, read):
    directory = half(runs[saved], tmp_path)
    writer, reader = replace(experiment, embedding=saved), replace(experiment, **read)
    before, after = (whole_state(one, directory) for one in (writer, reader))
    for kind, groups in before.items():
        for name, values in groups.items():
            np.testing.assert_array_equal(values, after[kind][name], err_msg=f"{kind} of {name}")
    assert np.abs(before["nu"]["embedding"]).max() > 0
    assert_alike(run(reader, directory, resume=True), runs["replicated"])


def test_the_placement_stays_where_only_the_embedding_is_laid_out_otherwise(experiment, runs):
    checkpoints = runs["sharded"].path / "checkpoints"
    states = []
    for way in ("sharded", "replicated"):
        spec = make_step_spec(replace(experiment, embedding=way), storage_mesh(experiment.topology))
        states.append(load_state(checkpoints, plan_restore(checkpoints, None, SAVED), spec))
    np.testing.assert_array_equal(states[0].placement, states[1].placement)
    np.testing.assert_array_equal(states[0].step, states[1].step)


@pytest.mark.slow
def test_with_state_tied_to_slots(experiment, tmp_path):
    """The layout ``coupled``, whose experts stay as they are when the embedding is read the other way."""
    tied = {"optimizer": replace(experiment.optimizer, layout="coupled"), "placement": Static()}
    tied |= {"experts": ExpertConfig(6, slots_per_rank=2, capacity=SlotCapacity(None))}
    setup = replace(experiment, **tied)
    first = run(setup, tmp_path / "run")
    assert_alike(run(replace(setup, embedding="replicated"), half(first, tmp_path), resume=True), first)


def test_an_exported_model_looks_up_all_rows(experiment, runs):
    logits = []
    for way, record in runs.items():
        one = replace(experiment, embedding=way)
        gpt, weights = load_weights(one, record.path, find_checkpoint(one, record.path, None))
        tokens = np.arange(7, dtype=np.int32)[None] * 31
        logits.append(plain_logits(gpt, one.experts, weights, tokens))
    np.testing.assert_allclose(*logits, rtol=1e-8)
