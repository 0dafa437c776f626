"""Barriers before updates, where peers of unequal number can only be summed with all devices (TPU)."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

from swift.data import Batch
from swift.experts import ExpertConfig
from swift.experts.optimizer_config import OptimizerConfig
from swift.models import ModelConfig
from swift.pipeline.runtime import step_spec as program_module
from swift.topology import Topology
from swift.train import Experiment

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
    engine, batches = SETUP.engine(frozenset({(1, 0)}), "none"), draw_batches(2)
    state = engine.spec.init(jax.random.key(0))
    outcome = engine.start(state, batches, engine.put(batches))()
    return outcome, engine.spec.whole_classes(outcome.state), engine.steps.main


@pytest.mark.slow
def test_a_window_with_a_barrier_does_what_one_without_does(monkeypatch):
    staggered, weights, kind = two_steps()
    assert (kind, staggered.was_discarded) == ("window", False)
    monkeypatch.setattr(program_module, "how_unequal", lambda _: "tree")
    outcome, along_tree, kind = two_steps()
    assert (kind, outcome.was_discarded) == ("single", False)
    chex.assert_trees_all_close(along_tree, weights, rtol=1e-12, atol=1e-14)
    for one, other in zip(outcome.metrics, staggered.metrics, strict=True):
        chex.assert_trees_all_close(one, other, rtol=1e-12)


def test_equal_peers_need_no_barrier(monkeypatch):
    monkeypatch.setattr(program_module, "how_unequal", lambda _: "tree")
    engine = replace(SETUP, topology=Topology(2, 2)).engine(frozenset(), "none")
    assert engine.steps.main == "window"
