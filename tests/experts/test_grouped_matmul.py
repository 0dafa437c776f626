"""The grouped matmul against rows one by one: all ways of computing it, their gradients, and under vmap."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swift.experts.grouped_matmul import (
    Groups,
    block_rows,
    grouped_matmul,
    have_tiles,
    multiply_in_loops,
    multiply_in_tiles,
    multiply_ragged,
    padded_rows,
    weight_gradient_in_loops,
    weight_gradient_in_tiles,
    weight_gradient_ragged,
)
from swift.pod_compile.pods import Pod, described_devices

pytestmark = pytest.mark.usefixtures("x64")

BLOCK, ROWS = 2, 44
TILED_ROWS, TILED_DIMS = 300, (96, 48)
SIZES = {"all kinds of steps": [22, 0, 2, 18], "one slot has all": [0, 0, 44, 0], "no rows": [0, 0, 0, 0]}


def narrow(leaf):
    return jnp.asarray(leaf, jnp.int32 if leaf.ndim == 1 else jnp.float32)


def draw(sizes, dims=(5, 7), num_rows=ROWS):
    random = np.random.default_rng(0)
    size_S = np.array(sizes, np.int32)
    groups = Groups((np.cumsum(size_S) - size_S).astype(np.int32), size_S)
    slot_P = np.repeat(np.arange(len(sizes) + 1), [*sizes, num_rows - sum(sizes)])
    used_P1 = (slot_P < len(sizes))[:, None]
    x, dy = (used_P1 * random.standard_normal((num_rows, dim)) for dim in dims)
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


TILED_SIZES = {
    "tiles that are full, and not": [128, 0, 3, 101],
    "one slot has all": [0, 0, 300, 0],
    "no rows": [0, 0, 0, 0],
}


@pytest.mark.parametrize("sizes", TILED_SIZES.values(), ids=TILED_SIZES)
@pytest.mark.parametrize("mapped", [False, True], ids=["one rank", "virtual ranks"])
def test_kernels_of_gpus_multiply_every_row_by_the_weights_of_its_slot(sizes, mapped):
    """The same program as on the device, interpreted; several tiles for a slot, and several steps for a tile."""
    x, weights, dy, groups, slot_P = draw(sizes, TILED_DIMS, TILED_ROWS)
    assert have_tiles(jnp.float32, x, weights, dy)

    def run(x, weights, dy, groups):
        y = multiply_in_tiles(x, weights, groups, interpret=True)
        dx = multiply_in_tiles(dy, weights, groups, is_transposed=True, interpret=True)
        return y, dx, weight_gradient_in_tiles(x, dy, groups, interpret=True)

    arguments = jax.tree.map(narrow, (x, weights, dy, groups))
    if mapped:
        others = draw([1, 2, 3, 4], TILED_DIMS, TILED_ROWS)[:4]
        stacked = jax.tree.map(lambda a, b: jnp.stack([narrow(b), a]), arguments, others)
        found = [leaf[1] for leaf in jax.jit(jax.vmap(run))(*stacked)]
    else:
        found = jax.jit(run)(*arguments)
    expected = [
        np.einsum("px,pxy->py", x, weights[slot_P]),
        np.einsum("py,pxy->px", dy, weights[slot_P]),
        np.stack([x[slot_P == s].T @ dy[slot_P == s] for s in range(4)]),
    ]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax_cuda13_plugin is not installed")
@pytest.mark.parametrize("kind", ["one rank", "virtual ranks", "two devices"])
def test_gpus_have_no_copy_of_the_rows_for_each_slot(kind):
    """Hardly anything is kept beside what goes in and comes out; ``ragged_dot`` has all rows for each slot."""
    num_rows, num_slots, dims = 8192, 16, (2048, 1024)
    mesh = Mesh(described_devices(Pod.parse("h100:1x2"))[: 2 if kind == "two devices" else 1], ("ranks",))
    lead, spec = ((), PartitionSpec()) if kind == "one rank" else ((2,), PartitionSpec())
    spec = PartitionSpec("ranks") if kind == "two devices" else spec

    def run(x, weights, dy, start_S, size_S):
        groups = Groups(start_S, size_S)
        y, pull_back = jax.vjp(lambda x, weights: grouped_matmul(x, weights, groups, 16), x, weights)
        return y, *pull_back(dy)

    def of_rank(*arrays):
        return jax.tree.map(lambda leaf: leaf[None], run(*(array[0] for array in arrays)))

    ways = {"one rank": run, "virtual ranks": jax.vmap(run)}
    way = ways.get(kind) or jax.shard_map(of_rank, mesh=mesh, in_specs=spec, out_specs=spec)
    where = NamedSharding(mesh, spec)
    shapes = [(num_rows, dims[0]), (num_slots, *dims), (num_rows, dims[1])]
    arguments = [jax.ShapeDtypeStruct((*lead, *shape), jnp.bfloat16, sharding=where) for shape in shapes]
    arguments += [jax.ShapeDtypeStruct((*lead, num_slots), jnp.int32, sharding=where)] * 2
    compiled = jax.jit(way).lower(*arguments).compile()
    assert " dot(" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


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
