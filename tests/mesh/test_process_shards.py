"""State to the host and back, and from a peer to who has nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.mesh.live import live_mesh
from swift.mesh.peer_sum import PeerAllReduce
from swift.mesh.per_rank import RANKED, SHARED
from swift.mesh.state_rows import broadcast_bits, fetch_shards, put_shards
from swift.topology import Topology

SPECS = {"master": RANKED, "rest": SHARED}


@pytest.fixture(scope="module")
def live():
    """Stage 0 has three workers, stage 1 two."""
    return live_mesh(Topology(3, 2, 2), "emulated", frozenset({(1, 1)}))


def state(live, dtype):
    """Rows of a stage are alike, and all bits occur: also those of -0.0 and of numbers that are none."""
    random = np.random.default_rng(0)

    def bits(*shape):
        by_stage = random.integers(0, 256, (2, *shape[:-1], shape[-1] * jnp.dtype(dtype).itemsize), np.uint8)
        by_stage = by_stage.view(dtype)
        by_stage[..., 0] = -0.0 if jnp.issubdtype(dtype, jnp.floating) else 7
        return by_stage[live.stage_R]

    return {"master": bits(3, 2, 5), "rest": {"step": bits(1)[:, 0], "policy": bits(2, 4)}}


def raw(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), jax.device_get(tree))


def copied(live, has_R, tree, peer_sum):
    """The tree where the first row of each stage that has it gives it to the others, and whether it has arrived."""
    gives_R = np.zeros(live.num_live, bool)
    gives_R[[next(row for row in rows if has_R[row]) for rows in live.peers]] = True

    def per_rank(tree):
        given, num_wrong = broadcast_bits(tree, jnp.asarray(gives_R)[live.row_index()], peer_sum)
        return given, num_wrong == 0

    return jax.jit(live.per_rank(per_rank, (SPECS,), (SPECS, SHARED)))(live.put(tree, SPECS))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
@pytest.mark.parametrize("missing", [[], [0], [1, 2], [0, 3, 4]])
def test_who_has_nothing_gets_the_bits_of_a_peer(live, dtype, missing):
    host = state(live, dtype)
    emptied = jax.tree.map(np.copy, host)
    for leaf in jax.tree.leaves(emptied):
        leaf[missing] = 0
    has_R = [row not in missing for row in range(live.num_live)]
    shared, has_arrived = copied(live, has_R, emptied, PeerAllReduce(live.peers, "grouped"))
    assert raw(shared) == raw(host)
    assert jax.device_get(has_arrived).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_what_does_not_arrive_as_it_was_sent_is_found(live, dtype):
    class Noisy(PeerAllReduce):
        def __call__(self, tree):
            bits, checksum = super().__call__(tree)
            is_third = live.row_index() == 3
            return jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].add(is_third.astype(leaf.dtype)), bits), checksum

    _, has_arrived = copied(live, [True] * live.num_live, state(live, dtype), Noisy(live.peers, "grouped"))
    assert np.flatnonzero(~jax.device_get(has_arrived)).tolist() == [3]


def test_parts_on_the_host_are_put_back_as_they_were(live):
    tree = live.put(state(live, jnp.float32), SPECS)
    before = raw(tree)
    parts, shapes = fetch_shards(tree), jax.eval_shape(lambda: tree)
    assert {len(part) for part in jax.tree.leaves(parts, is_leaf=lambda leaf: isinstance(leaf, list))} == {10}
    jax.tree.map(lambda leaf: leaf.delete(), tree)
    placed = put_shards(parts, live, SPECS, shapes)
    assert raw(placed) == before
    assert placed["master"].sharding.is_equivalent_to(live.shardings(RANKED), 4)


def test_parts_on_the_host_stay_as_they_were_when_their_arrays_are_donated(live):
    """On CPU they are views; on other platforms copies, and the arrays are gone."""
    tree = live.put(state(live, jnp.float32), SPECS)
    parts = fetch_shards(tree)
    before = [part.tobytes() for part in jax.tree.leaves(parts)]
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: 3 * leaf + 1, tree), donate_argnums=0)
    for _ in range(3):
        tree = step(tree)
    jax.block_until_ready(tree)
    assert [part.tobytes() for part in jax.tree.leaves(parts)] == before


def test_who_has_nothing_puts_zeros(live):
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state(live, jnp.float32))
    placed = jax.device_get(put_shards(None, live, SPECS, shapes))
    assert all(not leaf.any() for leaf in jax.tree.leaves(placed))
    assert jax.tree.map(np.shape, placed) == jax.tree.map(lambda leaf: leaf.shape, shapes)
