"""Level 1 of checkpoints: snapshots of every rank's slices in the memory of the next rank (MoC-System).

Legend: L MoE layers of the model, E classes, K classes of a layer that a snapshot copies, N ranks.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.lost_ranks import RankCopy
from swift.checkpoint.selection import everything, first_turns, load_aware, next_turns, sequential
from swift.checkpoint.snapshots import begin_snapshot
from swift.checkpoint.split import Snapshot, Split
from swift.mesh import LiveMesh

_NUM_COPIES = 2
"""Of everything, what can be restored and the one before; with what is being copied, that is triple buffered."""
PATIENCE_S = 60.0
"""How long who needs the copies waits for the one that is under way."""


@dataclass(frozen=True)
class _Generation:
    """One snapshot of all ranks, as ``RankCopy`` has it of one; the dense part of an old one is empty."""

    step: int
    snapshot: Snapshot
    contained_LE: np.ndarray

    def has(self, num_classes: int) -> np.ndarray:
        """Which experts are in it, ``[L, E]``."""
        return (self.snapshot.chosen_LK[:, :, None] == np.arange(num_classes)).any(axis=1)


class BuddyCopies:
    """The snapshots of all ranks of a process, taken behind the iterations, one at a time.

    Rank r + 1 has those of rank r, and the first rank those of the last. A snapshot counts when all of it is there, and
    the one before stays until then.

    Args:
        split: of the state.
        config: how many experts a snapshot has, and which.
    """

    def __init__(self, split: Split, config: CheckpointConfig):
        self._split, self._selection = split, config.selection
        self._k = config.snapshot_k(split.num_classes)
        self._turn_L = first_turns(split.num_layers, split.num_classes, self._k)
        self._generations: list[_Generation] = []  # the newest first
        self._room: Snapshot | None = None
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._copying: Future[_Generation] | None = None

    def close(self) -> None:
        """Takes no more; what is being copied comes to nothing."""
        self._thread.shutdown(wait=False)

    @property
    def is_empty(self) -> bool:
        """Whether no snapshot was taken yet."""
        return not self._generations and self._copying is None

    def begin(self, state: Any, live: LiveMesh, step: int, contained_LE: np.ndarray) -> None:
        """Begins a snapshot, once the one before is there.

        Args:
            state: see ``begin_snapshot``; it may be given away when this returns.
            live: its mesh.
            step: iterations done.
            contained_LE: token updates that its experts contain.
        """
        self._settle(None)
        take = begin_snapshot(self._split, state, live, self._choose(contained_LE), self._room)
        self._room = None
        self._copying = self._thread.submit(lambda: _Generation(step, take(), contained_LE))

    def copies(self) -> list[RankCopy]:
        """What there is of every rank; what is being copied is waited for, but not for ever."""
        self._settle(PATIENCE_S)
        num_ranks = self._split.num_ranks
        return [
            RankCopy(rank, (rank + 1) % num_ranks, one.step, self._of_rank(one.snapshot, rank), one.contained_LE)
            for one in self._generations
            for rank in range(num_ranks)
        ]

    def _of_rank(self, snapshot: Snapshot, rank: int) -> Snapshot:
        mine = slice(rank, rank + 1)
        ranked = self._split.ranked_names
        dense = {name: array[:, :, mine] for name, array in snapshot.dense.items() if name in ranked}
        return Snapshot(dense, {t: block[:, :, :, mine] for t, block in snapshot.blocks.items()}, snapshot.chosen_LK)

    def _choose(self, contained_LE: np.ndarray) -> np.ndarray:
        """The classes of the next snapshot; the first one is of all."""
        num_layers, num_classes = contained_LE.shape
        if self._k >= num_classes or not self._generations:
            return everything(num_layers, num_classes)
        if self._selection == "sequential":
            turn_L, self._turn_L = self._turn_L, next_turns(self._turn_L, num_classes, self._k)
            return sequential(turn_L, num_classes, self._k)
        then_LE, step_LE = np.zeros_like(contained_LE), np.zeros_like(contained_LE)
        for one in reversed(self._generations):
            has_LE = one.has(num_classes)
            then_LE[has_LE], step_LE[has_LE] = one.contained_LE[has_LE], one.step
        return load_aware(contained_LE - then_LE, step_LE, self._k)

    def _settle(self, patience_s: float | None) -> None:
        """Takes in what was copied, if it is there in time; None: whenever that is."""
        if self._copying is None or not wait([self._copying], patience_s).done:
            return
        one, self._copying = self._copying.result(), None
        found = [one, *self._generations]
        num_LE, num_classes = np.zeros(one.contained_LE.shape, np.int64), one.contained_LE.shape[1]
        self._generations = []
        dense, blocks = None, None
        for nth, one in enumerate(found):
            has_LE = one.has(num_classes)
            is_needed, num_LE = bool((num_LE[has_LE] < _NUM_COPIES).any()), num_LE + has_LE
            if nth < _NUM_COPIES:
                self._generations.append(one)
                continue
            dense = one.snapshot.dense or dense
            if is_needed:
                self._generations.append(replace(one, snapshot=replace(one.snapshot, dense={})))
            else:
                blocks = one.snapshot
        if dense and blocks:
            self._room = replace(blocks, dense=dense)
