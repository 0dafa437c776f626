"""State of processes that each hold some rows of the mesh: fetched to the host, put back, and shared with joiners.

When a generation of processes ends, so does its backend (see ``swift.elastic.jax_group``): every process keeps its part
on the host and puts it on the devices of the next generation. A process that joins has no state; its row is copied from
a peer over the mesh, bit for bit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from swift.mesh.live import EXPERT_AXIS, RANKED, SHARED, LiveMesh, is_spec, map_specs
from swift.mesh.peer_reduce import PeerSum, how_unequal

Parts = list[np.ndarray]
"""A process's share of an array: one part for each of its devices, in mesh order."""


def fetch_parts(tree: Any) -> Any:
    """Fetches this process's share of every array to the host, as a tree of ``Parts``."""

    def parts(leaf: jax.Array) -> list[jax.Array]:
        part_on = {shard.device: shard.data for shard in leaf.addressable_shards}
        order = [device for device in leaf.sharding.mesh.devices.flat if device in part_on]  # type: ignore[attr-defined]
        return [part_on[device] for device in order]

    # np.array copies: on CPU a fetched array may be the device's own buffer, which is freed with its backend.
    return jax.tree.map(np.array, jax.device_get(jax.tree.map(parts, tree)))


def part_shapes(specs: Any, shapes: Any, num_devices: int) -> Any:
    """Describes a process's share of arrays.

    Args:
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        shapes: shapes and dtypes of the whole arrays, of any number of rows.
        num_devices: number of the process's devices.

    Returns:
        A tree as ``fetch_parts`` returns it, of ``jax.ShapeDtypeStruct``.
    """

    def shape(spec: PartitionSpec, whole: Any) -> list[jax.ShapeDtypeStruct]:
        dims = [1, *whole.shape[1:]]
        if spec == RANKED:
            dims[2] = 1
        return [jax.ShapeDtypeStruct(tuple(dims), whole.dtype)] * num_devices

    return map_specs(shape, specs, shapes)


def place_parts(parts: Any, live: LiveMesh, specs: Any, shapes: Any) -> Any:
    """Makes arrays on ``live`` from the parts of all processes.

    Args:
        parts: tree of ``Parts``; None for a process without state, which contributes zeros.
        live: mesh of this generation.
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        shapes: shapes and dtypes of the whole arrays.
    """
    here = [device for device in live.mesh.devices.flat if device.process_index == jax.process_index()]

    def place(spec: PartitionSpec, whole: jax.ShapeDtypeStruct, mine: Parts) -> jax.Array:
        arrays = jax.device_put(list(mine), here)
        return jax.make_array_from_single_device_arrays(whole.shape, live.shardings(spec), arrays)

    if parts is None:
        parts = jax.tree.map(lambda part: np.zeros(part.shape, part.dtype), part_shapes(specs, shapes, len(here)))
    return jax.tree.map(
        lambda spec, *below: jax.tree.map(partial(place, spec), *below), specs, shapes, parts, is_leaf=is_spec
    )


def giving_rows(stage_R: Sequence[int] | np.ndarray, has_R: Sequence[bool]) -> tuple[int, ...]:
    """Selects each stage's source row, the first one that has the state.

    Args:
        stage_R: stage served by each row.
        has_R: True for rows that have the state; every stage needs one.
    """
    giving: dict[int, int] = {}
    for row, (stage, has) in enumerate(zip(stage_R, has_R, strict=True)):
        if has:
            giving.setdefault(int(stage), row)
    assert giving.keys() == set(stage_R), f"only the stages {sorted(giving)} have a state"
    return tuple(giving[stage] for stage in sorted(giving))


def share_rows(live: LiveMesh, specs: Any, has_R: Sequence[bool]) -> Callable[[Any], Any]:
    """Makes a function, to be jitted, that copies the state of each stage's source row to its peers, bit for bit.

    Args:
        live: mesh of this generation.
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        has_R: True for rows that have the state; every stage needs one.

    Returns:
        A function from the state to (the shared state, bool[worker]: True where the received state has the checksum of
        the one sent).
    """
    gives_R = np.zeros(live.num_live, bool)
    gives_R[list(giving_rows(live.stage_R, has_R))] = True
    peer_sum = PeerSum(live.peers, how_unequal(live.mesh.devices.flat[0].platform))

    def per_rank(tree: Any) -> Any:
        gives = jnp.asarray(gives_R)[live.row_index()]
        bits = jax.tree.map(_to_bits, tree)
        given, checksum = peer_sum(jax.tree.map(lambda own: jnp.where(gives, own, 0), (bits, _checksum(bits))))
        num_wrong = lax.psum((_checksum(given) != checksum).astype(jnp.int32), EXPERT_AXIS)
        return jax.tree.map(_from_bits, given, tree), num_wrong == 0

    return live.per_rank(per_rank, (specs,), (specs, SHARED))


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
