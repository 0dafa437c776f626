"""A checkpoint of a generation whose workers hold other blocks than those of the run, or have the places of others."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from swift.elastic.membership.messages import Process, StateId
from swift.elastic.services.checkpoint_service import ShardedState
from swift.elastic.state.store import SharedMemoryStore, process_parts
from swift.mesh.live import MeshRow, storage_mesh
from swift.models.cuts import Chunks
from swift.pipeline.reconfigure.transfer import transfer_on_host
from swift.schedules.plans.normalize import ChunkAssignment, Move
from swift.topology import Topology
from swift.train.build import make_step_spec

NOW = StateId(3, 7)
CUTS = {
    "a place in the other pipeline": (
        ((0, 0, 0, 1), (0, 0, 1, 1)),
        {(0, 0): (0, 0), (1, 0): (0, 1), (1, 1): (1, 1)},
    ),
    "a pipeline in which nobody has a place": (((0, 0, 0, 1), ()), {(1, 0): (0, 0), (0, 1): (0, 1)}),
}
"""Stage that holds each of four layers, by pipeline, and the place of each live worker."""


@pytest.mark.parametrize(("stage_DB", "place_of"), CUTS.values(), ids=CUTS)
def test_the_parts_of_those_who_have_the_places_are_the_checkpoint(two_ranks, tmp_path, stage_DB, place_of):
    setup = replace(two_ranks, topology=Topology(2, 2), model=replace(two_ranks.model, num_layers=4))
    spec = make_step_spec(setup, storage_mesh(setup.topology))
    stored = spec.checkpoint_spec
    whole = jax.device_get(stored.state_without_slots(jax.jit(spec.gpt.init)(jax.random.key(0))))

    rows = tuple(MeshRow(worker, place[1], place[0]) for worker, place in place_of.items())
    chunks = Chunks(spec.cut.moe_layers, (1,) * 4, tuple(stages or stage_DB[0] for stages in stage_DB))
    kept = replace(spec, live=replace(spec.live, rows=rows), chunks=chunks, worker_shapes=None)
    moved = transfer_on_host(whole, stored, kept)
    for row, worker in enumerate(place_of):
        store = SharedMemoryStore(tmp_path, Process(worker))
        store.save(NOW, process_parts(replace(kept.specs, slots={}), moved, row, [0]))

    moves = tuple(Move(worker, place) for worker, place in place_of.items() if worker != place)
    cut = ChunkAssignment(stage_DB, moves)
    parts = ShardedState(spec=spec, cut=cut, snapshots=tmp_path, by_rank=False, is_elastic=False)
    found = parts.joined(NOW, [Process(worker) for worker in place_of])
    jax.tree.map(np.testing.assert_array_equal, found, whole)
