"""Per-rank code: turns functions on one rank's shards into functions on global arrays.

Every argument and result of a per-rank function is one of three kinds:

- ``RANKED`` ``[worker, layer, rank, ...]``: each expert rank has its own shard (slices, slots, sequences of a batch);
- ``SHARED`` ``[worker, ...]``: all expert ranks of a worker hold the same values (placement, counters, metrics);
- ``REPLICATED`` ``[...]``: all ranks of all workers hold the same values, without a ``worker`` dim (such as the table
  columns that all workers share); for arguments only.

A per-rank function sees ``[layer, ...]``, ``[...]`` and ``[...]``. It may use collectives over the axis ``expert`` but
must not branch on its own index there, so that the same code runs under ``shard_map`` on real or emulated devices and
under ``vmap`` as N virtual ranks on one device. The axis ``worker`` exists only under ``shard_map``.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from swift.mesh.collective_order import in_order

WORKER_AXIS = "worker"
EXPERT_AXIS = "expert"
RANKED = PartitionSpec(WORKER_AXIS, None, EXPERT_AXIS)
SHARED = PartitionSpec(WORKER_AXIS)
AXES = (WORKER_AXIS, EXPERT_AXIS)
REPLICATED = PartitionSpec()


def known_platform() -> str | None:
    """Finds the platform of the enclosing ``shard_map``'s devices; None outside one, or if its devices are unknown."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform


def is_spec(leaf: Any) -> bool:
    """Whether a node in a tree of specs is a spec (RANKED, SHARED or REPLICATED) rather than an inner node."""
    return isinstance(leaf, PartitionSpec)


def map_specs(f: Callable[[PartitionSpec, Any], Any], specs: Any, tree: Any) -> Any:
    """Maps ``f(spec, leaf)`` over ``tree``; ``specs`` may be a prefix tree of it."""
    return jax.tree.map(lambda spec, sub: jax.tree.map(lambda leaf: f(spec, leaf), sub), specs, tree, is_leaf=is_spec)


def sharded(mesh: Mesh, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
    """Returns a function that runs a per-rank function on the devices of a mesh, with ``shard_map``."""

    def enter(spec: PartitionSpec, block: jax.Array) -> jax.Array:
        if spec == REPLICATED:
            return block
        return block[0, :, 0] if spec == RANKED else block[0]

    def leave(spec: PartitionSpec, shard: jax.Array) -> jax.Array:
        return shard[None, :, None] if spec == RANKED else shard[None]

    on_cpu = mesh.devices.flat[0].platform == "cpu"
    run = in_order(function, AXES) if on_cpu else function

    def body(*blocks: Any) -> Any:
        return map_specs(leave, out_specs, run(*map_specs(enter, in_specs, blocks)))

    # check_vma=False: peer groups of unequal sizes need it, and gradients of local sums are reduced explicitly.
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def vmapped(function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
    """Returns a function that runs a per-rank function as virtual ranks on one device, with ``vmap``."""

    def axes(specs: Any) -> Any:
        return jax.tree.map(lambda spec: 1 if spec == RANKED else None, specs, is_leaf=is_spec)

    mapped = jax.vmap(function, in_axes=axes(in_specs), out_axes=axes(out_specs), axis_name=EXPERT_AXIS)

    def enter(spec: PartitionSpec, array: jax.Array) -> jax.Array:
        return array if spec == REPLICATED else array[0]

    def body(*arrays: Any) -> Any:
        return jax.tree.map(lambda a: a[None], mapped(*map_specs(enter, in_specs, arrays)))

    return body
