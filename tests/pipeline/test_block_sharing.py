"""States copied between rows by a program, and on the host, where workers hold other blocks than their peers."""

import re
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from swift.mesh.per_rank import AXES
from swift.pipeline.reconfigure import transfer
from swift.pipeline.reconfigure.recut import spec_with_assignment
from swift.pipeline.reconfigure.transfer import (
    Routes,
    checkpoint_rows,
    collective_transfer,
    move_between_processes,
    rebind_to_mesh,
    transfer_on_host,
)
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment, Move
from tests.pipeline.held_rows import rows_of

pytestmark = pytest.mark.usefixtures("x64")

APART = {"topology": (2, 2, 1), "pattern": (False, True, True, False), "cut": ((3, 1), (1, 3))}


@pytest.fixture(scope="module")
def apart(rig):
    """Stages of three layers and one, and of one and three."""
    return rig(**APART)


@pytest.fixture(scope="module")
def state(apart):
    """A state of which all blocks differ."""
    return apart.start(apart.draw(0))


def emptied(spec, state, rows):
    """The state where some rows have zeros, as processes that join have."""
    host = jax.tree.map(np.array, jax.device_get(state))
    for leaf in jax.tree.leaves(host):
        leaf[list(rows)] = 0
    return spec.live.put(host, spec.specs)


@pytest.mark.parametrize("missing", [pytest.param([0], marks=pytest.mark.long), [1, 2]])
def test_who_joins_gets_each_block_from_whoever_has_it(apart, state, missing):
    """With the second stage of one pipeline and the first of the other gone, blocks come from two workers."""
    spec, has_R = apart.spec, [row not in missing for row in range(4)]
    shared, has_arrived = jax.jit(collective_transfer(spec, spec, has_R))(emptied(spec, state, missing))
    assert jax.device_get(has_arrived).all()
    assert rows_of(spec, shared) == rows_of(spec, state)


@pytest.mark.parametrize("failed", [pytest.param((1, 1), marks=pytest.mark.long), (0, 0)])
def test_a_worker_that_rejoins_on_another_host_has_what_it_had(apart, state, failed):
    """The survivors keep their arrays meanwhile; also where the first row is the one that is gone."""
    spec = apart.spec
    left = spec.at(spec.live.with_rows(tuple(row for row in spec.live.rows if row.worker != failed)))
    before = rows_of(spec, state)
    fewer, num_bytes = move_between_processes(emptied(spec, state, []), spec, left)
    assert num_bytes == 0
    assert rows_of(left, fewer) == [
        mine for mine, row in zip(before, spec.live.rows, strict=True) if row.worker != failed
    ]
    again, num_bytes = move_between_processes(fewer, left, spec)
    assert rows_of(spec, again) == before
    assert num_bytes == spec.state_bytes


def test_a_state_stays_on_its_devices_where_the_rows_of_the_mesh_have_another_order(apart, state, monkeypatch):
    live, order = apart.spec.live, [2, 0, 3, 1]
    other = replace(live, rows=tuple(live.rows[row] for row in order), mesh=Mesh(live.mesh.devices[order], AXES))
    with monkeypatch.context() as patched:
        patched.setattr(transfer.np, "zeros", None)  # no array is made, not even for a moment
        moved = rebind_to_mesh(state, other, apart.spec.specs)
    before = rows_of(apart.spec, state)
    assert rows_of(apart.spec.at(other), moved) == [before[row] for row in order]
    leaf, same = jax.tree.leaves(state)[0], jax.tree.leaves(moved)[0]
    assert {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards} == {
        shard.data.unsafe_buffer_pointer() for shard in same.addressable_shards
    }


def test_who_is_to_hold_other_blocks_gets_them_and_who_joins_meanwhile_does(rig, apart, state):
    """Both pipelines are cut anew, so that a layer leaves its only workers; the first worker has just joined."""
    old = apart.spec
    anew = rig(**APART | {"cut": ((2, 2), (2, 2))}).spec
    new = replace(anew, live=old.live)
    has_R = [False, True, True, True]
    shared, has_arrived = jax.jit(collective_transfer(old, new, has_R))(emptied(old, state, [0]))
    assert jax.device_get(has_arrived).all()
    whole = {key: value for mine in rows_of(old, state) for key, value in mine.items()}
    found = rows_of(new, shared)
    attention = [[path for path, _ in mine if "'master'" in path and "'attention'" in path] for mine in found]
    assert [len(paths) for paths in attention] == [2, 2, 2, 2]
    for mine in found:
        assert all(whole[key] == value for key, value in mine.items())
    assert {key for mine in found for key in mine} == set(whole)


def test_who_takes_the_place_of_another_gets_its_blocks_and_his_own_again(apart, state):
    """0:0 and 1:1, each of three layers in a cut of its own, change places."""
    moves = Move((0, 0), (1, 1)), Move((1, 1), (0, 0))
    held = ChunkAssignment(tuple(map(tuple, apart.spec.chunks.stage_DB.tolist())), moves)
    away = spec_with_assignment(apart.spec, held)
    shared, has_arrived = jax.jit(collective_transfer(apart.spec, away, [True] * 4))(state)
    assert jax.device_get(has_arrived).all()
    before = dict(zip(apart.spec.live.workers, rows_of(apart.spec, state), strict=True))
    as_before = [before[worker] for worker in ((1, 1), (0, 1), (1, 0), (0, 0))]
    assert rows_of(away, shared) == as_before != [*before.values()]
    assert not away.has_same_chunks(apart.spec)
    home = spec_with_assignment(away, DEFAULT_ASSIGNMENT)
    assert home.live.rows == apart.spec.live.rows
    back, _ = jax.jit(collective_transfer(away, apart.spec, [True] * 4))(shared)
    assert rows_of(apart.spec, back) == [*before.values()]


def test_a_block_that_nobody_has_is_not_made_up(apart):
    with pytest.raises(AssertionError, match=r"no row has the chunks \[1\]"):
        collective_transfer(apart.spec, apart.spec, [False, True, True, False])


def test_in_a_round_every_row_has_to_do_with_one_chunk_and_one_row_gives_it(rig, apart):
    old, anew = apart.spec, rig(**APART | {"cut": ((2, 2), (3, 1))}).spec
    routes = Routes.of(old, replace(anew, live=old.live), [True] * 4)
    assert routes.old.chunks.sizes == routes.new.chunks.sizes == (1, 1, 1, 1)
    for chunk, giver in enumerate(routes.giver_C):
        assert routes.old.chunks.holds_HC[routes.old.holding_R[giver], chunk]
        (turn,) = np.flatnonzero((routes.chunk_RT == chunk).any(axis=0))
        rows = {giver, *np.flatnonzero(routes.takes_RC[:, chunk])}
        assert rows == set(np.flatnonzero(routes.chunk_RT[:, turn] == chunk))
        assert tuple(sorted(rows)) in routes.sums[turn].groups


def test_a_round_writes_only_what_has_arrived(rig, apart):
    """No round passes over all layers that a worker has, nor over the embedding but in that of the first chunk."""
    old, anew = apart.spec, rig(**APART | {"cut": ((2, 2), (3, 1))}).spec
    new = replace(anew, live=old.live)
    routes = Routes.of(old, new, [True] * 4)
    assert len(routes.sums) > 2

    program = jax.jit(collective_transfer(old, new, [True] * 4)).lower(old.abstract(with_slots=True)).as_text()
    counts = Counter(re.findall(r"stablehlo\.select .*tensor<([0-9x]+)xf64>", program))
    shapes = routes.shapes
    for leaf in jax.tree.leaves([shapes.master["expert"], shapes.master["attention"], shapes.slots["attention"]]):
        assert counts["x".join(map(str, leaf.shape))] == 0
    (embedding,) = jax.tree.leaves(shapes.master["embedding"])
    assert counts["x".join(map(str, embedding.shape))] > 0


def test_those_who_save_have_every_block_and_the_host_puts_them_in_the_order_of_a_checkpoint(rig, apart, state):
    """Those who save are one pipeline here; what is kept by more workers than are needed is one state all the same."""
    spec = apart.spec
    assert checkpoint_rows(spec) == (0, 1)
    assert checkpoint_rows(rig(**APART, failed=[(0, 0)]).spec) == (1, 2)
    host = jax.device_get(replace(state, slots={}))
    rows = [1, 2, 3]
    kept = spec.at(replace(spec.live, rows=tuple(spec.live.rows[row] for row in rows), virtual=True))
    stored = transfer_on_host(jax.tree.map(lambda leaf: leaf[rows], host), kept, spec.checkpoint_spec)
    assert stored.master["attention"].shape[:2] == (2, 3)
    whole = {key: value for mine in rows_of(spec, host) for key, value in mine.items()}
    for mine in rows_of(spec.checkpoint_spec, stored):
        assert all(whole[key] == value for key, value in mine.items())
    back = transfer_on_host(stored, spec.checkpoint_spec, spec)
    assert rows_of(spec, back) == rows_of(spec, host)
    assert transfer_on_host(host, spec, spec) is host


def test_a_tied_embedding_goes_to_every_worker(rig):
    spec = (one := rig(topology=(2, 2, 1), decoder="tied", window=1)).spec
    state = one.start(one.draw(0))
    shared, has_arrived = jax.jit(collective_transfer(spec, spec, [True, False, True, True]))(emptied(spec, state, [1]))
    assert jax.device_get(has_arrived).all()
    for held, before in ((shared.master, state.master), (shared.slots, state.slots)):
        np.testing.assert_array_equal(held["embedding"], before["embedding"])
