"""The live mesh: a topology without its failed workers, laid on devices, and the one way to run per-rank code on it.

A row of the mesh axis ``worker`` is one live worker. Which worker that is, and which stage it serves, is a table and
not an axis: a worker may serve another stage than its own, and a mesh with a hole is still one SPMD program.

Every array that crosses the border of a per-rank function is one of three kinds:

- ``RANKED`` ``[worker, row, rank, ...]``: each expert rank has its own part (slices, slots, sequences of a batch);
- ``SHARED`` ``[worker, ...]``: all expert ranks of a worker hold the same (placement, counters, metrics);
- ``REPLICATED`` ``[...]``: all ranks of all workers hold the same, and there is no ``worker`` dim (the columns that are
  common to all workers); for arguments only.

A per-rank function sees ``[row, ...]``, ``[...]`` and ``[...]``. It may use collectives over the axis ``expert`` and
must not branch on its own index there: then the same code runs under ``shard_map`` on real or emulated devices and
under ``vmap`` as N virtual ranks on one device. The axis ``worker`` has a name under ``shard_map`` only.

R: rows of the axis ``worker``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swift.errors import SettingError
from swift.mesh.collective_order import in_order
from swift.mesh.emulate import emulate_devices
from swift.topology import Topology, Worker

WORKER_AXIS = "worker"
EXPERT_AXIS = "expert"
RANKED = PartitionSpec(WORKER_AXIS, None, EXPERT_AXIS)
SHARED = PartitionSpec(WORKER_AXIS)
AXES = (WORKER_AXIS, EXPERT_AXIS)
REPLICATED = PartitionSpec()

RankKind = Literal["emulated", "devices", "virtual"]
RANK_KINDS: tuple[str, ...] = ("emulated", "devices", "virtual")


def is_spec(leaf: Any) -> bool:
    """Whether ``leaf`` is a spec, RANKED, SHARED or REPLICATED, in a tree of specs."""
    return isinstance(leaf, PartitionSpec)


def map_specs(f: Callable[[PartitionSpec, Any], Any], specs: Any, tree: Any) -> Any:
    """Maps ``f(spec, leaf)`` over ``tree``, of which ``specs`` may be a prefix."""
    return jax.tree.map(lambda spec, sub: jax.tree.map(lambda leaf: f(spec, leaf), sub), specs, tree, is_leaf=is_spec)


class MeshRow(NamedTuple):
    """A row of the axis ``worker``: the worker that runs it, and the stage that it serves."""

    worker: Worker
    stage: int


@dataclass(frozen=True)
class LiveMesh:
    """The live workers of a topology on devices.

    Attributes:
        topology: the whole cluster.
        places: for every row of the axis ``worker``, who runs it and for which stage.
        mesh: ``[rows, expert ranks]`` devices with the axes ``worker`` and ``expert``; for virtual ranks a mesh of the
            one device.
        virtual: whether the expert ranks are a vmapped axis of one device.
    """

    topology: Topology
    places: tuple[MeshRow, ...]
    mesh: Mesh
    virtual: bool = False

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The worker of every row."""
        return tuple(place.worker for place in self.places)

    @property
    def stage_R(self) -> np.ndarray:
        """The stage that every row serves, int32 ``[R]``."""
        return np.array([place.stage for place in self.places], np.int32)

    @property
    def num_live(self) -> int:
        """Rows of the axis ``worker``, R: the live workers."""
        return len(self.places)

    @property
    def num_ranks(self) -> int:
        """Expert ranks of a worker."""
        return self.topology.num_expert_ranks

    @property
    def failed(self) -> frozenset[Worker]:
        """The workers that are down."""
        return frozenset(self.topology.workers) - frozenset(self.workers)

    @property
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """For every stage, the rows that serve it, ascending."""
        return tuple(
            tuple(row for row, place in enumerate(self.places) if place.stage == stage)
            for stage in range(self.topology.num_stages)
        )

    @property
    def first_rows(self) -> tuple[int, ...]:
        """For every stage, the lowest of its rows: the one that speaks for the stage."""
        return tuple(rows[0] for rows in self.peers)

    def with_places(self, places: tuple[MeshRow, ...]) -> "LiveMesh":
        """Other rows on the devices of this mesh, which has those of all workers that are asked for."""
        rows = [self.workers.index(place.worker) for place in places]
        return replace(self, places=places, mesh=self.mesh if self.virtual else Mesh(self.mesh.devices[rows], AXES))

    def with_ranks(self, ranks: Sequence[int]) -> "LiveMesh":
        """The same rows on some of the expert ranks, which keep their devices and are numbered anew in their order."""
        topology = replace(self.topology, num_expert_ranks=len(ranks))
        mesh = self.mesh if self.virtual else Mesh(self.mesh.devices[:, list(ranks)], AXES)
        return replace(self, topology=topology, mesh=mesh)

    def row_index(self) -> jax.Array:
        """The row that a per-rank function runs for, an int32 scalar; only inside of one.

        A constant where there is one row: virtual ranks have no axis ``worker`` to ask.
        """
        return jnp.int32(0) if self.num_live == 1 else lax.axis_index(WORKER_AXIS)

    def shardings(self, specs: Any) -> Any:
        """The tree of shardings for a tree of specs."""
        whole = PartitionSpec()
        return jax.tree.map(lambda s: NamedSharding(self.mesh, whole if self.virtual else s), specs, is_leaf=is_spec)

    def put(self, tree: Any, specs: Any) -> Any:
        """Puts host arrays, laid out as this module says, on the mesh's devices; every process those on its own."""

        def put(spec: PartitionSpec, leaf: Any) -> jax.Array:
            leaf, sharding = np.asarray(leaf), self.shardings(spec)
            parts = sharding.addressable_devices_indices_map(leaf.shape)
            arrays = jax.device_put([leaf[part] for part in parts.values()], list(parts))
            return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)

        return map_specs(put, specs, tree)

    def abstract(self, tree: Any, specs: Any) -> Any:
        """Shapes, types and shardings of what ``put`` would make of host arrays."""

        def abstract(spec: PartitionSpec, leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.shardings(spec))

        return map_specs(abstract, specs, tree)

    def per_rank(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Turns a per-rank function into one on global arrays; jit it.

        Args:
            function: sees this rank's parts only, see the module's docstring.
            in_specs: a spec, or a prefix tree of specs, for each argument.
            out_specs: the same for the result, without REPLICATED. A SHARED result must be equal on all ranks of a
                worker: reduce it first.
        """
        assert REPLICATED not in jax.tree.leaves(out_specs, is_leaf=is_spec), "a result has a worker dim"
        return (
            self._vmapped(function, in_specs, out_specs)
            if self.virtual
            else self._sharded(function, in_specs, out_specs)
        )

    def _sharded(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        def enter(spec: PartitionSpec, block: jax.Array) -> jax.Array:
            if spec == REPLICATED:
                return block
            return block[0, :, 0] if spec == RANKED else block[0]

        def leave(spec: PartitionSpec, part: jax.Array) -> jax.Array:
            return part[None, :, None] if spec == RANKED else part[None]

        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        run = in_order(function, AXES) if on_cpu else function

        def body(*blocks: Any) -> Any:
            return map_specs(leave, out_specs, run(*map_specs(enter, in_specs, blocks)))

        # check_vma=False: unequal groups of peers need it, and gradients are of local sums, reduced by hand.
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _vmapped(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        def axes(specs: Any) -> Any:
            return jax.tree.map(lambda spec: 1 if spec == RANKED else None, specs, is_leaf=is_spec)

        mapped = jax.vmap(function, in_axes=axes(in_specs), out_axes=axes(out_specs), axis_name=EXPERT_AXIS)

        def enter(spec: PartitionSpec, array: jax.Array) -> jax.Array:
            return array if spec == REPLICATED else array[0]

        def body(*arrays: Any) -> Any:
            return jax.tree.map(lambda a: a[None], mapped(*map_specs(enter, in_specs, arrays)))

        return body


def own_row(tree: Any) -> Any:
    """The first row that this process has of SHARED arrays ``[worker, ...]``, on the host.

    From the devices' own parts: op by op on sharded arrays, each op would be a program with collectives of its own, and
    emulated devices can deadlock when many of them are under way.
    """
    parts = jax.device_get(jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, tree))
    return jax.tree.map(lambda part: part[0], parts)


def live_mesh(
    topology: Topology,
    ranks: RankKind,
    failed: frozenset[Worker] = frozenset(),
    places: tuple[MeshRow, ...] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> LiveMesh:
    """Lays the live workers of ``topology`` on devices.

    A worker has the same devices whoever else has failed, so that survivors keep their arrays; hence the devices of
    failed workers have to be there too.

    Args:
        topology: the whole cluster.
        ranks: ``emulated`` CPU devices, the machine's own ``devices``, or ``virtual`` ranks of one device.
        failed: the workers that are down.
        places: the rows of the axis ``worker``: every live worker once, every stage at least once. Unless given, the
            live workers in mesh order, each serving its own stage.
        devices: those there are, in the order of the workers; JAX's own unless given. They may be of a pod that is only
            described, for which programs can be compiled.

    Raises:
        SettingError: more ranks than devices, an unknown kind, virtual ranks with more than one worker, or a failure
            set that leaves a stage without a live worker and no ``places`` that say who serves it.
        EmulationError: emulated devices are asked for after JAX has started.
    """
    if places is None:
        places = tuple(MeshRow(worker, worker[1]) for worker in topology.live_workers(failed))
    _check_places(topology, failed, places)
    if ranks not in RANK_KINDS:
        raise SettingError("ranks", ranks, f"choose one of {', '.join(RANK_KINDS)}")
    if ranks == "virtual":
        if len(topology.workers) > 1:
            shape = (topology.num_pipelines, topology.num_stages)
            raise SettingError("ranks", ranks, f"needs one pipeline of one stage, the topology has {shape}")
        grid = np.array(jax.devices()[:1]).reshape(1, 1)
        return LiveMesh(topology, places, Mesh(grid, AXES), virtual=True)
    if ranks == "emulated" and devices is None:
        emulate_devices(topology.num_devices)
    devices, needed = devices or jax.devices(), topology.num_devices
    if needed > len(devices):
        raise SettingError(
            "Topology.num_expert_ranks",
            topology.num_expert_ranks,
            f"{len(topology.workers)} worker(s) of so many ranks need {needed} devices and there are {len(devices)}; "
            "use fewer, or ranks 'emulated' or 'virtual'",
        )
    grid = np.array(devices[:needed]).reshape(len(topology.workers), topology.num_expert_ranks)
    rows = [topology.workers.index(place.worker) for place in places]
    return LiveMesh(topology, places, Mesh(grid[rows], AXES))


def storage_mesh(topology: Topology) -> LiveMesh:
    """One worker for each stage, all on one device: holds what a checkpoint has, and runs nothing."""
    places = tuple(MeshRow((0, stage), stage) for stage in range(topology.num_stages))
    grid = np.array(jax.devices()[:1]).reshape(1, 1)
    return LiveMesh(topology, places, Mesh(grid, AXES), virtual=True)


def _check_places(topology: Topology, failed: frozenset[Worker], places: tuple[MeshRow, ...]) -> None:
    workers, stages = [place.worker for place in places], {place.stage for place in places}
    live = [worker for worker in topology.workers if worker not in failed]
    assert sorted(workers) == live, f"rows of {sorted(workers)}, live are {live}"
    assert stages == set(range(topology.num_stages)), f"of {topology.num_stages} stages, {sorted(stages)} are served"
