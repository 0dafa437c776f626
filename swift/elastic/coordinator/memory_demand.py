"""How many bytes the processes of a node keep in its memory, and the place that has room for them."""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from swift.elastic.elastic_programs import ElasticPrograms, is_elastic
from swift.elastic.membership import Process
from swift.elastic.state import copy_shapes, remove_left_behind
from swift.elastic.worker import NUM_SNAPSHOTS
from swift.errors import SettingError
from swift.mesh import part_shapes
from swift.train import Experiment
from swift.train.checkpoints import split_of

SHARED_MEMORY = Path("/dev/shm")
_NUM_STATES = 3
"""States that a process keeps at a time: of the last two iterations, and one that they take the place of."""


@dataclass(frozen=True)
class MemoryDemand:
    """Bytes that the processes of a node keep at most, as long as no two workers of a stage take turns at saving.

    Attributes:
        num_processes: of the node.
        states: whole states, between two generations.
        snapshots: states without slots, to be saved, restored or cut anew; 0 where they are in the run directory.
        copies: of the slices of other ranks.
    """

    num_processes: int
    states: int
    snapshots: int
    copies: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.states + self.snapshots + self.copies

    @classmethod
    def of(
        cls, experiment: Experiment, processes: Sequence[Process], *, by_rank: bool, is_alone: bool
    ) -> "MemoryDemand":
        """What a run needs on one node, by the shapes of its arrays; no array is made.

        Args:
            experiment: what is run.
            processes: of this node.
            by_rank: whether a process is an expert rank, and not a whole worker.
            is_alone: whether there is no other node.
        """
        num_ranks = experiment.topology.num_expert_ranks
        counts = {num_ranks}
        if is_elastic(experiment, by_rank=by_rank) and num_ranks > 1:
            counts.add(num_ranks - 1)  # then each rank that is left has more
        programs = ElasticPrograms(experiment)
        found = [cls._on(programs, count, experiment, processes, by_rank, is_alone) for count in counts]
        return max(found, key=lambda one: one.total)

    @classmethod
    def _on(
        cls,
        programs: ElasticPrograms,
        num_ranks: int,
        experiment: Experiment,
        processes: Sequence[Process],
        by_rank: bool,
        is_alone: bool,
    ) -> "MemoryDemand":
        """With so many expert ranks of each worker; of an elastic run each is a process."""
        spec, num_here = programs.on(num_ranks), len(processes)
        num_devices = 1 if by_rank else num_ranks
        if num_ranks < experiment.topology.num_expert_ranks and is_alone:
            num_here = num_ranks
        specs = replace(spec.specs, slots={})
        whole = _num_bytes(part_shapes(spec.specs, spec.abstract(with_slots=True), num_devices))
        saved = _num_bytes(part_shapes(specs, spec.abstract(), num_devices))
        num_saving = sum(process.worker[0] == 0 for process in processes[:num_here])
        # One is being written while those before are there; of the others each gets one that was restored, or two.
        snapshots = saved * ((NUM_SNAPSHOTS + 1) * num_saving + 2 * (num_here - num_saving)) if is_alone else 0
        config, copies = experiment.checkpoint, 0
        if config.snapshot_every and num_ranks > 1 and is_elastic(experiment, by_rank=by_rank):
            split = split_of(spec)
            num_classes = split.num_classes
            k = config.snapshot_k(num_classes)
            # The first has all experts; the others go round them, and one is being written.
            num_some = -(-num_classes // k) + 1
            of_all, of_some = (_num_bytes(copy_shapes(split, num_experts)) for num_experts in (num_classes, k))
            copies = num_here * (of_all + num_some * of_some)
        return cls(num_here, num_here * _NUM_STATES * whole, snapshots, copies)


class StorageLocation(NamedTuple):
    """Where a node keeps what its processes have to.

    Attributes:
        path: a directory.
        text: what is needed, and what is there, for people.
    """

    path: Path
    text: str


def choose_place(
    demand: MemoryDemand,
    run_dir: Path,
    shared_memory: Path = SHARED_MEMORY,
    free: Callable[[Path], int] | None = None,
) -> StorageLocation:
    """The directory in which a node keeps what it has to: in its memory, else for temporary files, else of the run.

    What dead runs have left behind there is removed first.

    Args:
        demand: what it has to have room for.
        run_dir: the run directory; it may not be there yet.
        shared_memory: a directory in memory, where this machine has one.
        free: tells the bytes that are free in a directory.

    Raises:
        SettingError: none of them has room.
    """
    free = free or _free_bytes
    temporary = Path(tempfile.gettempdir())
    places = [shared_memory] if shared_memory.is_dir() else []
    places += [temporary, run_dir.absolute()]
    for place in places[:-1]:  # in a run directory other nodes may have theirs
        remove_left_behind(place)
    room = {place: free(place) for place in places}
    chosen = next((place for place, there in room.items() if there >= demand.total), None)
    need = f"the states of {demand.num_processes} processes take up to {_text(demand.total)}"
    there = ", ".join(f"{_text(free)} in {place}" for place, free in room.items())
    if chosen is None:
        raise SettingError("TMPDIR", str(temporary), f"{need}, and nowhere are so many bytes free: {there}")
    slow = "" if chosen == places[0] else f", and not in {places[0]} ({_text(room[places[0]])} free): that is slower"
    return StorageLocation(chosen, f"{need}, of {_text(room[chosen])} that are free in {chosen}{slow}")


def _free_bytes(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _num_bytes(shapes: Any) -> int:
    leaves = jax.tree.leaves(shapes)
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def _text(num_bytes: int) -> str:
    """Such as ``64.0 MB``.

    >>> _text(64_000_000), _text(2_500_000_000), _text(1_234)
    ('64.0 MB', '2.5 GB', '0.0 MB')
    """
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
