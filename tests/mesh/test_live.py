"""Live meshes: which worker runs a row, which stage a row serves, what a per-rank function sees of its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.errors import SettingError
from swift.mesh.live import MeshRow, live_mesh
from swift.mesh.per_rank import RANKED, REPLICATED, SHARED
from swift.topology import Topology


def test_rows_say_their_worker_and_its_stage():
    live = live_mesh(Topology(2, 2, 2), "emulated", frozenset({(1, 0)}))
    assert live.rows == (MeshRow((0, 0), 0), MeshRow((0, 1), 1), MeshRow((1, 1), 1))
    assert live.workers == ((0, 0), (0, 1), (1, 1))
    assert live.failed == {(1, 0)}
    assert (live.num_live, live.num_ranks) == (3, 2)
    assert live.peers == ((0,), (1, 2))
    assert live.first_rows == (0, 1)
    np.testing.assert_array_equal(live.stage_R, np.array([0, 1, 1], np.int32), strict=True)


def test_a_worker_keeps_its_devices_whoever_fails():
    topology = Topology(2, 2, 2)
    of_worker = dict(zip(topology.workers, np.array(jax.devices()[:8]).reshape(4, 2), strict=True))
    for failed in (frozenset(), frozenset({(0, 0)}), frozenset({(1, 0), (0, 1)})):
        live = live_mesh(topology, "devices", failed)
        for worker, devices in zip(live.workers, live.mesh.devices, strict=True):
            np.testing.assert_array_equal(devices, of_worker[worker])


def test_a_worker_may_serve_another_stage_in_another_row():
    rows = (MeshRow((1, 0), 1), MeshRow((1, 1), 1), MeshRow((0, 0), 0))
    live = live_mesh(Topology(2, 2, 2), "emulated", frozenset({(0, 1)}), rows)
    assert live.peers == ((2,), (0, 1))
    assert live.first_rows == (2, 0)
    assert live.failed == {(0, 1)}
    assert [device.id for device in live.mesh.devices.ravel()] == [4, 5, 6, 7, 0, 1]


def test_a_stage_without_its_own_workers_may_be_served_by_another():
    failed = frozenset({(0, 1), (1, 1)})
    live = live_mesh(Topology(2, 2, 1), "emulated", failed, (MeshRow((0, 0), 0), MeshRow((1, 0), 1)))
    assert live.peers == ((0,), (1,))
    with pytest.raises(SettingError, match="stage 1 has no live worker"):
        live_mesh(Topology(2, 2, 1), "emulated", failed)


@pytest.mark.parametrize(
    "rows",
    [
        (MeshRow((0, 0), 0), MeshRow((0, 1), 1)),
        (MeshRow((0, 0), 0), MeshRow((0, 1), 1), MeshRow((1, 0), 0)),
        (MeshRow((0, 0), 0), MeshRow((0, 1), 1), MeshRow((1, 1), 1), MeshRow((1, 1), 0)),
        (MeshRow((0, 0), 0), MeshRow((0, 1), 0), MeshRow((1, 1), 0)),
        (MeshRow((0, 0), 0), MeshRow((0, 1), 1), MeshRow((1, 1), 2)),
    ],
    ids=["a live one left out", "a failed one", "twice", "a stage unserved", "an unknown stage"],
)
def test_rows_that_cannot_be_are_ours_to_prevent(rows):
    with pytest.raises(AssertionError):
        live_mesh(Topology(2, 2, 1), "emulated", frozenset({(1, 0)}), rows)


def test_the_devices_of_failed_workers_are_needed_too():
    with pytest.raises(
        SettingError, match=r"num_expert_ranks = 5: 3 worker\(s\) with that many ranks need 15 devices and"
    ):
        live_mesh(Topology(3, 1, 5), "devices", frozenset({(1, 0)}))


@pytest.mark.parametrize("kind", ["emulated", "virtual"])
def test_what_is_replicated_is_seen_whole_by_every_rank(kind):
    live = live_mesh(Topology(num_expert_ranks=4), kind)
    ranked, common_TX = np.arange(8, dtype=np.float32).reshape(1, 2, 4), np.arange(6, dtype=np.float32).reshape(3, 2)
    specs = (RANKED, {"common": REPLICATED})

    def per_rank(ranked_row, table):
        return ranked_row + table["common"].sum(), table["common"]

    arguments = live.put((ranked, {"common": common_TX}), specs)
    total, common = jax.jit(live.per_rank(per_rank, specs, (RANKED, SHARED)))(*arguments)
    np.testing.assert_array_equal(total, ranked + 15)
    np.testing.assert_array_equal(common, common_TX[None])


def test_all_workers_see_the_same_replicated_argument_and_their_own_row():
    live = live_mesh(Topology(2, 2, 2), "emulated", frozenset({(0, 1)}))
    tell = live.per_rank(lambda common: (live.row_index(), common), (REPLICATED,), SHARED)
    row, common = jax.jit(tell)(jnp.array([3.0, 1.0]))
    np.testing.assert_array_equal(row, np.arange(3, dtype=np.int32), strict=True)
    np.testing.assert_array_equal(common, [[3, 1]] * 3)


@pytest.mark.parametrize("kind", ["emulated", "virtual"])
def test_a_lone_row_is_row_zero(kind):
    live = live_mesh(Topology(num_expert_ranks=2), kind)
    row = jax.jit(live.per_rank(lambda _: live.row_index(), (RANKED,), SHARED))(jnp.ones((1, 1, 2)))
    np.testing.assert_array_equal(row, np.zeros(1, np.int32), strict=True)


@pytest.mark.parametrize("kind", ["emulated", "virtual"])
def test_a_result_cannot_be_replicated(kind):
    live = live_mesh(Topology(num_expert_ranks=2), kind)
    with pytest.raises(AssertionError, match="results must have a worker dim"):
        live.per_rank(lambda x: {"a": x, "b": x}, (SHARED,), {"a": SHARED, "b": REPLICATED})
