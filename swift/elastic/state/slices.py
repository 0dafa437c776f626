"""State slices of elastic runs: copies in neighbours' memory, and the handover when the ranks change.

``is_elastic`` tells which runs are elastic, and ``ElasticSpecs`` has their step specs for any number of expert ranks.

Every rank's slices are copied to the memory of the next rank in the ring. This is the first level of MoC-System's
checkpoints (arXiv 2408.04307, section 5), except that they are in the neighbour's memory. ``NeighbourCopies`` transfers
a copy over the mesh and writes it into ``SliceCopies`` during the next iteration. A file is complete or does not exist,
so an interrupted copy is never mistaken for a complete one.

``Handover`` is a directory that the checkpoint service and all processes can read. When the members change, each
process that leaves a generation hands over its own states and its copies of lost ranks' slices, so that they remain
available if it dies later. The state that a process is to resume from stays among its snapshots until it has resumed.

Legend: P stages, 1 here; L MoE layers; E experts; K experts per layer in a copy; V arrays of the same type in an
expert's state; w elements in a rank's slice of such an array.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Compiled, Wrapped

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.manifest import Copy, Ledger
from swift.checkpoint.recovery import RankCopy
from swift.checkpoint.units import Snapshot, StateSplit, by_name
from swift.config.experiment import Experiment
from swift.elastic.membership.messages import FoundSlices, Process, ShardLayout, StateId
from swift.elastic.state.store import SharedMemoryStore, directory_name, process_of
from swift.errors import RunError
from swift.mesh.live import storage_mesh
from swift.mesh.per_rank import EXPERT_AXIS, RANKED, REPLICATED
from swift.pipeline.reconfigure.executables import ExecutableCache
from swift.pipeline.state import TrainState
from swift.pipeline.step.spec import StepSpec
from swift.tasks import one_thread
from swift.train.build import make_step_spec, with_num_ranks
from swift.train.saved_state import split_of

_NeighbourProgram = Callable[..., dict[str, dict[str, jax.Array]]]
"""(dense, experts, chosen experts) -> ``dense`` and ``experts`` of the previous rank in the ring."""

_STATES, _COPIES = "states", "copies"


def is_elastic(experiment: Experiment, *, by_rank: bool) -> bool:
    """Returns whether any subset of the expert ranks can run, see ``swift.elastic.membership.state_machine``.

    Args:
        experiment: settings of the run.
        by_rank: whether each expert rank is a process of its own.
    """
    is_single_worker = len(experiment.topology.workers) == 1
    return by_rank and is_single_worker and experiment.optimizer.layout == "decoupled"


class ElasticSpecs:
    """Caches a run's step specs for any number of expert ranks, each on the storage mesh that checkpoints use.

    Args:
        experiment: settings of the run.
        platform: see ``make_step_spec``.
    """

    def __init__(self, experiment: Experiment, platform: str | None = None):
        self._experiment, self._platform = experiment, platform
        self._by_ranks: dict[int, StepSpec] = {}

    def on(self, num_ranks: int) -> StepSpec:
        """Returns the step spec for ``num_ranks`` ranks, which the caller puts on a live mesh."""
        if num_ranks not in self._by_ranks:
            fewer = with_num_ranks(self._experiment, num_ranks)
            self._by_ranks[num_ranks] = make_step_spec(fewer, storage_mesh(fewer.topology), self._platform)
        return self._by_ranks[num_ranks]


def neighbour_of(process: Process, processes: Sequence[Process]) -> Process:
    """Returns the process that stores copies of a process's slices: the next rank in the ring.

    >>> ring = [Process((0, 0), rank) for rank in (0, 1, 3)]
    >>> [str(neighbour_of(process, ring)) for process in ring]
    ['0:0 rank 1', '0:0 rank 3', '0:0']
    """
    return processes[(processes.index(process) + 1) % len(processes)]


class SliceCopy(NamedTuple):
    """Identifies a copy of a rank's slices.

    Attributes:
        num_experts: number of experts per layer, K.
        neighbour: process that has the copy in its memory.
        owner: process that the slices belong to.
        stamp: stamp of the state.
    """

    num_experts: int
    neighbour: Process
    owner: Process
    stamp: StateId


class SliceCopies:
    """A directory of slice copies, organized by K, neighbour and owner. Each combination has only one writer.

    Args:
        directory: path of the directory, which must exist.
    """

    def __init__(self, directory: Path):
        self._directory = directory

    def store(self, num_experts: int, neighbour: Process, owner: Process) -> SharedMemoryStore:
        """Returns the store for a neighbour's copies of an owner's slices with K experts per layer."""
        directory = self._directory / str(num_experts)
        directory.mkdir(exist_ok=True)
        directory /= directory_name(neighbour)
        directory.mkdir(exist_ok=True)
        return SharedMemoryStore(directory, owner)

    def find(self, neighbours: Collection[Process], owners: Collection[Process]) -> Iterator[SliceCopy]:
        """Yields these neighbours' copies of these owners' slices."""
        for path in self._directory.glob("*/*/*"):
            num_experts, neighbour, owner = int(path.parts[-3]), process_of(path.parts[-2]), process_of(path.name)
            if neighbour in neighbours and owner in owners:
                for stamp in self.store(num_experts, neighbour, owner).stamps():
                    yield SliceCopy(num_experts, neighbour, owner, stamp)

    def retain_only(self, neighbour: Process, copies: Collection[SliceCopy] = ()) -> None:
        """Removes a neighbour's copies, except these."""
        for path in self._directory.glob(f"*/{directory_name(neighbour)}/*"):
            num_experts, owner = int(path.parts[-3]), process_of(path.name)
            stamps = [copy.stamp for copy in copies if (copy.num_experts, copy.owner) == (num_experts, owner)]
            self.store(num_experts, neighbour, owner).retain_only(frozenset(stamps))

    def hand_over(self, other: "SliceCopies", neighbour: Process, owners: Collection[Process]) -> None:
        """Adds a neighbour's copies of these owners' slices to another directory."""
        for num_experts, owner in {(copy.num_experts, copy.owner) for copy in self.find([neighbour], owners)}:
            self.store(num_experts, neighbour, owner).hand_over(other.store(num_experts, neighbour, owner))


def needed(chosen_by: Mapping[StateId, np.ndarray], num_classes: int) -> frozenset[StateId]:
    """Returns the copies to keep: the newest two, and each that has the newest slices of some expert.

    Args:
        chosen_by: for the stamp of each copy, the experts ``[L, K]`` in the copy.
        num_classes: number of experts, E.

    >>> chosen = {StateId(1, step): np.array([[step % 3]]) for step in range(9)}
    >>> sorted(stamp.step for stamp in needed(chosen, 3))
    [6, 7, 8]
    """
    stamps = set[StateId]()
    covered_LE = np.zeros((len(next(iter(chosen_by.values()), ())), num_classes), bool)
    for index, (stamp, chosen_LK) in enumerate(sorted(chosen_by.items(), reverse=True, key=lambda item: item[0])):
        if index < 2 or not np.take_along_axis(covered_LE, chosen_LK, axis=1).all():
            stamps.add(stamp)
        np.put_along_axis(covered_LE, chosen_LK, True, axis=1)
    return frozenset(stamps)


def copy_shapes(split: StateSplit, num_experts: int) -> dict[str, Any]:
    """Returns the shapes and dtypes of a copy: one rank's RANKED arrays, with K experts per layer.

    Args:
        split: division of the state into a dense part and experts, for all ranks.
        num_experts: number of experts per layer, K.

    Returns:
        ``dense`` and ``experts`` by name, ``[P, layer, 1, ...]`` and ``[P, L, 1, K, w]``; ``chosen``, ``[layers, K]``.
    """

    def shape(name: str) -> jax.ShapeDtypeStruct:
        stages, layers, _, *rest = split.shapes[name].shape
        if name in split.expert_names:
            rest = [num_experts, *rest[1:]]
        return jax.ShapeDtypeStruct((stages, layers, 1, *rest), split.shapes[name].dtype)

    return {
        "dense": {name: shape(name) for name in split.dense_shapes if name in split.ranked_names},
        "experts": {name: shape(name) for name in split.expert_names},
        "chosen": jax.ShapeDtypeStruct((split.num_layers, num_experts), np.int32),
    }


def _as_snapshot(split: StateSplit, copy: Mapping[str, Any]) -> Snapshot:
    """Converts a copy to a snapshot of one rank (N = 1) with blocks ``[layers, K, V, 1, w]``."""
    chosen_LK = copy["chosen"]
    blocks = {
        dtype: np.empty((*chosen_LK.shape, len(names), 1, split.unit_shapes[dtype].shape[-1]), dtype)
        for dtype, names in split.names_of_type.items()
    }
    for name, array in copy["experts"].items():
        split.put(blocks, name, array)
    return Snapshot(dict(copy["dense"]), blocks, chosen_LK)


class NeighbourCopies:
    """Copies the slices of the previous rank to this process's memory during a generation.

    The first copy of a generation has all experts; later ones have K experts per layer.

    Args:
        spec: step spec on the generation's mesh.
        executables: executable cache of the run.
        copies: directory of copies in the memory of this node.
        process: this process.
        processes: processes of the generation, in rank order.
        config: settings of checkpoints: how often to copy, how many experts, and how to select them.
    """

    def __init__(
        self,
        spec: StepSpec,
        executables: ExecutableCache,
        copies: SliceCopies,
        process: Process,
        processes: Sequence[Process],
        config: CheckpointConfig,
    ):
        self._spec, self._executables, self._copies, self._process = spec, executables, copies, process
        (self._owner,) = [owner for owner in processes if neighbour_of(owner, processes) == process]
        self._config, self._split = config, split_of(spec)
        num_layers, num_classes = self._split.num_layers, self._split.num_classes
        self._ledger = Ledger.first(num_layers, num_classes, config.snapshot_k(num_classes))
        self._is_first = True
        self._chosen: dict[StateId, np.ndarray] = {}  # experts in the copies that exist or are being written
        self._programs: dict[int, _NeighbourProgram] = {}
        self._thread = one_thread("neighbour")
        self._writing: tuple[StateId, Future[None]] | None = None

    def count(self, record: Mapping[str, Any]) -> None:
        """Counts the token updates in a ``metrics.jsonl`` record; the choice of experts depends on them."""
        self._ledger = self._ledger.counted(record["popularity"], record["dropped"])

    def is_due(self, done: int) -> bool:
        """Returns whether a copy is due after this iteration; always true after the first one of a generation.

        A copy is a collective, so all ranks have to agree on when to copy and on which experts. Neither may therefore
        depend on whether an earlier copy could be written.
        """
        return self._is_first or done % self._config.snapshot_every == 0

    def prepare(self) -> None:
        """Compiles the program for the next copy if necessary."""
        self._program(self._choice().shape[-1])

    def copy(self, stamp: StateId, state: TrainState) -> None:
        """Transfers a copy in a collective of all ranks, and starts writing it in a thread.

        Args:
            stamp: stamp of the state.
            state: state on the mesh; may be donated once this method returns.
        """
        chosen_LK = self._choice()
        arrays, like = by_name(state), copy_shapes(self._split, chosen_LK.shape[-1])
        inputs = [{name: arrays[name] for name in like[kind]} for kind in ("dense", "experts")]
        chosen = self._spec.live.put(chosen_LK, REPLICATED)
        received = jax.block_until_ready(self._program(chosen_LK.shape[-1])(*inputs, chosen))
        self.settle()
        self._ledger = self._ledger.saved(stamp.step, chosen_LK, self._copied(stamp.step, chosen_LK), {})
        self._is_first, self._chosen[stamp] = False, chosen_LK
        self._writing = stamp, self._thread.submit(self._write, stamp, received | {"chosen": chosen_LK})

    def settle(self) -> None:
        """Waits until the copy in progress is written. If the write fails, the run continues without this copy."""
        if self._writing is None:
            return
        (stamp, writing), self._writing = self._writing, None
        try:
            writing.result()
        except OSError as error:
            print(f"no copy of {self._owner} after iteration {stamp.step}: {error}", file=sys.stderr)
            del self._chosen[stamp]

    def close(self) -> None:
        """Finishes writing the last copy, for which the devices are no longer needed."""
        self.settle()
        self._thread.shutdown()

    def _choice(self) -> np.ndarray:
        return self._ledger.choose(self._config.selection, full=False).astype(np.int32)

    def _program(self, num_experts: int) -> _NeighbourProgram:
        if num_experts not in self._programs:
            self._programs[num_experts] = compiled_neighbour(self._spec, self._executables, num_experts)
        return self._programs[num_experts]

    def _copied(self, step: int, chosen_LK: np.ndarray) -> dict[tuple[int, int], Copy]:
        """Returns the ledger entries for these copies, which the next choice of experts depends on."""
        contained_LE = self._ledger.tally.contained_LE
        units = [(layer, class_) for layer, classes in enumerate(chosen_LK.tolist()) for class_ in classes]
        return {unit: Copy(step, int(contained_LE[unit]), 0, "", {}) for unit in units}

    def _write(self, stamp: StateId, received: Mapping[str, Any]) -> None:
        """Writes a copy, and only then removes earlier copies that are no longer needed."""
        tree = jax.tree.map(lambda leaf: leaf if isinstance(leaf, np.ndarray) else _own_slice(leaf), dict(received))
        num_experts = tree["chosen"].shape[-1]
        self._copies.store(num_experts, self._process, self._owner).save(stamp, tree)
        retained = needed(self._chosen, self._split.num_classes)
        self._chosen = {stamp: chosen for stamp, chosen in self._chosen.items() if stamp in retained}
        copies = [
            SliceCopy(chosen.shape[-1], self._process, self._owner, copy_stamp)
            for copy_stamp, chosen in self._chosen.items()
        ]
        self._copies.retain_only(self._process, copies)


def neighbour_slices(spec: StepSpec) -> Wrapped:
    """Returns a jitted function that sends every rank's slices to the next rank in the ring.

    Its arguments are the RANKED arrays ``dense`` and ``experts``, each by name, and the chosen experts ``[L, K]``,
    REPLICATED. It returns ``dense`` and the chosen ``experts`` of the previous rank, RANKED.

    Args:
        spec: step spec on a live mesh of one worker.
    """
    num_ranks = spec.live.num_ranks
    ring = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]

    def per_rank(dense: Any, experts: Any, chosen_LK: jax.Array) -> dict[str, Any]:
        chosen = {name: jnp.take_along_axis(leaf, chosen_LK[:, :, None], axis=1) for name, leaf in experts.items()}
        both = {"dense": dense, "experts": chosen}
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, EXPERT_AXIS, ring), both)

    return jax.jit(spec.live.per_rank(per_rank, (RANKED, RANKED, REPLICATED), RANKED))


def compiled_neighbour(spec: StepSpec, executables: ExecutableCache, num_experts: int) -> _NeighbourProgram:
    """Returns ``neighbour_slices`` compiled for K experts per layer; the experts are an argument of the program.

    Args:
        spec: step spec on a live mesh of one worker.
        executables: executable cache of the run.
        num_experts: number of experts per layer, K.
    """
    live = spec.live

    def compile_() -> Compiled:
        split = split_of(spec)
        like = copy_shapes(split, num_experts)
        inputs = [{name: split.shapes[name] for name in like[kind]} for kind in ("dense", "experts")]
        chosen = jax.ShapeDtypeStruct(like["chosen"].shape, np.int32, sharding=live.shardings(REPLICATED))
        return neighbour_slices(spec).lower(*inputs, chosen).compile()

    return executables.get(neighbour_key(live.num_ranks, num_experts), compile_, list(live.mesh.devices.flat))


def neighbour_key(num_ranks: int, num_experts: int) -> object:
    """Returns the key of a ``compiled_neighbour`` program in the executable cache."""
    return "neighbour", num_ranks, num_experts


def _own_slice(leaf: jax.Array) -> np.ndarray:
    """Returns this process's slice of a RANKED array on the host, without a copy on CPU."""
    (shard,) = leaf.addressable_shards
    return np.asarray(shard.data)


@dataclass(frozen=True)
class Handover:
    """The states and copies that processes have made available to all others.

    Attributes:
        handed_over: directory for these states and copies, which must exist.
        snapshots: directory of the states that processes are to resume from.
        processes: all processes of the run.
    """

    handed_over: Path
    snapshots: Path
    processes: Sequence[Process]

    def __post_init__(self) -> None:
        for name in (_STATES, _COPIES):
            (self.handed_over / name).mkdir(exist_ok=True)

    @property
    def copies(self) -> SliceCopies:
        """Copies of lost ranks' slices."""
        return SliceCopies(self.handed_over / _COPIES)

    def states(self, process: Process) -> SharedMemoryStore:
        """Returns the store of the states that a process has handed over, with slots."""
        return SharedMemoryStore(self.handed_over / _STATES, process)

    def parts(self, process: Process) -> SharedMemoryStore:
        """Returns the store of the state that a process is to resume from, without slots."""
        return SharedMemoryStore(self.snapshots, process)

    def hand_over(
        self, process: Process, states: SharedMemoryStore, copies: SliceCopies, lost: Collection[Process]
    ) -> None:
        """Makes a process's states and its copies of these lost ranks' slices available to all processes."""
        states.hand_over(self.states(process))
        copies.hand_over(self.copies, process, lost)

    def withdraw(self, process: Process, stamps: frozenset[StateId]) -> None:
        """Removes what a process has handed over, except these states, once no process can resume from the rest."""
        self.states(process).retain_only(stamps)
        self.copies.retain_only(process)

    def find_slices(self, neighbour: Process, local_stamps: frozenset[StateId], num_experts: int) -> FoundSlices:
        """Returns all complete slices that a process can find: handed over, among the snapshots, or in its copies.

        Args:
            neighbour: process that searches.
            local_stamps: states that the process has its own slices of; its copies of other states are useless.
            num_experts: number of experts in a complete copy, E.
        """
        complete = {(owner, stamp) for owner in self.processes for stamp in self.states(owner).stamps()}
        complete |= {(owner, stamp) for owner in self.processes for stamp in self.parts(owner).stamps()}
        copies = self.copies.find([neighbour], self.processes)
        complete |= {
            (copy.owner, copy.stamp)
            for copy in copies
            if copy.num_experts == num_experts and copy.stamp in local_stamps
        }
        return frozenset(complete)

    def rank_copies(
        self,
        split: StateSplit,
        layout: ShardLayout,
        lost: Collection[Process],
        contained_at: Callable[[int], np.ndarray],
    ) -> Iterator[RankCopy]:
        """Yields the copies that neighbours have of lost ranks' slices; damaged ones are skipped.

        Args:
            split: division of the state into a dense part and experts.
            layout: layout of the state.
            lost: processes whose slices are needed.
            contained_at: returns the token updates ``[L, E]`` contained in the experts after an iteration.
        """
        ranks = {process: rank for rank, process in enumerate(layout.processes)}
        for copy in self.copies.find([process for process in ranks if process not in lost], lost):
            if copy.stamp.generation not in layout.generations:
                continue
            store, step = self.copies.store(copy.num_experts, copy.neighbour, copy.owner), copy.stamp.step
            try:
                snapshot = _as_snapshot(split, store.load(copy.stamp, copy_shapes(split, copy.num_experts)))
            except RunError as error:
                print(f"passed over: {error}", file=sys.stderr)
                continue
            yield RankCopy(ranks[copy.owner], ranks[copy.neighbour], step, snapshot, contained_at(step))
