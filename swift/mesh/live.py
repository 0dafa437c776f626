"""The live mesh: a topology without its failed workers, laid on devices, and the one way to run per-rank code on it.

Every array that crosses the border of a per-rank function has a leading ``worker`` dim and is one of two kinds:

- ``RANKED`` ``[worker, row, rank, ...]``: each expert rank has its own part (slices, slots, sequences of a batch);
- ``SHARED`` ``[worker, ...]``: all expert ranks of a worker hold the same (placement, counters, metrics).

A per-rank function sees ``[row, ...]`` and ``[...]``. It may use collectives over the axis ``expert`` and must not
branch on its own index: then the same code runs under ``shard_map`` on real or emulated devices and under ``vmap``
as N virtual ranks on one device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swift.errors import SettingError
from swift.mesh.emulate import emulate_devices
from swift.topology import Topology, Worker

WORKER_AXIS = "worker"
EXPERT_AXIS = "expert"
RANKED = PartitionSpec(WORKER_AXIS, None, EXPERT_AXIS)
SHARED = PartitionSpec(WORKER_AXIS)

RankKind = Literal["emulated", "devices", "virtual"]
RANK_KINDS: tuple[str, ...] = ("emulated", "devices", "virtual")


def is_spec(leaf: Any) -> bool:
    """Whether ``leaf`` is a spec, RANKED or SHARED, in a tree of specs."""
    return isinstance(leaf, PartitionSpec)


def map_specs(f: Callable[[PartitionSpec, Any], Any], specs: Any, tree: Any) -> Any:
    """Maps ``f(spec, leaf)`` over ``tree``, of which ``specs`` may be a prefix."""
    return jax.tree.map(lambda spec, sub: jax.tree.map(lambda leaf: f(spec, leaf), sub), specs, tree, is_leaf=is_spec)


@dataclass(frozen=True)
class LiveMesh:
    """The live workers of a topology on devices.

    Attributes:
        topology: the whole cluster.
        failed: the workers that are down.
        mesh: ``[live workers, expert ranks]`` devices with the axes ``worker`` and ``expert``; for virtual ranks a
            mesh of the one device.
        virtual: whether the expert ranks are a vmapped axis of one device.
    """

    topology: Topology
    failed: frozenset[Worker] = field(default_factory=frozenset)
    mesh: Mesh = None  # type: ignore[assignment]
    virtual: bool = False

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The live workers, in the order of the rows of axis ``worker``."""
        return self.topology.live_workers(self.failed)

    @property
    def num_ranks(self) -> int:
        """Expert ranks of a worker."""
        return self.topology.num_expert_ranks

    def shardings(self, specs: Any) -> Any:
        """The tree of shardings for a tree of specs."""
        whole = PartitionSpec()
        return jax.tree.map(lambda s: NamedSharding(self.mesh, whole if self.virtual else s), specs, is_leaf=is_spec)

    def put(self, tree: Any, specs: Any) -> Any:
        """Puts host arrays, laid out as this module says, on the mesh's devices."""
        return map_specs(lambda spec, leaf: jax.device_put(leaf, self.shardings(spec)), specs, tree)

    def per_rank(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Turns a per-rank function into one on global arrays; jit it.

        Args:
            function: sees this rank's parts only, see the module's docstring.
            in_specs: a spec, or a prefix tree of specs, for each argument.
            out_specs: the same for the result. A SHARED result must be equal on all ranks: reduce it first.
        """
        return (
            self._vmapped(function, in_specs, out_specs)
            if self.virtual
            else self._sharded(function, in_specs, out_specs)
        )

    def _sharded(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        def enter(spec: PartitionSpec, block: jax.Array) -> jax.Array:
            return block[0, :, 0] if spec == RANKED else block[0]

        def leave(spec: PartitionSpec, part: jax.Array) -> jax.Array:
            return part[None, :, None] if spec == RANKED else part[None]

        def body(*blocks: Any) -> Any:
            return map_specs(leave, out_specs, function(*map_specs(enter, in_specs, blocks)))

        # check_vma=False: unequal groups of peers need it, and gradients are of local sums, reduced by hand.
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _vmapped(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        def axes(specs: Any) -> Any:
            return jax.tree.map(lambda spec: 1 if spec == RANKED else None, specs, is_leaf=is_spec)

        mapped = jax.vmap(function, in_axes=axes(in_specs), out_axes=axes(out_specs), axis_name=EXPERT_AXIS)

        def body(*arrays: Any) -> Any:
            return jax.tree.map(lambda a: a[None], mapped(*jax.tree.map(lambda a: a[0], arrays)))

        return body


def live_mesh(topology: Topology, ranks: RankKind, failed: frozenset[Worker] = frozenset()) -> LiveMesh:
    """Lays the live workers of ``topology`` on devices.

    Args:
        topology: the whole cluster.
        ranks: ``emulated`` CPU devices, the machine's own ``devices``, or ``virtual`` ranks of one device.
        failed: the workers that are down.

    Raises:
        SettingError: more ranks than devices, an unknown kind, virtual ranks with more than one worker, or a failure
            set that leaves a stage without a live worker.
        EmulationError: emulated devices are asked for after JAX has started.
    """
    workers = topology.live_workers(failed)
    if ranks not in RANK_KINDS:
        raise SettingError("Experiment.ranks", ranks, f"choose one of {', '.join(RANK_KINDS)}")
    if ranks == "virtual":
        if len(topology.workers) > 1:
            shape = (topology.num_pipelines, topology.num_stages)
            raise SettingError("Experiment.ranks", ranks, f"needs one pipeline of one stage, the topology has {shape}")
        grid = np.array(jax.devices()[:1]).reshape(1, 1)
        return LiveMesh(topology, failed, Mesh(grid, (WORKER_AXIS, EXPERT_AXIS)), virtual=True)
    if ranks == "emulated":
        emulate_devices(topology.num_devices)
    devices, needed = jax.devices(), len(workers) * topology.num_expert_ranks
    if needed > len(devices):
        raise SettingError(
            "Topology.num_expert_ranks",
            topology.num_expert_ranks,
            f"{len(workers)} worker(s) of so many ranks need {needed} devices and there are {len(devices)}; "
            "use fewer, or Experiment.ranks = 'emulated' or 'virtual'",
        )
    grid = np.array(devices[:needed]).reshape(len(workers), topology.num_expert_ranks)
    return LiveMesh(topology, failed, Mesh(grid, (WORKER_AXIS, EXPERT_AXIS)))
