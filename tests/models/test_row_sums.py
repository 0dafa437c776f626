"""The gradient of a look-up without one-hot tokens, against NumPy and against the matmul that small tables use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.models import modules
from swift.models.modules import look_up, sum_rows

ROWS, WIDTH, SUMS = 37, 5, 11


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["zipf", "one index", "all different", "one row"])
def test_sums_are_those_of_numpy(kind):
    random = np.random.default_rng(0)
    index = {
        "zipf": random.zipf(1.5, ROWS) % SUMS,
        "one index": np.full(ROWS, SUMS - 1),
        "all different": random.permutation(SUMS),
        "one row": np.array([0]),
    }[kind].astype(np.int32)
    rows = random.standard_normal((len(index), WIDTH))
    wanted = np.zeros((SUMS, WIDTH))
    np.add.at(wanted, index, rows)
    found = jax.jit(lambda rows, index: sum_rows(rows, index, SUMS, rows.dtype))(rows, index)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.long
def test_a_frequent_token_is_summed_wider_than_its_rows():
    """A sum of 2,048 ones in bfloat16 would stop at 256."""
    ones = jnp.ones((2048, 1), jnp.bfloat16)
    assert float(sum_rows(ones, jnp.zeros(2048, jnp.int32), 2, jnp.float32)[0, 0]) == 2048


def gradient(tokens_BT, table_VD, weights_BTD):
    return jax.grad(lambda table: jnp.sum(look_up(table, tokens_BT) * weights_BTD))(table_VD)


def compiled(shape, num_rows, width):
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    table, weights = (jax.ShapeDtypeStruct(of, jnp.float32) for of in ((num_rows, width), (*shape, width)))
    return jax.jit(lambda *arguments: gradient(*arguments)).lower(tokens, table, weights)


def test_many_tokens_of_a_large_table_have_no_matmul(monkeypatch):
    """FLOPs as the compiler counts them: 2 * tokens * rows * width with one-hot tokens, a fiftieth without."""
    shape, num_rows, width = (4, 64), 4096, 32
    with_one_hot = compiled(shape, num_rows, width).compile().cost_analysis()["flops"]
    assert with_one_hot >= 2 * 4 * 64 * num_rows * width
    monkeypatch.setattr(modules, "ONE_HOT_AT_ONCE", 4 * 64 * num_rows - 1)
    without = compiled(shape, num_rows, width)
    assert without.compile().cost_analysis()["flops"] < with_one_hot / 50
    assert "64x4096" not in without.as_text()


def test_both_ways_have_the_same_gradient(monkeypatch):
    random = np.random.default_rng(0)
    tokens = random.integers(0, SUMS, (3, 7)).astype(np.int32)
    table, weights = (random.standard_normal(shape).astype(np.float32) for shape in ((SUMS, WIDTH), (3, 7, WIDTH)))
    one_hot = gradient(tokens, table, weights)
    monkeypatch.setattr(modules, "ONE_HOT_AT_ONCE", 1)
    np.testing.assert_allclose(gradient(tokens, table, weights), one_hot, rtol=1e-5, atol=1e-6)
