"""Snapshots of some experts, taken from devices: they are those of the state on the host."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from swift.checkpoint import snapshots
from swift.checkpoint.snapshots import assemble_snapshot, begin_pieces, begin_snapshot
from swift.topology import Topology
from swift.train.build import make_step_spec
from swift.train.saved_state import split_of
from tests.train.partial_runs import CLASSES, saving_one_expert


@pytest.fixture(scope="module")
def experiment(corpus):
    return saving_one_expert(corpus)


@pytest.mark.parametrize(
    ("topology", "ranks"),
    [(Topology(1, 1, 2), "emulated"), (Topology(2, 2, 2), "emulated"), (Topology(1, 1, 2), "virtual")],
)
def test_a_snapshot_of_devices_is_one_of_the_host(experiment, topology, ranks):
    spec, random = make_step_spec(replace(experiment, topology=topology, ranks=ranks)), np.random.default_rng(0)
    split, live = split_of(spec), spec.live
    host = jax.tree.map(lambda leaf: random.integers(0, 99, leaf.shape).astype(leaf.dtype), split.abstract)
    specs = replace(spec.specs, slots={})
    state = live.put(jax.tree.map(lambda leaf: leaf[live.stage_R], host), specs)
    for chosen in (np.array([[2, 0], [1, 3]]), np.tile(np.arange(CLASSES), (2, 1))):
        theirs = split.host_snapshot(host, chosen)
        ours = begin_snapshot(split, state, live, chosen)()
        jax.tree.map(np.testing.assert_array_equal, (ours.dense, ours.blocks), (theirs.dense, theirs.blocks))
        again = begin_snapshot(split, state, live, chosen[:, ::-1], ours)()
        assert all(again.blocks[name] is ours.blocks[name] for name in ours.blocks)  # written over


@pytest.mark.parametrize("topology", [Topology(2, 2, 2), Topology(3, 1, 2)], ids=str)
def test_peers_divide_what_they_all_have(experiment, topology, monkeypatch):
    """As on several hosts, each a pipeline: equal parts that do not overlap, also where three divide two values."""
    spec, random = make_step_spec(replace(experiment, topology=topology)), np.random.default_rng(0)
    split, live = split_of(spec), spec.live
    host = jax.tree.map(lambda leaf: random.integers(0, 99, leaf.shape).astype(leaf.dtype), split.abstract)
    state = live.put(jax.tree.map(lambda leaf: leaf[live.stage_R], host), replace(spec.specs, slots={}))
    monkeypatch.setattr(snapshots, "_givers", lambda live: [list(peers) for peers in live.peers])
    for chosen in (np.array([[2, 0], [1, 3]]), np.tile(np.arange(CLASSES), (2, 1))):
        pieces = begin_pieces(split, state, live, chosen)()
        ours, theirs = assemble_snapshot(split, pieces, chosen), split.host_snapshot(host, chosen)
        jax.tree.map(np.testing.assert_array_equal, (ours.dense, ours.blocks), (theirs.dense, theirs.blocks))
        largest = max(piece.values.size for piece in pieces if piece.name == "master.expert")
        whole = split.shapes["master.expert"].size * chosen.shape[-1] // CLASSES
        assert largest == pytest.approx(whole / topology.num_devices, rel=0.01)


def test_a_snapshot_is_of_the_state_that_was_given_away_meanwhile(experiment):
    spec = make_step_spec(replace(experiment, topology=Topology(2, 1, 2)))
    split, live, chosen = split_of(spec), spec.live, np.array([[2, 0], [1, 3]])
    state = spec.init(jax.random.key(0))
    add_one = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    for _ in range(20):
        host = jax.tree.map(lambda leaf: leaf[list(live.first_rows)], jax.device_get(replace(state, slots={})))
        take = begin_snapshot(split, state, live, chosen)
        state = add_one(state)
        ours, theirs = take(), split.host_snapshot(host, chosen)
        jax.tree.map(np.testing.assert_array_equal, (ours.dense, ours.blocks), (theirs.dense, theirs.blocks))
