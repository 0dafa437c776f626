"""The live mesh: a topology without its failed workers, laid out on devices.

Each mesh row, a coordinate on the axis ``worker``, is one live worker. A table, rather than an axis, records which
worker it is and which stage it serves. So a worker may serve a stage other than its own, and a mesh in which workers
are missing still runs a single SPMD program.

The ranks of a worker exchange tokens and weights in expert layers, and the peers of a stage sum its gradients: far more
bytes than the activations between stages. So with several hosts, each host gets whole workers, and peers of a stage are
adjacent: expert ranks communicate within a host, stages between hosts.

Legend: R mesh rows.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from swift.errors import SettingError
from swift.mesh.devices import emulate_devices
from swift.mesh.per_rank import AXES, REPLICATED, WORKER_AXIS, is_spec, map_specs, sharded, vmapped
from swift.topology import RANK_KINDS, RankKind, Topology, Worker, worker_name

_MAX_HOSTS = 4
"""Maximum number of hosts that ``host_line`` lists."""


class MeshRow(NamedTuple):
    """Coordinate on the axis ``worker``: the worker that runs there, and the stage that it serves.

    Attributes:
        worker: (pipeline, stage) of the worker itself.
        stage: stage that the worker serves, its own unless roles have moved.
        pipeline: pipeline whose cut determines the blocks of that stage, or None for the worker's own pipeline.
    """

    worker: Worker
    stage: int
    pipeline: int | None = None

    @classmethod
    def at(cls, worker: Worker, role: Worker) -> "MeshRow":
        """Returns the row for a worker that holds a role's blocks; a role is (pipeline, stage)."""
        return cls(worker, role[1], None if role[0] == worker[0] else role[0])

    @property
    def role(self) -> Worker:
        """The (pipeline, stage) whose blocks the worker holds."""
        return (self.worker[0] if self.pipeline is None else self.pipeline), self.stage


@dataclass(frozen=True)
class LiveMesh:
    """Live workers of a topology, laid out on devices.

    Attributes:
        topology: shape of the whole cluster.
        rows: worker and stage of every mesh row.
        mesh: devices ``[rows, expert ranks]`` with the axes ``worker`` and ``expert``; for virtual ranks, a mesh of one
            device.
        virtual: whether the expert ranks are a vmapped axis on one device.
    """

    topology: Topology
    rows: tuple[MeshRow, ...]
    mesh: Mesh
    virtual: bool = False

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Workers of the mesh rows."""
        return tuple(row.worker for row in self.rows)

    @property
    def stage_R(self) -> Int[np.ndarray, " R"]:
        """Stage served by every mesh row, int32 ``[R]``."""
        return np.array([row.stage for row in self.rows], np.int32)

    @property
    def num_live(self) -> int:
        """Number of live workers, R, one per mesh row."""
        return len(self.rows)

    @property
    def num_ranks(self) -> int:
        """Number of expert ranks per worker."""
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

    @property
    def memory_kinds(self) -> frozenset[str]:
        """Kinds of memory that the devices have, as in ``Sharding.memory_kind``; they depend on the platform."""
        return frozenset(memory.kind for memory in self.mesh.devices.flat[0].addressable_memories())

    @property
    def is_local(self) -> bool:
        """Whether this process has some of the mesh's devices."""
        return jax.process_index() in {device.process_index for device in self.mesh.devices.flat}

    @property
    def share(self) -> dict[int, slice]:
        """Expert ranks whose state this process has, by stage; all ranks if the process has all devices of the mesh."""
        if {device.process_index for device in self.mesh.devices.flat} == {jax.process_index()}:
            return dict.fromkeys(range(self.topology.num_stages), slice(self.num_ranks))
        ranks_of: dict[int, set[int]] = {}
        for row, devices in zip(self.rows, self.mesh.devices, strict=True):
            local_ranks = {rank for rank, device in enumerate(devices) if device.process_index == jax.process_index()}
            ranks_of[row.stage] = ranks_of.get(row.stage, set()) | local_ranks
        return {stage: slice(min(ranks), max(ranks) + 1) for stage, ranks in ranks_of.items() if ranks}

    def with_rows(self, rows: tuple[MeshRow, ...]) -> "LiveMesh":
        """Returns a mesh with other rows on the same devices; their workers must be among those of this mesh."""
        index = [self.workers.index(row.worker) for row in rows]
        return replace(self, rows=rows, mesh=self.mesh if self.virtual else Mesh(self.mesh.devices[index], AXES))

    def with_ranks(self, ranks: Sequence[int]) -> "LiveMesh":
        """Returns a mesh with the same rows and some of the expert ranks, renumbered in order, on the same devices."""
        topology = replace(self.topology, num_expert_ranks=len(ranks))
        mesh = self.mesh if self.virtual else Mesh(self.mesh.devices[:, list(ranks)], AXES)
        return replace(self, topology=topology, mesh=mesh)

    def row_index(self) -> Int[Array, ""]:
        """Returns the mesh row on which the calling per-rank function runs, int32[].

        It is a constant if there is only one row, since virtual ranks have no axis ``worker``.
        """
        return jnp.int32(0) if self.num_live == 1 else lax.axis_index(WORKER_AXIS)

    def shardings(self, specs: Any) -> Any:
        """Maps a tree of specs to shardings."""
        replicated = PartitionSpec()
        return jax.tree.map(
            lambda s: NamedSharding(self.mesh, replicated if self.virtual else s), specs, is_leaf=is_spec
        )

    def put(self, tree: Any, specs: Any) -> Any:
        """Puts host arrays, of the kinds in ``specs``, on the mesh's devices; every process fills its own devices."""

        def put(spec: PartitionSpec, leaf: Any) -> jax.Array:
            leaf = np.asarray(leaf)
            return self._filled(spec, leaf.shape, leaf.__getitem__)

        return map_specs(put, specs, tree)

    def put_stages(self, tree: Any, specs: Any) -> Any:
        """Puts host arrays with one row per stage on all workers' devices; each worker gets its stage's row.

        Args:
            tree: arrays ``[P, ...]``; a process reads only the part that its own devices hold.
            specs: RANKED or SHARED for each array, or a prefix tree of them.
        """

        def put(spec: PartitionSpec, leaf: np.ndarray) -> jax.Array:
            def part(index: tuple[slice, ...]) -> np.ndarray:
                rows, *rest = index
                return leaf[(slice(None), *rest)][self.stage_R[rows]]

            return self._filled(spec, (self.num_live, *leaf.shape[1:]), part)

        return map_specs(put, specs, tree)

    def _filled(self, spec: PartitionSpec, shape: tuple[int, ...], part: Callable[[Any], np.ndarray]) -> jax.Array:
        """Creates an array; this process fills the shards on its own devices."""
        sharding = self.shardings(spec)
        index_on = sharding.addressable_devices_indices_map(shape)
        arrays = jax.device_put([part(index) for index in index_on.values()], list(index_on))
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def abstract(self, tree: Any, specs: Any) -> Any:
        """Describes the arrays that ``put`` would create: shapes, dtypes and shardings."""

        def abstract(spec: PartitionSpec, leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.shardings(spec))

        return map_specs(abstract, specs, tree)

    def per_rank(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Turns a per-rank function into a function of global arrays, to be jitted.

        Args:
            function: function of this rank's shards, see ``swift.mesh.per_rank``.
            in_specs: spec, or prefix tree of specs, for each argument.
            out_specs: spec, or prefix tree of specs, for the result; REPLICATED is not allowed. A SHARED result must be
                equal on all ranks of a worker, so the function must reduce it.
        """
        assert REPLICATED not in jax.tree.leaves(out_specs, is_leaf=is_spec), "results must have a worker dim"
        if self.virtual:
            return vmapped(function, in_specs, out_specs)
        return sharded(self.mesh, function, in_specs, out_specs)


def live_mesh(
    topology: Topology,
    ranks: RankKind,
    failed: frozenset[Worker] = frozenset(),
    rows: tuple[MeshRow, ...] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> LiveMesh:
    """Lays out the live workers of ``topology`` on devices.

    A worker's devices do not depend on which other workers have failed, so that survivors keep their arrays. Hence the
    devices of failed workers must exist, too.

    Args:
        topology: shape of the whole cluster.
        ranks: ``emulated`` CPU devices, the machine's own ``devices``, or ``virtual`` ranks on one device.
        failed: failed workers.
        rows: mesh rows, which contain every live worker once and every stage at least once; by default, the live
            workers in mesh order, each serving its own stage.
        devices: available devices, in worker order; by default JAX's own, with several hosts in the order of
            ``order_by_host``. They may be the devices of a described pod, to compile programs for it.

    Raises:
        SettingError: there are more ranks than devices, the kind of rank is unknown, there are virtual ranks with more
            than one worker, or failures leave a stage without a live worker and ``rows`` is not given.
        EmulationError: emulated devices are requested after JAX has started with fewer devices.
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


def _check_rows(topology: Topology, failed: frozenset[Worker], rows: tuple[MeshRow, ...]) -> None:
    workers, stages = [row.worker for row in rows], {row.stage for row in rows}
    live = [worker for worker in topology.workers if worker not in failed]
    assert sorted(workers) == live, f"rows of workers {sorted(workers)}, but {live} are live"
    assert stages == set(range(topology.num_stages)), f"stages {sorted(stages)} of {topology.num_stages} are served"


def storage_mesh(topology: Topology) -> LiveMesh:
    """Returns a mesh with one worker per stage that describes a checkpoint's state and runs nothing.

    All workers are on one device of this process, so that this process has the whole state.
    """
    rows = tuple(MeshRow((0, stage), stage) for stage in range(topology.num_stages))
    grid = np.array(jax.local_devices()[:1]).reshape(1, 1)
    return LiveMesh(topology, rows, Mesh(grid, AXES), virtual=True)


def local_row(tree: Any) -> Any:
    """Fetches this process's first mesh row of SHARED arrays ``[worker, ...]`` to the host.

    This reads the devices' local shards. Indexing a sharded array would run a program with collectives for each
    operation, and emulated devices can deadlock when many such programs are in flight.
    """
    shards = jax.device_get(jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, tree))
    return jax.tree.map(lambda shard: shard[0], shards)


def local_rows(leaf: jax.Array) -> list[np.ndarray]:
    """Fetches this process's mesh rows of a SHARED array ``[worker, ...]`` to the host, ``[1, ...]`` each."""
    shards = {str(shard.index): shard.data for shard in leaf.addressable_shards}
    return [np.asarray(shard) for shard in jax.device_get(list(shards.values()))]


def order_by_host(topology: Topology, devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Orders all hosts' devices for a topology's workers, worker by worker.

    Args:
        topology: shape of the whole cluster.
        devices: devices of all hosts, exactly as many as the topology needs, and equally many on each host.

    Raises:
        SettingError: the number of devices is wrong or differs between hosts, or neither of the numbers of ranks per
            worker and of devices per host divides the other.
    """
    num_ranks, needed = topology.num_expert_ranks, topology.num_devices
    by_host = sorted(devices, key=lambda device: (device.process_index, device.id))
    counts = list(Counter(device.process_index for device in by_host).values())
    num_hosts, per_host = len(counts), counts[0]
    if len(devices) != needed or set(counts) != {per_host}:
        have = f"{num_hosts} hosts have {_some(counts)}, {len(devices)} in all"
        raise SettingError("Topology", topology, f"needs {needed} devices, equally many on each host, and {have}")
    if per_host % num_ranks and num_ranks % per_host:
        allowed = f"must divide the {per_host} devices of a host, or be a multiple of them"
        raise SettingError("Topology.num_expert_ranks", num_ranks, allowed)
    stage_by_stage = sorted(topology.workers, key=lambda worker: (worker[1], worker[0]))
    first = {worker: number * num_ranks for number, worker in enumerate(stage_by_stage)}
    return [by_host[first[worker] + rank] for worker in topology.workers for rank in range(num_ranks)]


def _some(counts: Sequence[int]) -> str:
    """Formats the numbers of devices on the first few hosts, or a single number if all hosts have the same."""
    if len(set(counts)) == 1:
        return f"{counts[0]} each"
    return ", ".join([*map(str, counts[:_MAX_HOSTS]), *["and so on"] * (len(counts) > _MAX_HOSTS)])


def host_line(workers: Sequence[Worker], mesh: Mesh) -> str:
    """Returns one line that says which workers each host has.

    Args:
        workers: worker of every row of the mesh.
        mesh: devices ``[rows, expert ranks]``.
    """
    workers_by_host: dict[int, dict[str, None]] = {}
    for worker, devices in zip(workers, mesh.devices, strict=True):
        for device in devices:
            workers_by_host.setdefault(device.process_index, {})[worker_name(worker)] = None
    is_split = sum(map(len, workers_by_host.values())) > len(workers)
    ranks = "across hosts" if is_split else "within a host"
    shown = [f"host {host} has {', '.join(workers_by_host[host])}" for host in sorted(workers_by_host)[:_MAX_HOSTS]]
    rest = ["and so on"] if len(workers_by_host) > _MAX_HOSTS else []
    devices_text = f"{mesh.devices.size} devices on {len(workers_by_host)} hosts"
    return f"{devices_text}: expert ranks {ranks}, stages between hosts: {'; '.join(shown + rest)}"
