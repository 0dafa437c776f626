"""Transfer of mesh rows' state to other devices, hosts or processes.

Mesh rows move from one mesh to another by copies between devices; if the axis ``expert`` changes, they pass through the
host. When a generation of processes ends, so does its backend (see ``swift.elastic.jax_group``): every process keeps
its part on the host, as ``Shards``, and puts it on the devices of the next generation. A process that joins has no
state; its row is copied from peers over the mesh, bit for bit.

Legend: R mesh rows.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec, SingleDeviceSharding

from swift.mesh.live import LiveMesh
from swift.mesh.peer_sum import PeerAllReduce
from swift.mesh.per_rank import EXPERT_AXIS, RANKED, REPLICATED, is_spec, map_specs

Shards = list[np.ndarray]
"""A process's share of an array: one shard for each of its devices, in mesh order."""


def source_rows(old: LiveMesh, new: LiveMesh) -> tuple[int, ...]:
    """Finds, for each row in ``new``, the row in ``old`` that has its state.

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


def transfer_rows(tree: Any, old: LiveMesh, new: LiveMesh, specs: Any, source_R: Sequence[int]) -> Any:
    """Moves state to ``new``, without passing through the host: row r is row ``source_R[r]`` of the state on ``old``.

    A row whose devices stay the same shares its buffers with the old state, so neither state may be donated while the
    other is in use. Rows cannot move between processes, and a process without a device of the new mesh must not call
    this function.

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
    process = jax.process_index()
    routes = [pair for pair in _routes(old, new, source_R) if process in {device.process_index for device in pair}]
    assert all(a.process_index == b.process_index for a, b in routes), "another process holds the state"

    def move(spec: PartitionSpec, leaf: jax.Array) -> jax.Array:
        assert spec != REPLICATED, "only arrays with rows can be moved"
        kind = leaf.sharding.memory_kind
        before, after = (mesh.shardings(spec).with_memory_kind(kind) for mesh in (old, new))
        assert leaf.sharding.is_equivalent_to(before, leaf.ndim), f"{leaf.sharding} is not on the old mesh"
        shard_on = {shard.device: shard.data for shard in leaf.addressable_shards}

        def moved(source: jax.Device, target: jax.Device) -> jax.Array:
            sharding = SingleDeviceSharding(target, memory_kind=kind)
            return shard_on[source] if source == target else jax.device_put(shard_on[source], sharding)

        shape = (new.num_live, *leaf.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, after, [moved(*route) for route in routes])

    return map_specs(move, specs, tree)


def transferred_bytes(tree: Any, old: LiveMesh, new: LiveMesh, source_R: Sequence[int]) -> int:
    """Returns the bytes that ``transfer_rows`` with the same arguments copies between devices."""
    copies = 0 if new.virtual else sum(source != target for source, target in _routes(old, new, source_R))
    shard_bytes = (
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
    return copies * sum(shard_bytes)


def _routes(old: LiveMesh, new: LiveMesh, source_R: Sequence[int]) -> Iterator[tuple[jax.Device, jax.Device]]:
    """Pairs each device in ``new``, in mesh order, with the device in ``old`` that has its shard: (old, new)."""
    sources = old.mesh.devices[list(source_R)]
    return zip(sources.flat, new.mesh.devices.flat, strict=True)


def host_stages(tree: Any, live: LiveMesh, specs: Any, lost: Collection[tuple[int, int]] = ()) -> Any:
    """Copies each stage's state, from its lowest row, to the host, without the shards of lost ranks.

    Args:
        tree: arrays ``[worker, ...]`` on ``live``.
        live: mesh that holds the state; this process has all its devices.
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        lost: (stage, rank) pairs whose devices are not read; their values become NaN, so that any use of them is
            noticed.

    Returns:
        Arrays ``[P, ...]``.
    """
    lost_devices = set() if live.virtual else {live.mesh.devices[live.first_rows[stage], rank] for stage, rank in lost}

    def copy(spec: PartitionSpec, leaf: jax.Array) -> np.ndarray:
        array = np.empty(leaf.shape, leaf.dtype)
        for shard in leaf.addressable_shards:
            if shard.device not in lost_devices:
                array[shard.index] = shard.data
        stages = array[list(live.first_rows)]
        for stage, rank in lost if spec == RANKED else ():
            stages[stage, :, rank] = np.nan
        return stages

    return map_specs(copy, specs, tree)


def fetch_shards(tree: Any) -> Any:
    """Fetches this process's share of every array to the host, as ``Shards`` in the same tree.

    On CPU, the shards are views of the devices' buffers, which are freed together with their arrays or the backend.
    """

    def shards(leaf: jax.Array) -> list[jax.Array]:
        shard_on = {shard.device: shard.data for shard in leaf.addressable_shards}
        order = [device for device in leaf.sharding.mesh.devices.flat if device in shard_on]  # type: ignore[attr-defined]
        return [shard_on[device] for device in order]

    return jax.device_get(jax.tree.map(shards, tree))


def put_shards(shards: Any, live: LiveMesh, specs: Any, shapes: Any) -> Any:
    """Creates arrays on ``live`` from the shards of all processes.

    Args:
        shards: tree of this process's ``Shards``, or None for a process without state, which contributes zeros.
        live: mesh of this generation.
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        shapes: shapes and dtypes of the whole arrays.
    """
    local_devices = [device for device in live.mesh.devices.flat if device.process_index == jax.process_index()]

    def place(spec: PartitionSpec, abstract: jax.ShapeDtypeStruct, local_shards: Shards) -> jax.Array:
        arrays = jax.device_put(list(local_shards), local_devices)
        return jax.make_array_from_single_device_arrays(abstract.shape, live.shardings(spec), arrays)

    if shards is None:
        local_shapes = shard_shapes(specs, shapes, len(local_devices))
        shards = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), local_shapes)
    return jax.tree.map(
        lambda spec, *below: jax.tree.map(partial(place, spec), *below), specs, shapes, shards, is_leaf=is_spec
    )


def shard_shapes(specs: Any, shapes: Any, num_devices: int) -> Any:
    """Returns the shapes and dtypes for a process's share of arrays.

    Args:
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        shapes: shapes and dtypes of the whole arrays, with any number of rows.
        num_devices: number of devices of the process.

    Returns:
        A tree of ``jax.ShapeDtypeStruct`` with the structure of ``fetch_shards``'s result.
    """

    def shape(spec: PartitionSpec, abstract: Any) -> list[jax.ShapeDtypeStruct]:
        dims = [1, *abstract.shape[1:]]
        if spec == RANKED:
            dims[2] = 1
        return [jax.ShapeDtypeStruct(tuple(dims), abstract.dtype)] * num_devices

    return map_specs(shape, specs, shapes)


def broadcast_bits(tree: Any, gives: jax.Array, peer_sum: PeerAllReduce) -> tuple[Any, jax.Array]:
    """Copies a tree bit for bit from each group's sending row to all rows in the group; a per-rank function.

    Args:
        tree: arrays of this rank.
        gives: whether this row sends, bool[]; one row of a group does, or none if the group needs nothing.
        peer_sum: sum over the rows of a group.

    Returns:
        (the sending row's tree, or zeros if no row sends; number of this row's expert ranks whose checksum differs from
        the sender's, int32[]).
    """
    bits = jax.tree.map(_to_bits, tree)
    received, checksum = peer_sum(jax.tree.map(lambda leaf: jnp.where(gives, leaf, 0), (bits, _checksum(bits))))
    num_wrong = lax.psum((_checksum(received) != checksum).astype(jnp.int32), EXPERT_AXIS)
    return jax.tree.map(_from_bits, received, tree), num_wrong


def _checksum(bits: Any) -> jax.Array:
    """Computes a 32-bit checksum for a tree of integers: a sum with a different odd weight at every position."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(bits):
        words = leaf.reshape(-1)
        if words.dtype.itemsize > 4:
            words = words ^ (words >> 32)
        weights = 2 * lax.iota(jnp.uint32, words.size) + 1
        total = 31 * total + jnp.sum(words.astype(jnp.uint32) * weights, dtype=jnp.uint32)
    return total


def _to_bits(leaf: jax.Array) -> jax.Array:
    """Reinterprets floats as integers, whose sum with zeros is exact: -0.0 + 0.0 would lose its sign."""
    unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    return lax.bitcast_convert_type(leaf, unsigned).astype(jnp.promote_types(unsigned, jnp.uint32))


def _from_bits(bits: jax.Array, like: jax.Array) -> jax.Array:
    unsigned = jnp.dtype(f"uint{8 * like.dtype.itemsize}")
    return lax.bitcast_convert_type(bits.astype(unsigned), like.dtype)
