"""Snapshots of each rank's slices in the next rank's memory: MoC-System's first checkpoint level.

Legend: P stages, L MoE layers of the model, E expert classes, K classes of a layer that a snapshot copies, N ranks,
V arrays of an expert's state that have the same dtype, w values of a rank's slice, C copies.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from swift.checkpoint.config import CheckpointConfig
from swift.checkpoint.recovery import RankCopy
from swift.checkpoint.selection import everything, initial_rotation, load_aware, next_rotation, sequential
from swift.checkpoint.snapshots import begin_snapshot
from swift.checkpoint.units import Snapshot, StateSplit
from swift.mesh.live import LiveMesh
from swift.tasks import one_thread

_NUM_COPIES = 2
"""Number of complete copies to keep: the newest and the previous one; a third may be in progress."""
PATIENCE_S = 60.0
"""Seconds that a reader waits for a copy that is being written."""


class _Store:
    """Keeps the two newest copies of the dense part and every expert, in memory for two whole snapshots.

    Attributes:
        dense: pairs (step, dense part), newest first.
        step_CLE: steps of every expert's copies; -1 for no copy.
        contained_CLE: token updates that each copy contains.
    """

    def __init__(self, split: StateSplit):
        shape = (_NUM_COPIES, split.num_layers, split.num_classes)
        self._split = split
        self._blocks = {dtype: np.empty((*shape, *unit.shape), unit.dtype) for dtype, unit in split.unit_shapes.items()}
        self.dense: list[tuple[int, dict[str, np.ndarray]]] = []
        self.step_CLE, self.contained_CLE = np.full(shape, -1), np.zeros(shape, np.int64)

    def put(self, step: int, snapshot: Snapshot, contained_LE: np.ndarray) -> Snapshot | None:
        """Stores a snapshot, in which each expert replaces its older copy.

        Returns:
            A snapshot whose memory may be reused, or None if there is no old dense part to reuse yet.
        """
        chosen_LK, layers_L1 = snapshot.chosen_LK, np.arange(len(snapshot.chosen_LK))[:, None]
        # For each expert, the older of its two places, or an empty one (step -1).
        where = (self.step_CLE.argmin(axis=0)[layers_L1, chosen_LK], layers_L1, chosen_LK)
        self.step_CLE[where] = -1  # a partly written copy must not be used if the copying below is interrupted
        for dtype, block in snapshot.blocks.items():
            self._blocks[dtype][where] = block
        self.contained_CLE[where] = contained_LE[layers_L1, chosen_LK]
        self.step_CLE[where] = step
        self.dense.insert(0, (step, snapshot.dense))
        return replace(snapshot, dense=self.dense.pop()[1]) if len(self.dense) > _NUM_COPIES else None

    def newest(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (token updates, step) of every expert's newest copy, ``[L, E]`` each."""
        newest_1LE = self.step_CLE.argmax(axis=0)[None]
        return tuple(np.take_along_axis(array, newest_1LE, axis=0)[0] for array in (self.contained_CLE, self.step_CLE))

    def rank_snapshots(self, rank: int) -> list[tuple[int, Snapshot, np.ndarray]]:
        """Returns (step, the rank's slices, token updates ``[L, E]``) for every stored step, newest first.

        Layers may have different numbers of experts from the same step; their chosen classes are padded with -1.
        """
        dense, ranked = dict(self.dense), self._split.ranked_names
        snapshots = []
        for step in sorted({*dense, *self.step_CLE[self.step_CLE >= 0].tolist()}, reverse=True):
            in_step_LEC = np.moveaxis(self.step_CLE == step, 0, -1)
            classes = [np.argwhere(layer_mask) for layer_mask in in_step_LEC]
            chosen_LK = np.full((len(classes), max(map(len, classes), default=0)), -1)
            copy_LK = np.zeros_like(chosen_LK)
            for layer, layer_classes in enumerate(classes):
                chosen_LK[layer, : len(layer_classes)], copy_LK[layer, : len(layer_classes)] = layer_classes.T
            where = (copy_LK, np.arange(len(classes))[:, None], chosen_LK)
            blocks = {dtype: block[..., rank : rank + 1, :][where] for dtype, block in self._blocks.items()}
            arrays = dense.get(step, {})
            rank_dense = {name: leaf[:, :, rank : rank + 1] for name, leaf in arrays.items() if name in ranked}
            contained_LE = np.where(in_step_LEC, np.moveaxis(self.contained_CLE, 0, -1), 0).max(axis=-1)
            snapshots.append((step, Snapshot(rank_dense, blocks, chosen_LK), contained_LE))
        return snapshots


class PeerSnapshots:
    """Takes snapshots of all the process's ranks in the background, one at a time.

    Rank r + 1 keeps the snapshots of rank r, and the first rank keeps those of the last rank. A snapshot is used only
    once it is complete; the previous one is kept until then.

    Args:
        split: division of the state.
        config: settings that determine how many experts a snapshot copies, and how they are selected.
    """

    def __init__(self, split: StateSplit, config: CheckpointConfig):
        self._split, self._selection = split, config.selection
        self._k = config.snapshot_k(split.num_classes)
        self._turn_L = initial_rotation(split.num_layers, split.num_classes, self._k)
        self._store = _Store(split)
        self._room: Snapshot | None = None
        self._thread = one_thread("snapshot")
        self._copying: Future[None] | None = None
        self._trouble: str | None = None

    def close(self) -> None:
        """Stops taking snapshots; does not wait for one that is being copied."""
        self._thread.shutdown(wait=False)

    @property
    def is_empty(self) -> bool:
        """Whether no snapshot has been started yet."""
        return not self._store.dense and self._copying is None

    def begin(self, state: Any, live: LiveMesh, step: int, contained_LE: Int[np.ndarray, "L E"]) -> str | None:
        """Starts a snapshot, after waiting for the previous one to finish.

        Args:
            state: see ``begin_snapshot``; may be donated after this returns.
            live: mesh of the state.
            step: iterations done.
            contained_LE: token updates that the state's experts contain.

        Returns:
            The error of the previous snapshot or of this one, or None if there was no error.
        """
        self._settle(None)
        room, self._room = self._room, None
        try:
            finish = begin_snapshot(self._split, state, live, self._choose(contained_LE), room)
        except RuntimeError as error:  # such as too little device memory; training continues without this snapshot
            self._trouble = str(error)
        else:
            self._copying = self._thread.submit(self._copy, finish, step, contained_LE)
        trouble, self._trouble = self._trouble, None
        return trouble

    def copies(self, ranks: Collection[int]) -> list[RankCopy]:
        """Returns the copies of the ranks' slices; waits up to ``PATIENCE_S`` for a copy that is being written."""
        self._settle(PATIENCE_S)
        num_ranks = self._split.num_ranks
        return [
            RankCopy(rank, (rank + 1) % num_ranks, step, snapshot, contained_LE)
            for rank in sorted(ranks)
            for step, snapshot, contained_LE in self._store.rank_snapshots(rank)
        ]

    def _copy(self, finish: Callable[[], Snapshot], step: int, contained_LE: np.ndarray) -> None:
        self._room = self._store.put(step, finish(), contained_LE)

    def _choose(self, contained_LE: np.ndarray) -> np.ndarray:
        """Chooses the classes ``[L, K]`` of the next snapshot; the first snapshot has all experts."""
        num_layers, num_classes = contained_LE.shape
        if self._k >= num_classes or not self._store.dense:
            return everything(num_layers, num_classes)
        if self._selection == "sequential":
            turn_L, self._turn_L = self._turn_L, next_rotation(self._turn_L, num_classes, self._k)
            return sequential(turn_L, num_classes, self._k)
        saved_LE, step_LE = self._store.newest()
        return load_aware(contained_LE - saved_LE, step_LE, self._k)

    def _settle(self, patience_s: float | None) -> None:
        """Waits for the snapshot that is being copied, without a limit if ``patience_s`` is None; stores its error.

        A failed snapshot does not affect the other complete ones.
        """
        if self._copying is None or not wait([self._copying], patience_s).done:
            return
        error, self._copying = self._copying.exception(), None
        if error is not None:
            self._trouble = str(error) or type(error).__name__
