"""State of processes that each hold some rows of the mesh: fetched to the host, put back, and copied to joiners.

When a generation of processes ends, so does its backend (see ``swift.elastic.jax_group``): every process keeps its part
on the host and puts it on the devices of the next generation. A process that joins has no state; its row is copied from
peers over the mesh, bit for bit.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from swift.mesh.live import LiveMesh
from swift.mesh.peer_reduce import PeerSum
from swift.mesh.per_rank import EXPERT_AXIS, RANKED, is_spec, map_specs

Shards = list[np.ndarray]
"""A process's share of an array: one shard for each of its devices, in mesh order."""


def fetch_shards(tree: Any) -> Any:
    """Fetches this process's share of every array to the host, as a tree of ``Shards``.

    On CPU they are views of the devices' own buffers, which are freed with their arrays or with the backend.
    """

    def shards(leaf: jax.Array) -> list[jax.Array]:
        shard_on = {shard.device: shard.data for shard in leaf.addressable_shards}
        order = [device for device in leaf.sharding.mesh.devices.flat if device in shard_on]  # type: ignore[attr-defined]
        return [shard_on[device] for device in order]

    return jax.device_get(jax.tree.map(shards, tree))


def shard_shapes(specs: Any, shapes: Any, num_devices: int) -> Any:
    """Describes a process's share of arrays.

    Args:
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        shapes: shapes and dtypes of the whole arrays, of any number of rows.
        num_devices: number of the process's devices.

    Returns:
        A tree as ``fetch_shards`` returns it, of ``jax.ShapeDtypeStruct``.
    """

    def shape(spec: PartitionSpec, whole: Any) -> list[jax.ShapeDtypeStruct]:
        dims = [1, *whole.shape[1:]]
        if spec == RANKED:
            dims[2] = 1
        return [jax.ShapeDtypeStruct(tuple(dims), whole.dtype)] * num_devices

    return map_specs(shape, specs, shapes)


def place_shards(shards: Any, live: LiveMesh, specs: Any, shapes: Any) -> Any:
    """Makes arrays on ``live`` from the shards of all processes.

    Args:
        shards: tree of ``Shards``; None for a process without state, which contributes zeros.
        live: mesh of this generation.
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        shapes: shapes and dtypes of the whole arrays.
    """
    here = [device for device in live.mesh.devices.flat if device.process_index == jax.process_index()]

    def place(spec: PartitionSpec, whole: jax.ShapeDtypeStruct, mine: Shards) -> jax.Array:
        arrays = jax.device_put(list(mine), here)
        return jax.make_array_from_single_device_arrays(whole.shape, live.shardings(spec), arrays)

    if shards is None:
        shards = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), shard_shapes(specs, shapes, len(here)))
    return jax.tree.map(
        lambda spec, *below: jax.tree.map(partial(place, spec), *below), specs, shapes, shards, is_leaf=is_spec
    )


def copy_bits(tree: Any, gives: jax.Array, peer_sum: PeerSum) -> tuple[Any, jax.Array]:
    """Copies a tree from the one row of each group that gives to all of its group, bit for bit; per rank.

    Args:
        tree: arrays of this rank.
        gives: whether this row gives, bool[]; one row of a group does, or none of a group that needs nothing.
        peer_sum: sum over the rows of a group.

    Returns:
        (the tree of the row that gives, or zeros; on how many expert ranks it has another checksum than it was sent
        with, int32[]).
    """
    bits = jax.tree.map(_to_bits, tree)
    given, checksum = peer_sum(jax.tree.map(lambda own: jnp.where(gives, own, 0), (bits, _checksum(bits))))
    num_wrong = lax.psum((_checksum(given) != checksum).astype(jnp.int32), EXPERT_AXIS)
    return jax.tree.map(_from_bits, given, tree), num_wrong


def _checksum(bits: Any) -> jax.Array:
    """Computes a 32-bit checksum of a tree of integers: a sum in which every position has a different odd weight."""
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
