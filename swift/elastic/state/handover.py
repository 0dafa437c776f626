"""What processes of an elastic run hand over when its ranks change, where the keeper and all others see it.

Whoever leaves a generation for one of other members hands over its own states and the copies that it has of those who
are lost. Who dies later has handed over; the slices that a process is to resume from are among its snapshots until it
does.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swift.checkpoint import RankCopy, StateSplit
from swift.elastic.membership import Found, Process, ShardLayout, Stamp
from swift.elastic.state.copies import Copies, as_snapshot, copy_shapes
from swift.elastic.state.shared_memory_store import SharedMemoryStore
from swift.errors import RunError

_STATES, _COPIES = "states", "copies"


@dataclass(frozen=True)
class Handover:
    """The states and copies that processes have handed over.

    Attributes:
        handed: a directory for them, which has to be there.
        snapshots: the directory of states that processes are to resume from.
        processes: all of the run.
    """

    handed: Path
    snapshots: Path
    processes: Sequence[Process]

    def __post_init__(self) -> None:
        for name in (_STATES, _COPIES):
            (self.handed / name).mkdir(exist_ok=True)

    @property
    def copies(self) -> Copies:
        """Of lost ranks' slices."""
        return Copies(self.handed / _COPIES)

    def states(self, process: Process) -> SharedMemoryStore:
        """The states of a process, with slots."""
        return SharedMemoryStore(self.handed / _STATES, process)

    def parts(self, process: Process) -> SharedMemoryStore:
        """The state that a process was to resume from, without slots."""
        return SharedMemoryStore(self.snapshots, process)

    def hand_over(self, process: Process, states: SharedMemoryStore, copies: Copies, lost: Collection[Process]) -> None:
        """Hands over the states of a process, and the copies that it has of lost ones."""
        states.hand_over(self.states(process))
        copies.hand_over(self.copies, process, lost)

    def take_back(self, process: Process, but: frozenset[Stamp]) -> None:
        """Removes what a process has handed over, but for some states: nobody resumes from the others any more."""
        self.states(process).forget(but)
        self.copies.forget(process)

    def found(self, holder: Process, held: frozenset[Stamp], num_experts: int) -> Found:
        """Whose slices of which states are there.

        Args:
            holder: who asks.
            held: the states of which it has its own slices; its copies are of use with those only.
            num_experts: of a copy that lacks nothing, E.
        """
        whole = {(one, stamp) for one in self.processes for stamp in self.states(one).stamps()}
        whole |= {(one, stamp) for one in self.processes for stamp in self.parts(one).stamps()}
        copies = self.copies.held([holder], self.processes)
        whole |= {(one.owner, one.stamp) for one in copies if one.num_experts == num_experts and one.stamp in held}
        return frozenset(whole)

    def rank_copies(
        self, split: StateSplit, cut: ShardLayout, lost: Collection[Process], contained_at: Callable[[int], np.ndarray]
    ) -> Iterator[RankCopy]:
        """The copies of lost ranks that others have; those that are damaged are passed over.

        Args:
            split: of the state.
            cut: how it is cut.
            lost: those whose slices are wanted.
            contained_at: the token updates that experts contained after an iteration.
        """
        ranks = {process: rank for rank, process in enumerate(cut.processes)}
        for one in self.copies.held([process for process in ranks if process not in lost], lost):
            if one.stamp.generation not in cut.generations:
                continue
            keep, step = self.copies.keep(one.num_experts, one.holder, one.owner), one.stamp.step
            try:
                snapshot = as_snapshot(split, keep.load(one.stamp, copy_shapes(split, one.num_experts)))
            except RunError as error:
                print(f"passed over: {error}", file=sys.stderr)
                continue
            yield RankCopy(ranks[one.owner], ranks[one.holder], step, snapshot, contained_at(step))
