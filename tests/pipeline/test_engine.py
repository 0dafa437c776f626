"""The engine of a run: what it tells of the background, what it forgets, and how many states it keeps."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.config.experiment import Experiment
from swift.data.windows import Batch
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.models.config import ModelConfig
from swift.pipeline.reconfigure import compiled_steps as steps_module
from swift.pipeline.reconfigure.compiled_steps import Steps
from swift.pipeline.reconfigure.configuration import Configurator
from swift.topology import Topology
from swift.train.build import make_engine

ALL, WITHOUT_0, WITHOUT_1 = frozenset(), frozenset({(0, 0)}), frozenset({(1, 0)})
CLIP = 1e-3
"""Smaller than the norm of any gradient, unless it is of no token at all."""


def make_pair(prepare="none", window=1):
    """Two workers, which are each other's peers, and a model without experts."""
    experiment = Experiment(
        model=ModelConfig(1, 64, 2, 64, sequence_length=4, moe_pattern=(False,)),
        experts=ExpertConfig(num_classes=1),
        topology=Topology(2),
        optimizer=OptimizerConfig(warmup_steps=2, clip_norm=CLIP),
        num_steps=20,
        window=window,
        sequences_per_microbatch=1,
    )
    return make_engine(experiment, ALL, prepare)


def make_state(engine):
    """Any state will do that takes no time to compile, in which moments are not negative."""
    spec, random = engine.spec, np.random.default_rng(0)

    def fill(leaf):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return (random.uniform(0, 0.1, leaf.shape) if is_float else np.zeros(leaf.shape)).astype(leaf.dtype)

    host = jax.tree.map(fill, spec.abstract(with_slots=True))
    return jax.block_until_ready(spec.live.put(host, spec.specs))


def batch(*, has_tokens=True):
    tokens_MBT = np.random.default_rng(0).integers(0, 256, (2, 1, 5), np.int32)
    return Batch(tokens_MBT[..., :-1], tokens_MBT[..., 1:], np.full((2, 1, 4), has_tokens))


def trivial(spec, table, **options):
    """A program that costs nothing to compile."""
    del spec, table, options
    return jax.jit(lambda state, *_: (state, {}))


def fails_without_0(function, failed_of, error):
    """The function, but for what belongs to the loss of worker 0:0."""

    def failing(first, *rest, **options):
        if failed_of(first, *rest) == WITHOUT_0:
            raise error
        return function(first, *rest, **options)

    return failing


def break_planner(monkeypatch):
    configure = fails_without_0(Configurator.configure, lambda _, failed: failed, ValueError("out of luck"))
    monkeypatch.setattr(Configurator, "configure", configure)


def break_compiler(monkeypatch):
    step = fails_without_0(steps_module.barrier_step, lambda spec, _: spec.live.failed, RuntimeError("no memory"))
    monkeypatch.setattr(steps_module, "barrier_step", step)


@pytest.mark.parametrize(
    ("break_it", "error", "told"),
    [
        pytest.param(break_planner, ValueError, "with 0:0 down: out of luck", marks=pytest.mark.slow),
        (break_compiler, RuntimeError, "with 0:0 down: no memory"),
    ],
    ids=["planner", "compiler"],
)
def test_what_goes_wrong_in_the_background_is_told_and_the_run_goes_on(monkeypatch, break_it, error, told):
    monkeypatch.setattr(steps_module, "evaluation_step", trivial)
    break_it(monkeypatch)
    with make_pair("next") as engine:
        engine.settle()
        assert engine.background_errors() == [told]
        assert engine.background_errors() == []

        outcome = engine.start(make_state(engine), [batch()], engine.put([batch()]))()
        assert np.isfinite(outcome.metrics[0]["loss"]).all()
        with pytest.raises(error):
            engine.reconfigure(outcome.state, WITHOUT_0)
        state, change = engine.reconfigure(outcome.state, WITHOUT_1)
        assert change.prepared
        outcome = engine.start(state, [batch()], engine.put([batch()]))()
        assert np.isfinite(outcome.metrics[0]["loss"]).all()
        assert engine.configuration.failed == WITHOUT_1


def test_what_is_one_change_away_stays_and_what_is_two_away_is_forgotten(monkeypatch):
    monkeypatch.setattr(steps_module, "barrier_step", trivial)
    with make_pair() as engine:
        state, prepared = make_state(engine), []
        for failed in (ALL, WITHOUT_0, ALL, WITHOUT_0, WITHOUT_1, WITHOUT_0, ALL):
            state, change = engine.reconfigure(state, failed)
            prepared.append(change.prepared)
    assert prepared == [False, False, True, True, False, False, True]


def test_a_window_keeps_two_states_and_only_one_while_it_is_run_again(monkeypatch):
    held: dict[str, list[int]] = {"run_window": [], "run_single": []}

    def held_bytes():
        return sum(array.nbytes for array in jax.live_arrays())

    def watch(name):
        run = getattr(Steps, name)

        def watched(*args):
            results = run(*args)
            held[name].append(held_bytes())
            return results

        monkeypatch.setattr(Steps, name, watched)

    watch("run_window")
    watch("run_single")
    with make_pair(window=2) as engine:
        gc.collect()  # the states of other tests
        rest = held_bytes()
        state = make_state(engine)
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        discarded, after = [], []
        for has_tokens in (False, True, False, True):
            batches = [batch(has_tokens=has_tokens)] * 2
            finish = engine.start(state, batches, engine.put(batches))
            outcome = finish()
            del finish
            state = outcome.state
            discarded.append(outcome.was_discarded)
            after.append(held_bytes())
    assert discarded == [False, True, False, True]

    for bytes_then, num_states in ((held["run_window"], 2), (held["run_single"], 1), (after, 1)):
        counts = [(num_bytes - rest) / state_bytes for num_bytes in bytes_then]
        assert counts == pytest.approx([num_states] * 4, abs=0.1)
