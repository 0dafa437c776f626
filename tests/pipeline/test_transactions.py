"""A window counts as a whole or not at all: what comes out is, bit for bit, what iterations with a barrier give."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from swift.train.build import make_engine
from tests.compiling import compiled_as_in_a_run

CLIP_NORM = 1.0
CALM, WILD = 0.1, 1.0
"""Scales of parameters whose gradients are never, and always, longer than the clip."""


class Run(NamedTuple):
    """A window of three iterations, run both ways."""

    window: Any  # an ``Outcome``
    singles: Any  # (state, metrics) of one iteration after the other
    before: Any  # the state that the window was given, on the host
    after: Any  # the same arrays, when the window had been run; None where they were given up


LOST = {"failed": [(0, 1)]}
# A lone iteration of this shape is planned otherwise than one of a window: its Ws would be summed in another order.
WHOLE = {"topology": (2, 3, 1), "microbatches": 6}


SLOW = [pytest.param(("float32", case), marks=pytest.mark.slow) for case in (WHOLE, LOST)]


@pytest.fixture(scope="module", params=[("float64", LOST), *SLOW], ids=str)
def run(request, rig):
    """Runs a window both ways, given the scale of the parameters and what else is done to the state."""
    dtype, case = request.param
    with compiled_as_in_a_run(), jax.enable_x64(dtype == "float64"):
        one = rig(**case, window=3, clip_norm=CLIP_NORM, dtype=dtype)
        with make_engine(one.experiment, one.case.failed, "none") as engine:

            def both(scale, change=lambda state: state):
                drawn = one.draw(0, scale=scale)
                state, other = (change(one.start(drawn)) for _ in range(2))
                before = jax.device_get(state)
                window = engine.start(state, drawn.batches, engine.put(drawn.batches))()
                after = None if window.was_discarded else jax.device_get(state)
                singles = []
                for batch in drawn.batches:
                    outcome = engine.start(other, [batch], engine.put([batch]))()
                    assert not outcome.was_discarded
                    other, singles = outcome.state, singles + outcome.metrics
                return Run(window, (other, singles), before, after)

            yield both


def assert_same_bits(found, expected):
    found, expected = (jax.tree_util.tree_leaves_with_path(jax.device_get(tree)) for tree in (found, expected))
    for (path, ours), (_, theirs) in zip(found, expected, strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), path
        assert ours.tobytes() == theirs.tobytes(), (jax.tree_util.keystr(path), np.abs(ours - theirs).max())


def norms(outcome):
    return np.array([metrics["grad_norm"] for metrics in outcome.metrics])


def test_a_window_without_a_clip_counts(run):
    window, singles, before, after = run(CALM)
    assert (norms(window) < CLIP_NORM).all()
    assert not window.was_discarded
    assert_same_bits((window.state, window.metrics), singles)
    assert_same_bits(after, before)
    assert set(np.asarray(window.state.step).tolist()) == {3}


def test_a_window_with_a_clip_is_run_again(run):
    window, singles, *_ = run(WILD)
    assert (norms(window) > CLIP_NORM).all()
    assert window.was_discarded
    assert_same_bits((window.state, window.metrics), singles)


def test_a_window_with_a_gradient_that_is_not_finite_is_run_again(run):
    """A first moment so large that the first update leaves parameters whose gradients overflow."""

    def disturb(state):
        (mu,) = (value for _, value in optax.tree.get_all_with_path(state.moments, "mu"))
        huge = float(jnp.finfo(jax.tree.leaves(mu)[0].dtype).max) ** 0.7
        return replace(state, moments=optax.tree.set(state.moments, mu=jax.tree.map(lambda m: m + huge, mu)))

    window, singles, *_ = run(CALM, disturb)
    assert norms(window)[0] < CLIP_NORM
    assert not np.isfinite(norms(window)[1])
    assert window.was_discarded
    assert_same_bits((window.state, window.metrics), singles)
