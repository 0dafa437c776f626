"""State between configurations: who has it, what is copied, and that nothing passes through the host."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.mesh.live import MeshRow, live_mesh
from swift.mesh.per_rank import RANKED, REPLICATED, SHARED
from swift.mesh.state_rows import source_rows, transfer_rows, transferred_bytes
from swift.topology import Topology

TOPOLOGY = Topology(2, 2, 2)
SPECS = {"master": RANKED, "counters": SHARED}
ROW_BYTES = 2 * 3 * 5 * 4 + 2 * (4 + 4 * 2)  # both ranks have their part of the master weights, and all counters


def mesh(failed=(), rows=None):
    return live_mesh(TOPOLOGY, "emulated", frozenset(failed), rows)


def state_on(live):
    """A state, on the host and on the mesh; no two numbers of an array are equal."""
    num_rows = live.num_live
    host = {
        "master": np.arange(num_rows * 3 * 2 * 5, dtype=np.float32).reshape(num_rows, 3, 2, 5),
        "counters": [
            np.arange(num_rows, dtype=np.int32),
            np.arange(4 * num_rows).reshape(num_rows, 4).astype("bfloat16"),
        ],
    }
    return host, live.put(host, SPECS)


def move(tree, old, new, source_R):
    """Moves without the host; emulated devices notice only the way up from it."""
    guards = jax.transfer_guard_device_to_host("disallow"), jax.transfer_guard_host_to_device("disallow_explicit")
    with guards[0], guards[1]:
        return jax.block_until_ready(transfer_rows(tree, old, new, SPECS, source_R))


def buffers(tree):
    """Addresses of every part of every array, by device."""
    return [{shard.device: shard.data.unsafe_buffer_pointer() for shard in a.addressable_shards} for a in leaves(tree)]


def leaves(tree):
    return jax.tree.leaves(tree)


FULL = tuple(MeshRow(worker, worker[1]) for worker in TOPOLOGY.workers)
HOLE = (FULL[0], FULL[1], FULL[3])
MOVED = (FULL[0], MeshRow((0, 1), 0), FULL[3])
PERMUTED = (FULL[3], FULL[0], FULL[1])


@pytest.mark.parametrize(
    ("old", "new", "source_R", "copied_rows"),
    [
        pytest.param(FULL, HOLE, (0, 1, 3), 0, id="a failure"),
        pytest.param(HOLE, FULL, (0, 1, 0, 2), 1, id="a re-join"),
        pytest.param(HOLE, MOVED, (0, 0, 2), 1, id="a moved role"),
        pytest.param(MOVED, FULL, (0, 2, 0, 2), 2, id="a moved role goes home and a re-join"),
        pytest.param(HOLE, PERMUTED, (2, 0, 1), 0, id="rows in another order"),
        pytest.param(PERMUTED, FULL, (1, 2, 1, 0), 1, id="a re-join, rows in another order"),
        pytest.param(FULL, FULL, (0, 1, 2, 3), 0, id="nothing"),
    ],
)
def test_rows_go_where_they_are_needed(old, new, source_R, copied_rows):
    old, new = (mesh(set(TOPOLOGY.workers) - {row.worker for row in rows}, rows) for rows in (old, new))
    assert source_rows(old, new) == source_R
    host, tree = state_on(old)
    moved = move(tree, old, new, source_R)

    for have, want in zip(leaves(moved), leaves(host), strict=True):
        np.testing.assert_array_equal(np.asarray(have), want[list(source_R)], strict=True)
    for have, sharding in zip(leaves(moved["counters"]), leaves(new.shardings([SHARED, SHARED])), strict=True):
        assert have.sharding == sharding
    assert moved["master"].sharding == new.shardings(RANKED)

    kept = {d for r, s in enumerate(source_R) if new.workers[r] == old.workers[s] for d in new.mesh.devices[r]}
    assert len(kept) == 2 * (new.num_live - copied_rows)
    for before, after in zip(buffers(tree), buffers(moved), strict=True):
        assert {device for device in after if before.get(device) == after[device]} == kept
    assert transferred_bytes(tree, old, new, source_R) == copied_rows * ROW_BYTES


def test_who_comes_back_copies_from_a_peer_that_lives():
    topology = Topology(3)
    old, new = (live_mesh(topology, "emulated", frozenset({worker})) for worker in ((2, 0), (0, 0)))
    assert source_rows(old, new) == (1, 1)


@st.composite
def changes(draw):
    """Two meshes of a topology: any failures, any worker in any role, rows in any order."""
    topology = Topology(draw(st.integers(1, 3)), draw(st.integers(1, 3)))

    def drawn_mesh():
        workers = draw(st.permutations(topology.workers))
        live = workers[: draw(st.integers(topology.num_stages, len(workers)))]
        anyone = st.integers(0, topology.num_stages - 1)
        stages = [*range(topology.num_stages), *(draw(anyone) for _ in live[topology.num_stages :])]
        rows = tuple(map(MeshRow, live, stages))
        return live_mesh(topology, "emulated", frozenset(workers) - frozenset(live), rows)

    return drawn_mesh(), drawn_mesh()


@given(changes())
def test_no_state_is_of_a_dead_worker_while_a_living_one_has_it(meshes):
    old, new = meshes
    for row, index in zip(new.rows, source_rows(old, new), strict=True):
        source = old.rows[index]
        assert source.stage == row.stage
        assert source == row or row not in old.rows
        having = {other.worker for other in old.rows if other.stage == row.stage}
        assert source.worker in new.workers or not having & set(new.workers)


def test_a_moved_state_is_that_of_the_program_that_follows():
    old, new = mesh(), mesh({(0, 0)})
    _, tree = state_on(old)
    moved = move(tree, old, new, source_rows(old, new))
    double = jax.jit(new.per_rank(lambda x: x * 2, (RANKED,), RANKED))
    np.testing.assert_array_equal(double(moved["master"]), 2 * np.asarray(tree["master"])[1:])


def test_virtual_ranks_stay():
    live = live_mesh(Topology(num_expert_ranks=4), "virtual")
    tree = live.put({"master": np.ones((1, 3, 4, 5)), "counters": np.ones(1)}, SPECS)
    moved = move(tree, live, live, source_rows(live, live))
    assert all(after is before for before, after in zip(leaves(tree), leaves(moved), strict=True))
    assert transferred_bytes(tree, live, live, (0,)) == 0


def test_a_state_that_is_elsewhere_is_not_moved():
    old, new = mesh(), mesh({(0, 0)})
    _, tree = state_on(new)
    with pytest.raises(AssertionError, match="is not on the old mesh"):
        transfer_rows(tree, old, new, SPECS, (1, 2, 3))


def test_what_is_replicated_has_no_rows_to_move():
    live = mesh()
    tree = live.put(np.ones(3), REPLICATED)
    with pytest.raises(AssertionError, match="only arrays with rows can be moved"):
        transfer_rows(tree, live, live, REPLICATED, (0, 1, 2, 3))
