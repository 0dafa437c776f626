"""The live mesh: a topology without its failed workers, laid out on devices, and the way to run per-rank code on it.

A mesh row, that is a coordinate on the axis ``worker``, is one live worker. Which worker that is and which stage it
serves is recorded in a table rather than by an axis: a worker may serve a stage other than its own, and a mesh with a
hole is still one SPMD program.

Every argument and result of a per-rank function is one of three kinds:

- ``RANKED`` ``[worker, layer, rank, ...]``: each expert rank has its own shard (slices, slots, sequences of a batch);
- ``SHARED`` ``[worker, ...]``: all expert ranks of a worker hold the same values (placement, counters, metrics);
- ``REPLICATED`` ``[...]``: all ranks of all workers hold the same values, without a ``worker`` dim (columns common to
  all workers); for arguments only.

A per-rank function sees ``[layer, ...]``, ``[...]`` and ``[...]``. It may use collectives over the axis ``expert`` but
must not branch on its own index there, so that the same code runs under ``shard_map`` on real or emulated devices and
under ``vmap`` as N virtual ranks on one device. The axis ``worker`` is named under ``shard_map`` only.

R: mesh rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from swift.errors import SettingError
from swift.mesh.collective_order import in_order
from swift.mesh.emulate import emulate_devices
from swift.mesh.host_order import order_by_host
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
    """Distinguishes specs (RANKED, SHARED or REPLICATED) from inner nodes of a tree of specs."""
    return isinstance(leaf, PartitionSpec)


def map_specs(f: Callable[[PartitionSpec, Any], Any], specs: Any, tree: Any) -> Any:
    """Maps ``f(spec, leaf)`` over ``tree``; ``specs`` may be a prefix of it."""
    return jax.tree.map(lambda spec, sub: jax.tree.map(lambda leaf: f(spec, leaf), sub), specs, tree, is_leaf=is_spec)


class MeshRow(NamedTuple):
    """A coordinate on the axis ``worker``: the worker that runs it, and the stage that it serves.

    Attributes:
        worker: (pipeline, stage) of the worker itself.
        stage: stage that it serves, its own unless roles have moved.
        pipeline: pipeline whose cut says what that stage holds; None: its own.
    """

    worker: Worker
    stage: int
    pipeline: int | None = None

    @property
    def role(self) -> Worker:
        """(pipeline, stage) whose blocks the worker holds."""
        return (self.worker[0] if self.pipeline is None else self.pipeline), self.stage


@dataclass(frozen=True)
class LiveMesh:
    """Live workers of a topology, laid out on devices.

    Attributes:
        topology: shape of the whole cluster.
        rows: worker and stage of every mesh row.
        mesh: devices ``[rows, expert ranks]`` with the axes ``worker`` and ``expert``; for virtual ranks, a mesh of one
            device.
        virtual: True if the expert ranks are a vmapped axis on one device.
    """

    topology: Topology
    rows: tuple[MeshRow, ...]
    mesh: Mesh
    virtual: bool = False

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Worker of every mesh row."""
        return tuple(row.worker for row in self.rows)

    @property
    def stage_R(self) -> Int[np.ndarray, " R"]:
        """Stage served by every mesh row, int32 ``[R]``."""
        return np.array([row.stage for row in self.rows], np.int32)

    @property
    def num_live(self) -> int:
        """Number of mesh rows, R: the live workers."""
        return len(self.rows)

    @property
    def num_ranks(self) -> int:
        """Expert ranks of a worker."""
        return self.topology.num_expert_ranks

    @property
    def failed(self) -> frozenset[Worker]:
        """Failed workers."""
        return frozenset(self.topology.workers) - frozenset(self.workers)

    @property
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """Mesh rows that serve each stage, ascending."""
        return tuple(
            tuple(index for index, row in enumerate(self.rows) if row.stage == stage)
            for stage in range(self.topology.num_stages)
        )

    @property
    def first_rows(self) -> tuple[int, ...]:
        """Lowest mesh row of each stage, which represents the stage."""
        return tuple(rows[0] for rows in self.peers)

    def with_rows(self, rows: tuple[MeshRow, ...]) -> "LiveMesh":
        """Makes a mesh with other rows on the devices of this one, which must include all their workers."""
        index = [self.workers.index(row.worker) for row in rows]
        return replace(self, rows=rows, mesh=self.mesh if self.virtual else Mesh(self.mesh.devices[index], AXES))

    def with_ranks(self, ranks: Sequence[int]) -> "LiveMesh":
        """Makes a mesh of the same rows with some of the expert ranks, on the same devices and renumbered in order."""
        topology = replace(self.topology, num_expert_ranks=len(ranks))
        mesh = self.mesh if self.virtual else Mesh(self.mesh.devices[:, list(ranks)], AXES)
        return replace(self, topology=topology, mesh=mesh)

    def row_index(self) -> Int[Array, ""]:
        """Mesh row that the calling per-rank function runs on, an int32 scalar.

        A constant if there is only one row: virtual ranks have no axis ``worker``.
        """
        return jnp.int32(0) if self.num_live == 1 else lax.axis_index(WORKER_AXIS)

    def shardings(self, specs: Any) -> Any:
        """Maps a tree of specs to shardings."""
        whole = PartitionSpec()
        return jax.tree.map(lambda s: NamedSharding(self.mesh, whole if self.virtual else s), specs, is_leaf=is_spec)

    def put(self, tree: Any, specs: Any) -> Any:
        """Puts host arrays of the kinds in ``specs`` on the mesh's devices; every process fills its own devices."""

        def put(spec: PartitionSpec, leaf: Any) -> jax.Array:
            leaf, sharding = np.asarray(leaf), self.shardings(spec)
            index_on = sharding.addressable_devices_indices_map(leaf.shape)
            arrays = jax.device_put([leaf[index] for index in index_on.values()], list(index_on))
            return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)

        return map_specs(put, specs, tree)

    def abstract(self, tree: Any, specs: Any) -> Any:
        """Describes the arrays that ``put`` would make: shapes, dtypes and shardings."""

        def abstract(spec: PartitionSpec, leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.shardings(spec))

        return map_specs(abstract, specs, tree)

    def per_rank(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Turns a per-rank function into a function of global arrays, to be jitted.

        Args:
            function: function of this rank's shards; see the module's docstring.
            in_specs: spec, or prefix tree of specs, for each argument.
            out_specs: the same for the result, without REPLICATED. A SHARED result must be equal on all ranks of a
                worker, so it has to be reduced first.
        """
        assert REPLICATED not in jax.tree.leaves(out_specs, is_leaf=is_spec), "results must have a worker dim"
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

        def leave(spec: PartitionSpec, shard: jax.Array) -> jax.Array:
            return shard[None, :, None] if spec == RANKED else shard[None]

        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        run = in_order(function, AXES) if on_cpu else function

        def body(*blocks: Any) -> Any:
            return map_specs(leave, out_specs, run(*map_specs(enter, in_specs, blocks)))

        # check_vma=False: peer groups of unequal sizes need it, and gradients are of local sums, reduced explicitly.
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
    """Fetches this process's first mesh row of SHARED arrays ``[worker, ...]`` to the host.

    It reads the devices' local shards: indexing sharded arrays op by op would run one program with collectives per op,
    and emulated devices can deadlock when many of those are in flight.
    """
    shards = jax.device_get(jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, tree))
    return jax.tree.map(lambda shard: shard[0], shards)


def own_rows(leaf: jax.Array) -> list[np.ndarray]:
    """Fetches this process's mesh rows of a SHARED array ``[worker, ...]`` to the host, ``[1, ...]`` each."""
    shards = {str(shard.index): shard.data for shard in leaf.addressable_shards}
    return [np.asarray(shard) for shard in jax.device_get(list(shards.values()))]


def live_mesh(
    topology: Topology,
    ranks: RankKind,
    failed: frozenset[Worker] = frozenset(),
    rows: tuple[MeshRow, ...] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> LiveMesh:
    """Lays out the live workers of ``topology`` on devices.

    A worker keeps its devices whichever other workers have failed, so that survivors keep their arrays; hence the
    devices of failed workers must exist, too.

    Args:
        topology: shape of the whole cluster.
        ranks: ``emulated`` CPU devices, the machine's own ``devices``, or ``virtual`` ranks on one device.
        failed: failed workers.
        rows: mesh rows: every live worker once, every stage at least once. By default, the live
            workers in mesh order, each serving its own stage.
        devices: available devices, in the order of the workers; by default JAX's own, those of several hosts in the
            order of ``order_by_host``. They may belong to a pod that is only described, for which programs can be
            compiled.

    Raises:
        SettingError: more ranks than devices, an unknown kind, virtual ranks with more than one worker, or failures
            that leave a stage without a live worker if ``rows`` is not given.
        EmulationError: emulated devices are requested after JAX has started.
    """
    if rows is None:
        rows = tuple(MeshRow(worker, worker[1]) for worker in topology.live_workers(failed))
    _check_rows(topology, failed, rows)
    if ranks not in RANK_KINDS:
        raise SettingError("ranks", ranks, f"choose one of {', '.join(RANK_KINDS)}")
    if ranks == "virtual":
        if len(topology.workers) > 1:
            shape = (topology.num_pipelines, topology.num_stages)
            raise SettingError("ranks", ranks, f"needs one pipeline of one stage, the topology has {shape}")
        grid = np.array(jax.devices()[:1]).reshape(1, 1)
        return LiveMesh(topology, rows, Mesh(grid, AXES), virtual=True)
    if devices is None and jax.distributed.is_initialized():
        devices = order_by_host(topology, jax.devices())
    elif ranks == "emulated" and devices is None:
        emulate_devices(topology.num_devices)
    devices, needed = devices or jax.devices(), topology.num_devices
    if needed > len(devices):
        raise SettingError(
            "Topology.num_expert_ranks",
            topology.num_expert_ranks,
            f"{len(topology.workers)} worker(s) with that many ranks need {needed} devices and there are "
            f"{len(devices)}; use fewer, or ranks 'emulated' or 'virtual'",
        )
    grid = np.array(devices[:needed]).reshape(len(topology.workers), topology.num_expert_ranks)
    index = [topology.workers.index(row.worker) for row in rows]
    return LiveMesh(topology, rows, Mesh(grid[index], AXES))


def storage_mesh(topology: Topology) -> LiveMesh:
    """Makes a mesh with one worker per stage, all on one device, which holds a checkpoint's state and runs nothing."""
    rows = tuple(MeshRow((0, stage), stage) for stage in range(topology.num_stages))
    grid = np.array(jax.devices()[:1]).reshape(1, 1)
    return LiveMesh(topology, rows, Mesh(grid, AXES), virtual=True)


def _check_rows(topology: Topology, failed: frozenset[Worker], rows: tuple[MeshRow, ...]) -> None:
    workers, stages = [row.worker for row in rows], {row.stage for row in rows}
    live = [worker for worker in topology.workers if worker not in failed]
    assert sorted(workers) == live, f"rows of workers {sorted(workers)}, but {live} are live"
    assert stages == set(range(topology.num_stages)), f"stages {sorted(stages)} of {topology.num_stages} are served"
