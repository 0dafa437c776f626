"""The grouped matmul against rows one by one: both ways of computing it, their gradients, and under vmap."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.experts.grouped_matmul import (
    Groups,
    block_rows,
    grouped_matmul,
    multiply_in_loops,
    multiply_ragged,
    padded_rows,
    weight_gradient_in_loops,
    weight_gradient_ragged,
)

pytestmark = pytest.mark.usefixtures("x64")

BLOCK, ROWS = 2, 44
SIZES = {"all kinds of steps": [22, 0, 2, 18], "one slot has all": [0, 0, 44, 0], "no rows": [0, 0, 0, 0]}


def draw(sizes, dims=(5, 7)):
    random = np.random.default_rng(0)
    size_S = np.array(sizes, np.int32)
    groups = Groups((np.cumsum(size_S) - size_S).astype(np.int32), size_S)
    slot_P = np.repeat(np.arange(len(sizes) + 1), [*sizes, ROWS - sum(sizes)])
    used_P1 = (slot_P < len(sizes))[:, None]
    x, dy = (used_P1 * random.standard_normal((ROWS, dim)) for dim in dims)
    return x, random.standard_normal((len(sizes), *dims)), dy, groups, np.minimum(slot_P, len(sizes) - 1)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("way", ["loops", "ragged"])
def test_every_row_meets_the_weights_of_its_slot(sizes, way):
    x, weights, dy, groups, slot_P = draw(sizes)
    if way == "loops":
        multiply, gradient = (partial(f, block=BLOCK) for f in (multiply_in_loops, weight_gradient_in_loops))
    else:
        multiply, gradient = multiply_ragged, weight_gradient_ragged
    np.testing.assert_allclose(
        jax.jit(multiply)(x, weights, groups), np.einsum("px,pxy->py", x, weights[slot_P]), atol=1e-12
    )
    expected = np.stack([x[slot_P == s].T @ dy[slot_P == s] for s in range(len(sizes))])
    np.testing.assert_allclose(jax.jit(gradient)(x, dy, groups), expected, atol=1e-12)
    swapped = jax.jit(gradient)(dy, x, groups)
    np.testing.assert_allclose(swapped, expected.swapaxes(1, 2), atol=1e-12)


@pytest.mark.parametrize("mapped", [False, True], ids=["one rank", "virtual ranks"])
def test_gradients_are_those_of_rows_one_by_one(mapped):
    x, weights, dy, groups, slot_P = draw(SIZES["all kinds of steps"])
    others = draw([2, 4, 6, 8])

    def loss(x, weights, dy, groups):
        return jnp.sum(grouped_matmul(x, weights, groups, BLOCK) * dy)

    gradient = jax.grad(loss, (0, 1))
    if mapped:
        stacked = jax.tree.map(lambda a, b: np.stack([a, b]), (x, weights, dy, groups), others[:4])
        found = jax.tree.map(lambda leaf: leaf[0], jax.jit(jax.vmap(gradient))(*stacked))
    else:
        found = jax.jit(gradient)(x, weights, dy, groups)
    np.testing.assert_allclose(found[0], np.einsum("py,pxy->px", dy, weights[slot_P]), atol=1e-12)
    expected = np.stack([x[slot_P == s].T @ dy[slot_P == s] for s in range(4)])
    np.testing.assert_allclose(found[1], expected, atol=1e-12)


def test_gradients_add_up_in_float32():
    x, groups = jnp.ones((600, 1), jnp.bfloat16), Groups(jnp.zeros(1, jnp.int32), jnp.array([600], jnp.int32))
    for gradient in (partial(weight_gradient_in_loops, block=8), weight_gradient_ragged):
        found = gradient(x, x, groups)
        assert found.dtype == jnp.float32
        assert found.item() == 600  # bfloat16 stops at 256


def test_filling_costs_at_most_a_row_in_32():
    for num_rows in (1, 5, 8, 64, 100, 256, 1000, 2048, 40_000):
        for num_slots in (1, 2, 4, 32):
            block, padded = block_rows(num_rows, num_slots), padded_rows(num_rows, num_slots)
            assert padded % block == 0
            assert num_rows <= padded <= num_rows * 33 / 32
            random = np.random.default_rng(0)
            for _ in range(20):
                sizes = random.multinomial(num_rows, random.dirichlet(np.full(num_slots, 0.3)))
                assert (-(-sizes // block) * block).sum() <= padded
