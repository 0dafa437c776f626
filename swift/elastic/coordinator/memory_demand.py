"""Estimates the memory that a node's processes need to store states, and chooses a directory with enough space."""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from swift.config.experiment import Experiment
from swift.elastic.membership.messages import Process
from swift.elastic.state.run_files import remove_leftovers
from swift.elastic.state.slices import ElasticSpecs, copy_shapes, is_elastic
from swift.elastic.worker.generation import NUM_SNAPSHOTS
from swift.errors import SettingError
from swift.mesh.state_rows import shard_shapes
from swift.pipeline.reconfigure.recut import spec_with_assignment
from swift.pipeline.step.spec import StepSpec
from swift.schedules.plans.normalize import ChunkAssignment
from swift.train.saved_state import split_of

_SHARED_MEMORY = Path("/dev/shm")
_NUM_STATES = 3
"""Number of states that a process stores at a time: two, and a new one that is about to replace the older of them."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Upper bounds on the bytes that a node's processes store, if the same workers of each stage always save.

    Attributes:
        num_processes: number of processes on the node.
        states: bytes of whole states between two generations; if blocks can move, those of workers in a pipeline that
            has lost one worker.
        snapshots: bytes of states without slots (to be saved, restored or resharded); 0 if these are in the run
            directory.
        copies: bytes of copies of other ranks' slices.
        more_states: additional bytes of whole states if blocks move and a pipeline has a single worker left. That is
            rare, so no space is reserved: states that do not fit are written to a disk.
    """

    num_processes: int
    states: int
    snapshots: int
    copies: int
    more_states: int = 0

    @property
    def total(self) -> int:
        """Bytes that have to be available: all except ``more_states``."""
        return self.states + self.snapshots + self.copies

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        processes: Sequence[Process],
        *,
        by_rank: bool,
        is_alone: bool,
        platform: str | None = None,
    ) -> "MemoryEstimate":
        """Estimates a run's demand on one node from the shapes of its arrays, without creating the arrays.

        Args:
            experiment: settings of the run.
            processes: processes of this node.
            by_rank: whether each expert rank is a process of its own, rather than each worker.
            is_alone: whether this is the only node of the run.
            platform: see ``make_step_spec``.
        """
        num_ranks = experiment.topology.num_expert_ranks
        counts = {num_ranks}
        if is_elastic(experiment, by_rank=by_rank) and num_ranks > 1:
            counts.add(num_ranks - 1)  # after the loss of a rank, each remaining rank has larger slices
        specs = ElasticSpecs(experiment, platform)
        estimates = [cls._on(specs, count, experiment, processes, by_rank, is_alone) for count in counts]
        return max(estimates, key=lambda estimate: estimate.total)

    @classmethod
    def _on(
        cls,
        specs: ElasticSpecs,
        num_ranks: int,
        experiment: Experiment,
        processes: Sequence[Process],
        by_rank: bool,
        is_alone: bool,
    ) -> "MemoryEstimate":
        """Estimates the demand with ``num_ranks`` expert ranks in each worker."""
        step_spec, num_here = specs.on(num_ranks), len(processes)
        spec = _widest(step_spec, experiment, step_spec.num_stages - 1)
        num_devices = 1 if by_rank else num_ranks
        if num_ranks < experiment.topology.num_expert_ranks and is_alone:
            num_here = num_ranks
        without_slots = replace(spec.specs, slots={})
        whole, at_worst = (
            _num_bytes(shard_shapes(wide_spec.specs, wide_spec.abstract(with_slots=True), num_devices))
            for wide_spec in (spec, _widest(step_spec, experiment, 1))
        )
        saved = _num_bytes(shard_shapes(without_slots, spec.abstract(), num_devices))
        num_saving = sum(process.worker[0] == 0 for process in processes[:num_here])
        # A saving process writes a new snapshot before it removes the oldest; others have one or two restored states.
        snapshots = saved * ((NUM_SNAPSHOTS + 1) * num_saving + 2 * (num_here - num_saving)) if is_alone else 0
        config, copies = experiment.checkpoint, 0
        if config.snapshot_every and num_ranks > 1 and is_elastic(experiment, by_rank=by_rank):
            split = split_of(spec)
            num_classes = split.num_classes
            k = config.snapshot_k(num_classes)
            # The first copy has all experts, later ones k experts in turn; one more is being written.
            num_some = -(-num_classes // k) + 1
            full_bytes, partial_bytes = (
                _num_bytes(copy_shapes(split, num_experts)) for num_experts in (num_classes, k)
            )
            copies = num_here * (full_bytes + num_some * partial_bytes)
        states, more_states = (num_here * _NUM_STATES * size for size in (whole, at_worst - whole))
        return cls(num_here, states, snapshots, copies, more_states)


def _widest(spec: StepSpec, experiment: Experiment, num_left: int) -> StepSpec:
    """Returns the step spec with the blocks of one pipeline on ``num_left`` workers, divided as evenly as possible.

    If blocks never move, it is the run's own spec.
    """
    if experiment.adapt not in ("recut", "auto") or spec.num_stages == 1:
        return spec
    num_blocks = len(spec.cut.moe_layers)
    few = tuple(block * num_left // num_blocks for block in range(num_blocks))
    _, *other_pipelines = spec.chunks.stage_DB.tolist()
    return spec_with_assignment(spec, ChunkAssignment((few, *map(tuple, other_pipelines))))


class StorageLocation(NamedTuple):
    """The directory in which a node stores the states of its processes.

    Attributes:
        path: directory.
        text: line for the terminal on how much memory is needed and available.
    """

    path: Path
    text: str


def choose_storage(
    demand: MemoryEstimate,
    run_dir: Path,
    shared_memory: Path = _SHARED_MEMORY,
    free: Callable[[Path], int] | None = None,
) -> StorageLocation:
    """Chooses the first directory with enough space: shared memory, the one for temporary files, or the run directory.

    Before that, leftovers of dead runs are removed from the first two.

    Args:
        demand: memory that is needed.
        run_dir: run directory; it may not exist yet.
        shared_memory: directory in memory, if this machine has one.
        free: returns the free bytes of a directory.

    Raises:
        SettingError: no directory has enough space.
    """
    free = free or _free_bytes
    temporary = Path(tempfile.gettempdir())
    directories = [shared_memory] if shared_memory.is_dir() else []
    directories += [temporary, run_dir.absolute()]
    for directory in directories[:-1]:  # not the run directory, where other nodes may have their live directories
        remove_leftovers(directory)
    room = {directory: free(directory) for directory in directories}
    chosen = next((directory for directory, num_bytes in room.items() if num_bytes >= demand.total), None)
    need, at_worst = f"the states of {demand.num_processes} processes take up to {_text(demand.total)}", ""
    if chosen is None:
        free_text = ", ".join(f"{_text(num_bytes)} in {directory}" for directory, num_bytes in room.items())
        raise SettingError("TMPDIR", str(temporary), f"{need}, and no directory has that much free: {free_text}")
    first, slow = directories[0], ""
    if chosen != first:
        slow = f", and not in {first} ({_text(room[first])} free): that is slower"
    if demand.more_states:
        total = demand.total + demand.more_states
        at_worst = f" ({_text(total)} where blocks move and a pipeline has one worker left"
        at_worst += "; what does not fit then is written to a disk)" if total > room[chosen] else ")"
    return StorageLocation(chosen, f"{need}{at_worst}, of {_text(room[chosen])} free in {chosen}{slow}")


def _free_bytes(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def _num_bytes(shapes: Any) -> int:
    leaves = jax.tree.leaves(shapes)
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def _text(num_bytes: int) -> str:
    """Formats a number of bytes.

    >>> _text(64_000_000), _text(2_500_000_000), _text(1_234)
    ('64.0 MB', '2.5 GB', '0.0 MB')
    """
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
