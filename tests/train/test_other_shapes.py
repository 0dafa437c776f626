"""A run that continues with other ranks, slots, stages or pipelines than those that it was saved with."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.manifest import read_manifest
from swift.checkpoint.reader import plan_restore
from swift.config.experiment import Experiment
from swift.errors import SettingError
from swift.experts.config import ExpertConfig, SlotCapacity
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement.policy import Static
from swift.mesh.live import storage_mesh
from swift.models.config import ModelConfig
from swift.topology import Topology
from swift.train.build import make_step_spec
from swift.train.saved_state import load_state
from tests.train.runs import run

pytestmark = pytest.mark.usefixtures("double_precision")
SAVED, LAST = 10, 20
CLASSES = 6


@pytest.fixture(scope="module")
def experiment(corpus):
    """Eight ranks, two layers of six experts that drop nothing; experts' numbers do not divide evenly by any rank."""
    return Experiment(
        model=ModelConfig(num_layers=2, model_dim=12, num_heads=2, ffn_dim=9, sequence_length=8, moe_pattern=(True,)),
        experts=ExpertConfig(CLASSES, slots_per_rank=2, capacity=SlotCapacity(None), aux_loss_coefficient=1e-2),
        topology=Topology(1, 1, 8),
        data=corpus,
        optimizer=OptimizerConfig(warmup_steps=4, peak_learning_rate=1e-2),
        compute_dtype="float64",
        num_steps=LAST,
        num_microbatches=2,
        sequences_per_microbatch=8,
        eval_every=0,
        checkpoint=CheckpointConfig(every=SAVED, num_kept=5),
    )


def on(experiment, pipelines, stages, ranks, slots=None):
    """The same experiment elsewhere: as many micro-batches in all."""
    total = experiment.topology.num_pipelines * experiment.num_microbatches
    slots = slots or experiment.experts.slots_per_rank
    experts = replace(experiment.experts, slots_per_rank=slots)
    topology = Topology(pipelines, stages, ranks)
    return replace(experiment, topology=topology, num_microbatches=total // pipelines, experts=experts)


@pytest.fixture(scope="module")
def whole(experiment, tmp_path_factory):
    """The record of the run that stays where it is."""
    return run(experiment, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def half(whole, tmp_path):
    """The directory of the same run, ended after iteration 10."""
    copy = shutil.copytree(whole.path, tmp_path / "half")
    shutil.rmtree(copy / f"checkpoints/step-{LAST:08d}")
    (copy / "summary.json").unlink()
    return copy


def numbers(experiment, directory, step):
    """Master weights and moments as whole classes, by group: what a plain model would have."""
    spec, checkpoints = make_step_spec(experiment, storage_mesh(experiment.topology)), directory / "checkpoints"
    state = load_state(checkpoints, plan_restore(checkpoints, experiment.identity(), step), spec)
    moments = jax.tree.leaves(state.moments, is_leaf=lambda part: isinstance(part, dict))

    def classes(name, slices):
        used = {"embedding": slices[:1], "head": slices[-1:]}.get(name, slices)
        return np.concatenate([spec.layouts[name].classes(of_stage, None) for of_stage in used])

    return [
        {name: classes(name, slices) for name, slices in tree.items()}
        for tree in (state.master, *moments)
        if isinstance(tree, dict)
    ]


ELSEWHERE = [
    pytest.param((1, 1, 6), id="8 to 6 ranks, among which 8 sequences are not even", marks=pytest.mark.long),
    pytest.param((2, 2, 3), id="2 pipelines of 2 stages", marks=pytest.mark.slow),
    pytest.param((1, 1, 4), id="8 to 4 ranks", marks=pytest.mark.slow),
    pytest.param((1, 1, 8, 3), id="3 slots", marks=pytest.mark.slow),
    pytest.param((2, 1, 3), id="2 pipelines", marks=pytest.mark.slow),
    pytest.param((1, 2, 4), id="2 stages", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("shape", ELSEWHERE)
def test_a_run_goes_on_elsewhere_and_its_loss_is_that_of_the_run_that_stays(experiment, whole, half, shape):
    elsewhere = on(experiment, *shape)
    before, after = (numbers(setup, half, SAVED) for setup in (experiment, elsewhere))
    assert len(before) == 3
    for mine, theirs in zip(before, after, strict=True):
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name])
            assert name == "router" or np.abs(mine[name]).max() > 0
    record = run(elsewhere, half, resume=True)
    distance = np.abs([m["loss"] / w["loss"] - 1 for m, w in zip(record.metrics, whole.metrics, strict=True)])
    assert distance[:SAVED].max() == 0
    assert distance[SAVED:].max() < 1e-8
    assert [step["popularity"] for step in record.metrics] == [step["popularity"] for step in whole.metrics]
    newest = read_manifest(half / f"checkpoints/step-{LAST:08d}", "checkpoint")
    assert newest.ledger.tally.plt == 0


@pytest.mark.slow
def test_it_goes_on_elsewhere_again_and_comes_back(experiment, whole, half):
    for ranks, last in ((4, 13), (6, 16), (8, None)):
        record = run(on(experiment, 1, 1, ranks), half, resume=True, stop_at=last)
    distance = np.abs([m["loss"] / w["loss"] - 1 for m, w in zip(record.metrics, whole.metrics, strict=True)])
    assert 0 < distance.max() < 1e-8


def test_the_first_partial_checkpoint_elsewhere_is_full(experiment, half):
    partial = replace(experiment.checkpoint, every=2, experts_per_layer=1)
    run(on(replace(experiment, checkpoint=partial), 1, 1, 4), half, resume=True, stop_at=15)
    saved = [read_manifest(half / f"checkpoints/step-{step:08d}", "checkpoint") for step in (12, 14)]
    assert [manifest.is_full for manifest in saved] == [True, False]


def test_every_class_keeps_its_share_of_the_slots(experiment, half):
    """Shares as near as fewer slots allow: the class that had most has most, and more than an even share."""
    setup = on(experiment, 1, 1, 4)
    checkpoints = half / "checkpoints"
    plan = plan_restore(checkpoints, step=SAVED)
    before = load_state(checkpoints, plan, make_step_spec(experiment, storage_mesh(experiment.topology)))
    after = load_state(checkpoints, plan, make_step_spec(setup, storage_mesh(setup.topology)))
    for old, new in zip(before.placement[0], after.placement[0], strict=True):
        had, has = (np.bincount(placement.ravel(), minlength=CLASSES) for placement in (old, new))
        assert has.min() >= 1
        assert has.sum() == 8
        assert has[had.argmax()] == has.max() > 8 / CLASSES + 1


def test_state_that_is_tied_to_places_stays_there(experiment, tmp_path):
    """The baselines' layout."""
    tied = replace(
        experiment,
        optimizer=replace(experiment.optimizer, layout="coupled"),
        experts=replace(experiment.experts, num_classes=4),
        placement=Static(),
        topology=Topology(1, 1, 4),
        checkpoint=CheckpointConfig(every=2),
    )
    run(tied, tmp_path / "run", stop_at=2)
    with pytest.raises(SettingError, match="is of another model: its Topology is"):
        run(on(tied, 1, 1, 2), tmp_path / "run", resume=True)
