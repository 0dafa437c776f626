"""State between processes, each of which has some rows of the mesh: to the host, back, and from a peer to a joiner.

When an epoch of processes ends, so does its backend (see ``swift.mesh.distributed``): every process keeps its own part
on the host and puts it on the devices of the next epoch. A process that joins has nothing; its row comes from a peer,
over the mesh and bit for bit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from swift.mesh.live import LiveMesh, is_spec, map_specs
from swift.mesh.peers import PeerSum, how_unequal

Parts = list[np.ndarray]
"""What a process has of an array: one part for each of its devices, in the order of the mesh."""


def fetch_parts(tree: Any) -> Any:
    """This process's part of every array, on the host: a tree of ``Parts``."""

    def parts(leaf: jax.Array) -> list[jax.Array]:
        part_on = {shard.device: shard.data for shard in leaf.addressable_shards}
        order = [device for device in leaf.sharding.mesh.devices.flat if device in part_on]  # type: ignore[attr-defined]
        return [part_on[device] for device in order]

    # Copies: on CPU what is fetched may be the device's own buffer, which ends with its backend.
    return jax.tree.map(np.array, jax.device_get(jax.tree.map(parts, tree)))


def place_parts(parts: Any, live: LiveMesh, specs: Any, shapes: Any) -> Any:
    """Arrays on ``live`` of which every process has given its part.

    Args:
        parts: a tree of ``Parts``, or None for a process that has nothing: zeros.
        live: the mesh of this epoch.
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        shapes: the whole arrays' shapes and types.
    """
    here = [device for device in live.mesh.devices.flat if device.process_index == jax.process_index()]

    def nothing(spec: PartitionSpec, whole: jax.ShapeDtypeStruct) -> Parts:
        return [np.zeros(live.shardings(spec).shard_shape(whole.shape), whole.dtype)] * len(here)

    def place(spec: PartitionSpec, whole: jax.ShapeDtypeStruct, mine: Parts) -> jax.Array:
        arrays = jax.device_put(list(mine), here)
        return jax.make_array_from_single_device_arrays(whole.shape, live.shardings(spec), arrays)

    parts = map_specs(nothing, specs, shapes) if parts is None else parts
    return jax.tree.map(
        lambda spec, *below: jax.tree.map(partial(place, spec), *below), specs, shapes, parts, is_leaf=is_spec
    )


def share_rows(live: LiveMesh, specs: Any, has_R: Sequence[bool]) -> Callable[[Any], Any]:
    """A function, to be jitted, that fills the rows of those who have nothing with that of a peer, bit for bit.

    Args:
        live: the mesh of this epoch.
        specs: RANKED or SHARED for each array, or a prefix tree of them.
        has_R: whose rows are the state; every stage needs one.
    """
    gives_R = np.zeros(live.num_rows, bool)
    for rows in live.peers:
        gives_R[next(row for row in rows if has_R[row])] = True
    peer_sum = PeerSum(live.peers, how_unequal(live.mesh.devices.flat[0].platform))

    def per_rank(tree: Any) -> Any:
        gives = jnp.asarray(gives_R)[live.row_index()]
        bits = jax.tree.map(lambda leaf: jnp.where(gives, _to_bits(leaf), 0), tree)
        return jax.tree.map(_from_bits, peer_sum(bits), tree)

    return live.per_rank(per_rank, (specs,), specs)


def _to_bits(leaf: jax.Array) -> jax.Array:
    """As integers, whose sum with zeros is exact: that of -0.0 and 0.0 is not."""
    unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    return lax.bitcast_convert_type(leaf, unsigned).astype(jnp.promote_types(unsigned, jnp.uint32))


def _from_bits(bits: jax.Array, like: jax.Array) -> jax.Array:
    unsigned = jnp.dtype(f"uint{8 * like.dtype.itemsize}")
    return lax.bitcast_convert_type(bits.astype(unsigned), like.dtype)
