"""Copies of ranks' slices in the memory of their neighbours, as files, and the choice of those to keep.

Legend: P stages, L MoE layers of a stage, E experts, K experts of a layer in a copy, V arrays of an expert's state of
the same type, w numbers of a rank's slice.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from swift.checkpoint.partial.expert_units import Snapshot, StateSplit
from swift.elastic.membership.members import Process, Stamp
from swift.elastic.state.shared_memory_store import SharedMemoryStore, directory_name, process_of


class SliceCopy(NamedTuple):
    """A copy of a rank's slices.

    Attributes:
        num_experts: number of experts of every layer, K.
        neighbour: process in whose memory the copy is.
        owner: process whose slices these are.
        stamp: stamp of the state.
    """

    num_experts: int
    neighbour: Process
    owner: Process
    stamp: Stamp


class SliceCopies:
    """The copies of all processes in a directory, by K, neighbour and owner: each combination has one writer.

    Args:
        directory: directory of the copies, which must exist.
    """

    def __init__(self, directory: Path):
        self._directory = directory

    def store(self, num_experts: int, neighbour: Process, owner: Process) -> SharedMemoryStore:
        """Returns the store of a neighbour's copies of an owner's slices, each with K experts of every layer."""
        directory = self._directory / str(num_experts)
        directory.mkdir(exist_ok=True)
        directory /= directory_name(neighbour)
        directory.mkdir(exist_ok=True)
        return SharedMemoryStore(directory, owner)

    def find(self, neighbours: Collection[Process], owners: Collection[Process]) -> Iterator[SliceCopy]:
        """Yields the complete copies that any of these neighbours has of the slices of any of these owners."""
        for path in self._directory.glob("*/*/*"):
            num_experts, neighbour, owner = int(path.parts[-3]), process_of(path.parts[-2]), process_of(path.name)
            if neighbour in neighbours and owner in owners:
                for stamp in self.store(num_experts, neighbour, owner).stamps():
                    yield SliceCopy(num_experts, neighbour, owner, stamp)

    def keep_only(self, neighbour: Process, kept: Collection[SliceCopy] = ()) -> None:
        """Removes the copies of a neighbour, except some."""
        for path in self._directory.glob(f"*/{directory_name(neighbour)}/*"):
            num_experts, owner = int(path.parts[-3]), process_of(path.name)
            stamps = [one.stamp for one in kept if (one.num_experts, one.owner) == (num_experts, owner)]
            self.store(num_experts, neighbour, owner).keep_only(frozenset(stamps))

    def hand_over(self, other: "SliceCopies", neighbour: Process, owners: Collection[Process]) -> None:
        """Adds the copies that a neighbour has of some owners' slices to other copies."""
        for num_experts, owner in {(one.num_experts, one.owner) for one in self.find([neighbour], owners)}:
            self.store(num_experts, neighbour, owner).hand_over(other.store(num_experts, neighbour, owner))


def needed(chosen_by: Mapping[Stamp, np.ndarray], num_classes: int) -> frozenset[Stamp]:
    """Returns the copies to keep: the newest two, and those with the newest slices of an expert.

    Args:
        chosen_by: experts ``[L, K]`` in each copy.
        num_classes: number of experts, E.

    >>> chosen = {Stamp(1, step): np.array([[step % 3]]) for step in range(9)}
    >>> sorted(stamp.step for stamp in needed(chosen, 3))
    [6, 7, 8]
    """
    found = set[Stamp]()
    covered_LE = np.zeros((len(next(iter(chosen_by.values()), ())), num_classes), bool)
    for nth, (stamp, chosen_LK) in enumerate(sorted(chosen_by.items(), reverse=True, key=lambda item: item[0])):
        if nth < 2 or not np.take_along_axis(covered_LE, chosen_LK, axis=1).all():
            found.add(stamp)
        np.put_along_axis(covered_LE, chosen_LK, True, axis=1)
    return frozenset(found)


def copy_shapes(split: StateSplit, num_experts: int) -> dict[str, Any]:
    """Returns shapes and types of a copy: one rank's ranked arrays, with K experts of every layer.

    Args:
        split: division of the state of all ranks.
        num_experts: number of experts of every layer, K.

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


def as_snapshot(split: StateSplit, copy: Mapping[str, Any]) -> Snapshot:
    """Returns a copy as a snapshot of one rank (N = 1), its blocks ``[layers, K, V, 1, w]``."""
    chosen_LK = copy["chosen"]
    blocks = {
        dtype: np.empty((*chosen_LK.shape, len(names), 1, split.unit_shapes[dtype].shape[-1]), dtype)
        for dtype, names in split.names_of_type.items()
    }
    for name, array in copy["experts"].items():
        split.put(blocks, name, array)
    return Snapshot(dict(copy["dense"]), blocks, chosen_LK)
