"""The operator of the decoupled optimizer, against numpy and against its own transpose by autodiff."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.experts.state_layouts import Decoupled, Instances, ReplicaShards
from swift.experts.weight_exchange import collect, exchange_bytes, from_slices, materialize, to_slices
from swift.mesh.hlo_collectives import collective_bytes
from swift.mesh.live import live_mesh
from swift.mesh.per_rank import RANKED, SHARED
from swift.topology import Topology

pytestmark = pytest.mark.usefixtures("strict_types")

ROWS, CLASSES, SIZE, SLOTS = 2, 5, 13, 3


def draw(num_ranks, seed):
    random = np.random.default_rng(seed)
    params = random.standard_normal((ROWS, CLASSES, SIZE)).astype(np.float32)
    placement = random.integers(0, CLASSES, (ROWS, num_ranks, SLOTS)).astype(np.int32)
    return params, placement


def global_of(function, num_ranks, kind, in_specs, out_specs):
    live = live_mesh(Topology(num_expert_ranks=num_ranks), kind)
    return jax.jit(live.per_rank(function, in_specs, out_specs))


def slots_by_numpy(params, placement):
    return np.stack([params[row][placement[row]] for row in range(ROWS)])


@pytest.mark.parametrize("kind", ["emulated", "virtual"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_slot_receives_its_class(num_ranks, kind):
    params, placement = draw(num_ranks, seed=num_ranks)
    run = global_of(materialize, num_ranks, kind, (RANKED, SHARED), RANKED)
    slots = jax.device_get(run(to_slices(params, num_ranks)[None], placement[None]))[0]
    np.testing.assert_array_equal(slots[..., :SIZE], slots_by_numpy(params, placement))
    assert not np.asarray(slots[..., SIZE:]).any()


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_collect_is_the_transpose_of_materialize_and_sums_replicas(num_ranks):
    params, placement = draw(num_ranks, seed=1)
    slices = to_slices(params, num_ranks)[None]

    def both(slices, placement, gradients):
        by_hand = collect(gradients, placement, CLASSES, jnp.float32)
        (by_autodiff,) = jax.linear_transpose(partial(materialize, placement_LNS=placement), slices)(gradients)
        return by_hand, by_autodiff

    run = global_of(both, num_ranks, "emulated", (RANKED, SHARED, RANKED), RANKED)
    shape = (1, ROWS, num_ranks, SLOTS, slices.shape[-1] * num_ranks)
    gradients = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    by_hand, by_autodiff = jax.device_get(run(slices, placement[None], gradients))
    np.testing.assert_allclose(by_hand, by_autodiff, rtol=1e-5, atol=1e-5)
    expected = np.zeros_like(params)
    for row, rank, slot in np.ndindex(placement.shape):
        expected[row, placement[row, rank, slot]] += gradients[0, row, rank, slot, :SIZE]
    np.testing.assert_allclose(from_slices(by_hand[0], SIZE), expected, rtol=1e-5, atol=1e-5)


def test_narrow_wire_but_wide_sum():
    """Eight replicas of 1 + 2^-7 and one of 2^-9: a bfloat16 sum would lose the small one."""
    placement = np.zeros((1, 9, 1, 1), np.int32).reshape(1, 1, 9, 1)
    gradients = np.full((1, 1, 9, 1, 9), 1 + 2**-7, np.float32)
    gradients[0, 0, 0] = 2**-9
    run = global_of(
        lambda p, g: collect(g, p, 1, jnp.bfloat16), 9, "virtual", (SHARED, RANKED), RANKED
    )  # each value fits bfloat16
    assert np.asarray(run(placement, gradients))[0, 0, 0, 0, 0] == 8 * (1 + 2**-7) + 2**-9


@pytest.mark.parametrize("size", [16, 18, 10], ids=["even slices", "odd slices", "padded slices"])
def test_a_single_narrow_slot_is_exchanged_bit_for_bit(size):
    """In pairs where the slices are even; so is its gradient, by autodiff and by hand."""
    ranks = 2
    random = np.random.default_rng(3)
    params = random.standard_normal((1, 1, size)).astype(jnp.bfloat16)
    params[0, 0, :2] = -0.0, np.inf
    slices, placement = to_slices(params, ranks), np.zeros((1, ranks, 1), np.int32)
    gradients = random.standard_normal((1, ranks, 1, slices.shape[-1] * ranks)).astype(jnp.bfloat16)

    def there_and_back(slices, placement, gradients):
        slots, transpose = jax.vjp(lambda slices: materialize(slices, placement), slices)
        by_hand = collect(gradients.astype(jnp.float32), placement, 1, jnp.bfloat16)
        return slots, transpose(gradients)[0], by_hand

    run = global_of(there_and_back, ranks, "virtual", (RANKED, SHARED, RANKED), (RANKED, RANKED, RANKED))
    found = run(slices[None], placement[None], gradients[None])
    slots_LNSW, by_autodiff_LNEw, by_hand_LNEw = (np.asarray(array)[0] for array in found)
    np.testing.assert_array_equal(slots_LNSW[..., :size], np.broadcast_to(params, (1, ranks, 1, size)))
    expected = gradients.astype(np.float32).sum(axis=1).reshape(-1)
    np.testing.assert_array_equal(by_hand_LNEw.reshape(-1), expected)
    np.testing.assert_array_equal(by_autodiff_LNEw.reshape(-1), expected.astype(jnp.bfloat16))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40))
def test_slices_of_any_number_of_ranks_join_again(num_ranks, size):
    params = np.arange(2 * 3 * size, dtype=np.float32).reshape(2, 3, size)
    np.testing.assert_array_equal(from_slices(np.asarray(to_slices(params, num_ranks)), size), params)


LAYOUTS = {
    "decoupled": Decoupled(4, SIZE, 8, jnp.float32, jnp.float32),
    "replica shards": ReplicaShards(4, SIZE, 8, 2, jnp.float32),
    "instances": Instances(4, SIZE, 8, jnp.float32, jnp.float32),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_holds_and_reduces_the_same_classes(layout):
    params = np.random.default_rng(0).standard_normal((ROWS, 4, SIZE)).astype(np.float32)
    placement = np.broadcast_to((np.arange(16, dtype=np.int32) % 4).reshape(8, 2), (ROWS, 8, 2))
    master = layout.init(params, placement)
    classes = layout.classes(master, placement)
    assert isinstance(classes, np.ndarray)  # on the host, though the master weights are on a device
    np.testing.assert_array_equal(classes, params)

    def per_rank(master, placement):
        slots = layout.materialize(master, placement)[..., :SIZE]
        gradients = layout.collect(slots, placement)
        return slots, gradients, jax.lax.psum(layout.square_norm(gradients, placement), "expert")

    run = global_of(per_rank, 8, "emulated", (RANKED, SHARED), (RANKED, RANKED, SHARED))
    slots, gradients, square = jax.device_get(run(master[None], placement[None]))
    np.testing.assert_array_equal(slots[0], slots_by_numpy(params, placement))
    np.testing.assert_allclose(layout.classes(gradients[0], placement), 4 * params, rtol=1e-6)
    np.testing.assert_allclose(square[0], np.sum((4 * params) ** 2), rtol=1e-5)


def test_instances_migrate_weights_and_moments_to_slots_that_change():
    layout, random = LAYOUTS["instances"], np.random.default_rng(3)
    old = np.broadcast_to((np.arange(16, dtype=np.int32) % 4).reshape(8, 2), (ROWS, 8, 2))
    new = old.copy()
    new[0, 0, 0], new[0, 7, 1], new[1, 3, 0] = 3, 0, 1
    trees = [random.standard_normal((ROWS, 4, SIZE)).astype(np.float32) for _ in range(2)]
    run = global_of(layout.migrate, 8, "emulated", (RANKED, SHARED, SHARED), RANKED)
    moved = jax.device_get(run([layout.init(tree, old)[None] for tree in trees], old[None], new[None]))
    for tree, after in zip(trees, moved, strict=True):
        np.testing.assert_array_equal(after[0], slots_by_numpy(tree, new))


@pytest.mark.parametrize("layout", ["decoupled", "replica shards"])
def test_bytes_of_an_exchange_are_those_of_the_closed_form(layout):
    size, ranks, slots = 64, 8, 2
    chosen = {
        "decoupled": Decoupled(4, size, ranks, jnp.float32, jnp.float32),
        "replica shards": ReplicaShards(4, size, ranks, slots, jnp.float32),
    }[layout]
    placement = np.broadcast_to((np.arange(16, dtype=np.int32) % 4).reshape(8, 2), (ROWS, 8, 2))

    def round_trip(master, placement):
        return chosen.collect(chosen.materialize(master, placement), placement)

    master = chosen.init(np.zeros((ROWS, 4, size), np.float32), placement)[None]
    compiled = global_of(round_trip, ranks, "emulated", (RANKED, SHARED), RANKED).lower(master, placement[None])
    measured = sum(collective_bytes(compiled.compile().as_text(), ranks).values())
    assert measured == exchange_bytes(ROWS, ranks, slots, size, itemsize=4)
