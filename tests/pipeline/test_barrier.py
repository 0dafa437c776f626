"""Barriers before updates, where all devices take part in a sum: over unequal peers (TPU), or of tied embeddings."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

from swift.config.experiment import Experiment
from swift.data.windows import Batch
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.models.config import ModelConfig
from swift.pipeline.step import spec as program_module
from swift.pipeline.step.train_step import barrier_step
from swift.topology import Topology
from swift.train.build import make_engine

pytestmark = pytest.mark.usefixtures("x64")

SETUP = Experiment(
    model=ModelConfig(2, 16, 2, 16, 8, (True,)),
    experts=ExpertConfig(4, 4),
    topology=Topology(3, 2),
    optimizer=OptimizerConfig(clip_norm=None, warmup_steps=0),
    compute_dtype="float64",
    num_microbatches=2,
    sequences_per_microbatch=2,
    window=2,
    num_steps=20,
)


def draw_batches(count):
    tokens = np.random.default_rng(0).integers(0, 256, (count, 6, 2, 9), dtype=np.int32)
    return [Batch(t[..., :-1], t[..., 1:], np.ones((6, 2, 8), bool)) for t in tokens]


def two_steps():
    """(what a window with a lost worker comes to, the program that most iterations need)."""
    engine, batches = make_engine(SETUP, frozenset({(1, 0)}), "none"), draw_batches(2)
    state = engine.spec.init(jax.random.key(0))
    outcome = engine.start(state, batches, engine.put(batches))()
    return outcome, engine.spec.gather_master_weights(outcome.state), engine.steps.main


@pytest.mark.slow
def test_a_window_with_a_barrier_does_what_one_without_does(monkeypatch):
    staggered, weights, kind = two_steps()
    assert (kind, staggered.was_discarded) == ("window", False)
    monkeypatch.setattr(program_module, "reduction_for_unequal_groups", lambda _: "tree")
    outcome, along_tree, kind = two_steps()
    assert (kind, outcome.was_discarded) == ("single", False)
    chex.assert_trees_all_close(along_tree, weights, rtol=1e-12, atol=1e-14)
    for one, other in zip(outcome.metrics, staggered.metrics, strict=True):
        chex.assert_trees_all_close(one, other, rtol=1e-12)


def test_equal_peers_need_no_barrier(monkeypatch):
    monkeypatch.setattr(program_module, "reduction_for_unequal_groups", lambda _: "tree")
    engine = make_engine(replace(SETUP, topology=Topology(2, 2)), frozenset(), "none")
    assert engine.steps.main == "window"


TIED = [
    {"topology": (2, 3, 1), "failed": [(0, 2)]},
    {"topology": (2, 3, 2), "failed": [(1, 0)], "pattern": (False, True)},
    {"topology": (2, 2, 1), "pattern": (True,) * 4, "cut": (1, 1, 1, 1), "held_by": ((0, 1, 1, 0), (0, 1, 0, 1))},
]


@pytest.mark.parametrize("case", [TIED[0], *(pytest.param(case, marks=pytest.mark.slow) for case in TIED[1:])], ids=str)
def test_embeddings_that_first_and_last_stage_share(rig, case):
    """Two iterations of the plain model, with clipped gradients; then all workers have the same embedding."""
    one = rig(**case, decoder="tied", window=1, clip_norm=0.4)
    drawn = one.draw(0, num_batches=2)
    expected, params, _ = one.plain(drawn)
    step, state = barrier_step(one.spec, one.table, keep_state=True), one.start(drawn)
    for batch, iteration in zip(drawn.batches, expected, strict=True):
        state, metrics = step(state, *one.put_table(one.table), one.put_batches([batch], one.table))
        one.check_metrics(metrics, [iteration])
    one.check_params(state, params, 1e-8)
    for held in (state.master, state.slots):
        of_workers = np.asarray(held["embedding"])
        np.testing.assert_array_equal(of_workers, np.broadcast_to(of_workers[:1], of_workers.shape))


def test_a_table_of_two_stages_needs_a_barrier():
    tied = replace(SETUP, model=replace(SETUP.model, tied_embeddings=True))
    assert make_engine(tied, frozenset(), "none").steps.main == "single"
    assert make_engine(replace(tied, topology=Topology(2, 1)), frozenset(), "none").steps.main == "window"
