"""The largest numbers of each row, in NumPy's order, and found without a sort on CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.experts.routers import TopK
from swift.generate.request import GREEDY, Choices, choose
from swift.largest import largest
from swift.models.vocabulary.lookup import choose_hot_rows

pytestmark = pytest.mark.usefixtures("compiled_well")


def ordered(values):
    """Positions by value, the largest first, of equal ones the first; float32 by bits: -0 < 0 < inf < nan."""
    bits = np.asarray(values, np.float32).view(np.int32).astype(np.int64)
    return np.argsort(-np.where(bits < 0, -(2**31) - 1 - bits, bits), axis=-1, kind="stable")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16, np.int32])
def test_equal_numbers_stay_in_order(dtype):
    random = np.random.default_rng(0)
    drawn = random.choice([-np.inf, -2, -1.5, -0.0, 0.0, 1, 3, np.inf, np.nan], (3, 5, 301))
    drawn = random.integers(-3, 3, drawn.shape) if dtype is np.int32 else drawn
    with jax.enable_x64(dtype is np.float64):
        found, position = jax.jit(largest, static_argnums=1)(jnp.asarray(drawn, dtype), 150)
    expected = ordered(drawn)[..., :150]
    np.testing.assert_array_equal(position, expected)
    np.testing.assert_array_equal(found.astype(np.float32), np.take_along_axis(drawn, expected, axis=-1))
    assert position.dtype == np.int32


def sorted_sizes(function, *args, **options):
    """Lengths of the dims that a program for a CPU sorts."""
    text = jax.jit(function, **options).lower(*args).compile().as_text()
    sorts = re.findall(r"= \(?\w+\[([\d,]*)\].* sort\(.*dimensions=\{(\d+)\}", text)
    assert len(sorts) == len(re.findall(r"\bsort\(", text))
    return [int(shape.split(",")[int(dim)]) for shape, dim in sorts]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA does on a CPU")
def test_choosing_sorts_no_vocabulary():
    logits = jax.ShapeDtypeStruct((16, 4093), jnp.float32)
    choices, allowed = Choices.of([(0, GREEDY, 0)] * 16, 16), np.ones((16, 4093), bool)
    for mask in (None, allowed):
        assert sorted_sizes(lambda x, y, mask=mask: choose(x, y, mask, num_candidates=64), logits, choices) == []


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA does on a CPU")
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_routing_sorts_no_experts(scores):
    def gates(logits_TE, bias_E):
        routing = TopK(scores).choose(logits_TE, 6, bias_E)
        return routing.gates_TK[:, 0].sum() * routing.probs_TE.sum(), routing.choices_TK[:, :1]

    logits, bias = jax.ShapeDtypeStruct((512, 60), jnp.float32), jax.ShapeDtypeStruct((60,), jnp.float32)
    assert sorted_sizes(jax.value_and_grad(gates, has_aux=True), logits, bias) == []


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA does on a CPU")
def test_hot_rows_sort_only_themselves():
    tokens, iteration = jax.ShapeDtypeStruct((6, 128), jnp.int32), jax.ShapeDtypeStruct((6,), jnp.int32)
    assert sorted_sizes(lambda *args: choose_hot_rows(*args, 3, 5000, 40), tokens, iteration) == [40]
