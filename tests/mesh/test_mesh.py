"""Topologies, live meshes, and the two ways of running per-rank code."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from swift.errors import SettingError
from swift.mesh.devices import EmulationError, emulate_devices
from swift.mesh.hlo_collectives import collective_bytes
from swift.mesh.live import live_mesh, storage_mesh
from swift.mesh.per_rank import RANKED, SHARED
from swift.topology import Topology


def test_workers_are_counted_pipeline_by_pipeline():
    topology = Topology(2, 3, 4)
    assert topology.workers == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    assert topology.num_devices == 24
    assert topology.live_workers(frozenset({(0, 1)})) == ((0, 0), (0, 2), (1, 0), (1, 1), (1, 2))


@pytest.mark.parametrize(
    ("failed", "message"),
    [
        ({(2, 0)}, "failed worker = '2:0': no such worker among 2 pipelines x 2 stages"),
        ({(0, 1), (1, 1)}, "stage 1 has no live worker"),
    ],
)
def test_impossible_failure_sets_are_refused(failed, message):
    with pytest.raises(SettingError, match=message):
        Topology(2, 2, 1).live_workers(frozenset(failed))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_counts_are_whole_and_positive(value):
    with pytest.raises(SettingError, match=r"Topology\.num_stages = .*: must be a whole number of at least 1"):
        Topology(num_stages=value)


def test_a_mesh_with_a_hole():
    live = live_mesh(Topology(2, 2, 2), "emulated", frozenset({(1, 0)}))
    assert live.workers == ((0, 0), (0, 1), (1, 1))
    assert live.mesh.devices.shape == (3, 2)
    assert live.mesh.axis_names == ("worker", "expert")


@pytest.mark.parametrize("kind", ["devices", "emulated"])
def test_more_ranks_than_devices_are_refused(kind):
    error = SettingError if kind == "devices" else EmulationError
    with pytest.raises(error, match="13"):
        live_mesh(Topology(num_expert_ranks=13), kind)


def test_virtual_ranks_need_one_worker():
    with pytest.raises(SettingError, match=r"^ranks = 'virtual': needs one pipeline of one stage"):
        live_mesh(Topology(2, 1, 2), "virtual")


def test_an_unknown_kind_of_ranks_is_refused():
    with pytest.raises(SettingError, match="choose one of emulated, devices, virtual"):
        live_mesh(Topology(), "imaginary")


def test_a_process_with_all_devices_has_the_state_of_all_ranks():
    """Also where one device stands for all workers, as in the process that reads checkpoints for others."""
    topology = Topology(2, 3, 2)
    whole = dict.fromkeys(range(3), slice(2))
    assert storage_mesh(topology).share == whole
    assert live_mesh(topology, "emulated").share == whole


def per_rank(ranked, shared):
    """Exercises the collectives that experts use."""
    swapped = lax.all_to_all(ranked, "expert", split_axis=1, concat_axis=1)
    return {"ranked": swapped * shared[0], "shared": [lax.psum(ranked.sum(), "expert"), shared]}


def test_sharded_and_virtual_ranks_compute_the_same():
    ranked = np.random.default_rng(0).standard_normal((1, 3, 4, 4, 2)).astype(np.float32)
    shared = np.arange(1, 3, dtype=np.float32)[None]
    specs = {"ranked": RANKED, "shared": SHARED}
    results = []
    for kind in ("emulated", "virtual"):
        live = live_mesh(Topology(num_expert_ranks=4), kind)
        results.append(jax.jit(live.per_rank(per_rank, (RANKED, SHARED), specs))(ranked, shared))
    expected = np.swapaxes(ranked, 2, 3)
    for result in results:
        np.testing.assert_array_equal(result["ranked"], expected)
        np.testing.assert_allclose(result["shared"][0], ranked.sum()[None], rtol=1e-5)
        np.testing.assert_array_equal(result["shared"][1], shared)


def test_a_shared_result_that_differs_between_ranks_is_an_error():
    live = live_mesh(Topology(num_expert_ranks=4), "virtual")
    with pytest.raises(ValueError, match="out_axes"):
        live.per_rank(lambda x: x.sum(), (RANKED,), SHARED)(jnp.ones((1, 3, 4)))


def test_emulating_again_with_no_more_devices_does_nothing():
    emulate_devices(2)
    assert len(jax.devices()) >= 8


def test_emulation_after_jax_has_started_says_so():
    code = "import jax; jax.devices(); from swift.mesh.devices import emulate_devices; emulate_devices(4)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = result.stderr.strip().splitlines()[-1]
    assert "cannot emulate 4 devices: JAX has already started with 1 cpu device(s)" in last


HLO = """
  %a = (f32[2,4]{1,0}, f32[2,4]{1,0}, /*index=2*/f32[2,4]{1,0}) all-to-all(%x, %y, %z), replica_groups={{0,1,2}}
  ROOT %b = bf16[6]{0} all-gather(%c), replica_groups={{0,1,2}}, dimensions={0}
  %r = f32[5]{0} reduce-scatter(%q), replica_groups=[1,3]<=[3], to_apply=%add
  %s = f32[8]{0} all-reduce-start(%q), replica_groups={}, to_apply=%add
  %d = f32[8]{0} all-reduce-done(%s)
  %u = (f32[3]{0}, f32[3]{0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%q), source_target_pairs={{0,1}}
  %v = ((f32[4]{0}, f32[2]{0}), (f32[12]{0}, f32[6]{0})) all-gather-start(%q, %x), replica_groups=[1,3]<=[3]
  %n = pred[] add(%all-to-all.1, %b)
"""


def test_bytes_of_collectives_by_hand():
    assert collective_bytes(HLO, 3) == {
        "all-to-all": 3 * (3 * 2 * 4) * 4,
        "all-gather": 3 * (6 * 2 + 18 * 4),
        "reduce-scatter": 3 * 3 * 5 * 4,
        "all-reduce": 3 * 8 * 4,
        "collective-permute": 3 * 3 * 4,
    }
