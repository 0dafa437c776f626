"""Handover of states in elastic runs when their ranks change, to where the checkpoint service and all processes see it.

When the members change, each process that leaves a generation hands over its own states, and its copies of the slices
of lost ranks. So its states remain available if it dies later. The state that it is to resume from stays among its
snapshots until it has resumed.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swift.checkpoint.memory.slice_search import RankCopy
from swift.checkpoint.partial.expert_units import StateSplit
from swift.elastic.membership.members import Process, ShardLayout, Stamp
from swift.elastic.membership.shard_ownership import FoundSlices
from swift.elastic.state.shared_memory_store import SharedMemoryStore
from swift.elastic.state.slice_copies import SliceCopies, as_snapshot, copy_shapes
from swift.errors import RunError

_STATES, _COPIES = "states", "copies"


@dataclass(frozen=True)
class Handover:
    """The states and copies that processes have handed over.

    Attributes:
        handed_over: directory for them, which must exist.
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
        """Copies of the slices of lost ranks."""
        return SliceCopies(self.handed_over / _COPIES)

    def states(self, process: Process) -> SharedMemoryStore:
        """Store of the states that a process has handed over, with slots."""
        return SharedMemoryStore(self.handed_over / _STATES, process)

    def parts(self, process: Process) -> SharedMemoryStore:
        """Store of the state that a process is to resume from, without slots."""
        return SharedMemoryStore(self.snapshots, process)

    def hand_over(
        self, process: Process, states: SharedMemoryStore, copies: SliceCopies, lost: Collection[Process]
    ) -> None:
        """Hands over the states of a process, and its copies of the slices of lost ranks."""
        states.hand_over(self.states(process))
        copies.hand_over(self.copies, process, lost)

    def withdraw(self, process: Process, kept: frozenset[Stamp]) -> None:
        """Removes what a process has handed over, except some states: no process will resume from the others."""
        self.states(process).keep_only(kept)
        self.copies.keep_only(process)

    def found(self, neighbour: Process, held: frozenset[Stamp], num_experts: int) -> FoundSlices:
        """Returns the slices that can be found, of any owner and state.

        Args:
            neighbour: process that asks.
            held: states of which it has its own slices; its copies of other states are of no use.
            num_experts: number of experts in a complete copy, E.
        """
        whole = {(one, stamp) for one in self.processes for stamp in self.states(one).stamps()}
        whole |= {(one, stamp) for one in self.processes for stamp in self.parts(one).stamps()}
        copies = self.copies.find([neighbour], self.processes)
        whole |= {(one.owner, one.stamp) for one in copies if one.num_experts == num_experts and one.stamp in held}
        return frozenset(whole)

    def rank_copies(
        self,
        split: StateSplit,
        layout: ShardLayout,
        lost: Collection[Process],
        contained_at: Callable[[int], np.ndarray],
    ) -> Iterator[RankCopy]:
        """Yields the copies of lost ranks' slices that others have, except damaged ones.

        Args:
            split: division of the state.
            layout: layout of the state.
            lost: processes whose slices are needed.
            contained_at: function that returns the token updates ``[L, E]`` contained in experts after an iteration.
        """
        ranks = {process: rank for rank, process in enumerate(layout.processes)}
        for one in self.copies.find([process for process in ranks if process not in lost], lost):
            if one.stamp.generation not in layout.generations:
                continue
            store, step = self.copies.store(one.num_experts, one.neighbour, one.owner), one.stamp.step
            try:
                snapshot = as_snapshot(split, store.load(one.stamp, copy_shapes(split, one.num_experts)))
            except RunError as error:
                print(f"passed over: {error}", file=sys.stderr)
                continue
            yield RankCopy(ranks[one.owner], ranks[one.neighbour], step, snapshot, contained_at(step))
