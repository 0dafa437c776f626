"""Transfer of state between configurations: mesh rows move from one mesh to another, from device to device.

Where the axis ``expert`` changes, they pass through the host.

R: mesh rows.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, SingleDeviceSharding

from swift.mesh.live import LiveMesh
from swift.mesh.per_rank import RANKED, REPLICATED, map_specs


def source_rows(old: LiveMesh, new: LiveMesh) -> tuple[int, ...]:
    """Finds the row of ``old`` that has the state of each row of ``new``.

    A worker that keeps serving its stage keeps its state. Any other worker, rejoined or in a new role, copies it from
    the first row of its stage whose worker survives, or from a departing worker if none does.

    Args:
        old: mesh that holds the state; it serves every stage.
        new: mesh to which the state moves, of the same topology.

    Returns:
        Rows of ``old``, one for each row of ``new``.
    """
    index_of = {row: index for index, row in enumerate(old.rows)}
    served = {row.stage for row in old.rows}
    assert all(row.stage in served for row in new.rows), f"only stages {sorted(served)} have a state"
    living = set(new.workers)
    giver_P = [min(peers, key=lambda row: (old.rows[row].worker not in living, row), default=-1) for peers in old.peers]
    return tuple(index_of.get(row, giver_P[row.stage]) for row in new.rows)


def move_rows(tree: Any, old: LiveMesh, new: LiveMesh, specs: Any, source_R: Sequence[int]) -> Any:
    """Moves state to ``new`` so that row r is row ``source_R[r]`` of the state on ``old``, without using the host.

    A row whose devices stay the same is not copied but shares its buffers, so neither state may be donated while the
    other is in use. No row moves between processes; one that has no device of the new mesh must not call this.

    Args:
        tree: arrays ``[worker, ...]`` on ``old``.
        old: mesh that holds the state.
        new: mesh to which the state moves, of the same topology.
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        source_R: row of ``old`` for each row of ``new``, as from ``source_rows``.
    """
    assert old.topology == new.topology
    assert len(source_R) == new.num_live
    if new.virtual:
        return tree
    here = jax.process_index()
    routes = [pair for pair in _routes(old, new, source_R) if here in {device.process_index for device in pair}]
    assert all(one.process_index == two.process_index for one, two in routes), "another process holds the state"

    def move(spec: PartitionSpec, leaf: jax.Array) -> jax.Array:
        assert spec != REPLICATED, "only arrays with rows can be moved"
        kind = leaf.sharding.memory_kind
        before, after = (mesh.shardings(spec).with_memory_kind(kind) for mesh in (old, new))
        assert leaf.sharding.is_equivalent_to(before, leaf.ndim), f"{leaf.sharding} is not on the old mesh"
        shard_on = {shard.device: shard.data for shard in leaf.addressable_shards}

        def moved(here: jax.Device, there: jax.Device) -> jax.Array:
            at = SingleDeviceSharding(there, memory_kind=kind)
            return shard_on[here] if here == there else jax.device_put(shard_on[here], at)

        shape = (new.num_live, *leaf.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, after, [moved(*route) for route in routes])

    return map_specs(move, specs, tree)


def host_stages(tree: Any, live: LiveMesh, specs: Any, lost: Collection[tuple[int, int]] = ()) -> Any:
    """Copies the state of every stage, from its lowest row, to the host, without the shards of lost ranks.

    Args:
        tree: arrays ``[worker, ...]`` on ``live``.
        live: mesh that holds the state; this process has all its devices.
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        lost: (stage, rank) pairs whose devices are not read; their values become NaN, so that any use of
            them shows.

    Returns:
        Arrays ``[P, ...]``.
    """
    gone = set() if live.virtual else {live.mesh.devices[live.first_rows[stage], rank] for stage, rank in lost}

    def copy(spec: PartitionSpec, leaf: jax.Array) -> np.ndarray:
        whole = np.empty(leaf.shape, leaf.dtype)
        for shard in leaf.addressable_shards:
            if shard.device not in gone:
                whole[shard.index] = shard.data
        stages = whole[list(live.first_rows)]
        for stage, rank in lost if spec == RANKED else ():
            stages[stage, :, rank] = np.nan
        return stages

    return map_specs(copy, specs, tree)


def moved_bytes(tree: Any, old: LiveMesh, new: LiveMesh, source_R: Sequence[int]) -> int:
    """Bytes that ``move_rows`` copies between devices for the same arguments."""
    copies = 0 if new.virtual else sum(here != there for here, there in _routes(old, new, source_R))
    shard_bytes = (
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
    return copies * sum(shard_bytes)


def _routes(old: LiveMesh, new: LiveMesh, source_R: Sequence[int]) -> Iterator[tuple[jax.Device, jax.Device]]:
    """Pairs each device of ``new``, in mesh order, with the device of ``old`` that has its shard: (old, new)."""
    sources = old.mesh.devices[list(source_R)]
    return zip(sources.flat, new.mesh.devices.flat, strict=True)
