"""Runs whose master weights and moments are in host memory between updates, next to the same in device memory."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from swift.checkpoint.config import CheckpointConfig
from swift.config.checks import check
from swift.config.experiment import Experiment
from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.routers import TopK
from swift.mesh.live import LiveMesh
from swift.models.config import ModelConfig
from swift.pipeline.reconfigure.compiled_steps import Steps
from swift.runlog.reading import read_run
from swift.topology import Topology
from swift.train.build import make_step_spec
from tests.case_tiers import tiered
from tests.train.runs import measured, run

pytestmark = pytest.mark.usefixtures("double_precision")
MODEL = ModelConfig(num_layers=4, model_dim=8, num_heads=2, ffn_dim=9, sequence_length=8, moe_pattern=(False, True))
LAST = 6


@pytest.fixture(scope="module")
def experiment(corpus):
    """A worker of two ranks with two layers of each kind; matrices alone decay, and routers have biases."""
    return Experiment(
        model=MODEL,
        experts=ExpertConfig(num_classes=3, slots_per_rank=3, router=TopK(bias_update_rate=1e-3)),
        topology=Topology(num_expert_ranks=2),
        data=corpus,
        optimizer=OptimizerConfig(warmup_steps=2, peak_learning_rate=1e-2, decayed="matrices"),
        compute_dtype="float64",
        num_steps=LAST,
        num_microbatches=2,
        sequences_per_microbatch=4,
        eval_every=3,
        num_eval_batches=1,
        checkpoint=CheckpointConfig(every=0),
    )


def in_host_memory(experiment):
    return replace(experiment, optimizer=replace(experiment.optimizer, memory="pinned_host"))


def kinds_of(tree):
    return {leaf.sharding.memory_kind for leaf in tree}


@pytest.fixture
def kinds(monkeypatch):
    """Memories that the arrays of every state before iterations are in: of slices, and of slots."""
    found, start = set(), Steps.start

    def noting(steps, state, *batches):
        slices = [*state.master.values(), *(leaf for leaf in jax.tree.leaves(state.moments) if leaf.ndim > 2)]
        found.update(("slices", kind) for kind in kinds_of(slices))
        found.update(("slots", kind) for kind in kinds_of(state.slots.values()))
        return start(steps, state, *batches)

    monkeypatch.setattr(Steps, "start", noting)
    return found


CASES = {
    "one worker": {},
    "state tied to slots": {"placement": FlexMoE(1), "layout": "coupled"},
    "a lost rank": {
        "topology": Topology(num_expert_ranks=3),
        "failures": ("step 3: fail 0:0 rank 1", "step 5: rejoin 0:0 rank 1"),
        "checkpoint": CheckpointConfig(every=0, snapshot_every=1),
    },
    "windows, and a worker that is lost and returns": {
        "topology": Topology(2, 2),
        "window": 2,
        "failures": ("step 3: fail 1:1", "step 5: rejoin 1:1"),
    },
}


QUICK, LONG = ("one worker",), ("state tied to slots",)
"""Those with failures are slow: each is one more program to compile, with either memory."""


@pytest.mark.parametrize("changes", tiered(CASES, QUICK, LONG))
def test_memory_changes_no_number(changes, experiment, tmp_path, kinds):
    """Beyond rounding: XLA compiles the update of a layer in a loop to other instructions than that of all at once."""
    settings = dict(changes)
    optimizer = replace(experiment.optimizer, layout=settings.pop("layout", "decoupled"))
    on_device = replace(experiment, optimizer=optimizer, **settings)
    expected = measured(run(on_device, tmp_path / "device"))
    assert kinds == {("slices", "device"), ("slots", "device")}
    kinds.clear()
    found = measured(run(in_host_memory(on_device), tmp_path / "host"))
    assert kinds == {("slices", "pinned_host"), ("slots", "device")}
    assert len(found) == len(expected) == LAST
    for one, other in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "tokens_dropped", "learning_rate"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-12)


@pytest.mark.parametrize("first", [pytest.param("device", marks=pytest.mark.long), "pinned_host"])
def test_a_run_is_resumed_with_the_other_memory(first, experiment, tmp_path):
    saving = replace(experiment, checkpoint=CheckpointConfig(every=2))
    whole = measured(run(saving, tmp_path / "whole"))
    memories = (saving, in_host_memory(saving)) if first == "device" else (in_host_memory(saving), saving)
    run(memories[0], tmp_path / "parts", stop_at=4)
    run(memories[1], tmp_path / "parts", resume=True)
    parts = measured(read_run(tmp_path / "parts"))
    np.testing.assert_allclose([step["loss"] for step in parts], [step["loss"] for step in whole], rtol=1e-12)


def test_devices_without_such_memory_are_refused(experiment, monkeypatch):
    monkeypatch.setattr(LiveMesh, "memory_kinds", frozenset({"device"}))
    make_step_spec(experiment)
    told = r"OptimizerConfig\.memory = 'pinned_host': is not a memory of these devices, which have device: use device"
    with pytest.raises(SettingError, match=told):
        make_step_spec(in_host_memory(experiment))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ranks": "virtual"}, "needs Experiment.ranks"),
        ({"topology": Topology(2, 2), "adapt": "recut"}, "needs Experiment.adapt = 'reroute'"),
        ({"topology": Topology(2, 2), "cut": ((1, 3), (3, 1))}, "needs one run of layers per worker"),
    ],
    ids=["virtual", "recut", "unequal"],
)
def test_what_is_not_possible_is_refused(changes, told, experiment):
    with pytest.raises(SettingError, match=rf"OptimizerConfig\.memory = 'pinned_host': {told}"):
        check(replace(in_host_memory(experiment), **changes))


def test_arrays_that_belong_to_no_group_are_refused(experiment):
    """An optimizer may have a state of any form; one array for all groups has no layer to bring in."""

    class Own:
        name = "flat"

        def make(self, learning_rate):
            del learning_rate

            def init(params):
                return next(iter(params.values()))

            return optax.GradientTransformation(init, lambda updates, state, _=None: (updates, state))

    flat = replace(experiment, optimizer=OptimizerConfig(transformation=Own(), warmup_steps=2))
    make_step_spec(flat)
    with pytest.raises(SettingError, match=r"OptimizerConfig\.memory = 'pinned_host': needs an optimizer whose arrays"):
        make_step_spec(in_host_memory(flat))
