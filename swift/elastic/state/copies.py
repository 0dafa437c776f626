"""Copies of the slices of ranks in the memory of other ranks, as files; and which of them are needed.

Legend: P stages, L MoE layers of a stage, E classes, K classes of a layer that a copy has, V arrays of an expert's
state that have the same type, w numbers of a rank's slice.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from swift.checkpoint import Snapshot, StateSplit
from swift.elastic.membership import Process, Stamp
from swift.elastic.state.shared_memory_store import SharedMemoryStore, place_name, place_of


class Held(NamedTuple):
    """A copy.

    Attributes:
        num_experts: of every layer, K.
        holder: the process in whose memory it is.
        owner: whose slices they are.
        stamp: of the state.
    """

    num_experts: int
    holder: Process
    owner: Process
    stamp: Stamp


class Copies:
    """The copies of all processes in a directory, by K, holder and owner: each such place has one writer.

    Args:
        directory: has to be there.
    """

    def __init__(self, directory: Path):
        self._directory = directory

    def keep(self, num_experts: int, holder: Process, owner: Process) -> SharedMemoryStore:
        """Where a holder has its copies of an owner's slices that have so many experts of every layer."""
        directory = self._directory / str(num_experts)
        directory.mkdir(exist_ok=True)
        directory /= place_name(holder)
        directory.mkdir(exist_ok=True)
        return SharedMemoryStore(directory, owner)

    def held(self, holders: Collection[Process], owners: Collection[Process]) -> Iterator[Held]:
        """The complete copies that some have of the slices of some."""
        for path in self._directory.glob("*/*/*"):
            num_experts, holder, owner = int(path.parts[-3]), place_of(path.parts[-2]), place_of(path.name)
            if holder in holders and owner in owners:
                for stamp in self.keep(num_experts, holder, owner).stamps():
                    yield Held(num_experts, holder, owner, stamp)

    def forget(self, holder: Process, but: Collection[Held] = ()) -> None:
        """Removes the copies that a holder has, but for some."""
        for path in self._directory.glob(f"*/{place_name(holder)}/*"):
            num_experts, owner = int(path.parts[-3]), place_of(path.name)
            kept = [one.stamp for one in but if (one.num_experts, one.owner) == (num_experts, owner)]
            self.keep(num_experts, holder, owner).forget(but=frozenset(kept))

    def hand_over(self, other: "Copies", holder: Process, owners: Collection[Process]) -> None:
        """Has others find what a holder has of some owners' slices."""
        for num_experts, owner in {(one.num_experts, one.owner) for one in self.held([holder], owners)}:
            self.keep(num_experts, holder, owner).hand_over(other.keep(num_experts, holder, owner))


def needed(chosen_by: Mapping[Stamp, np.ndarray], num_classes: int) -> frozenset[Stamp]:
    """The copies that are kept: the newest two, and those that have the newest slices of an expert.

    Args:
        chosen_by: the classes ``[L, K]`` that each copy has.
        num_classes: E.

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
    """Shapes and types of a copy: one rank's ranked arrays, of the experts' arrays K classes of every layer.

    Args:
        split: of the state of all ranks.
        num_experts: K.

    Returns:
        ``dense`` and ``experts`` by name, ``[P, row, 1, ...]`` and ``[P, L, 1, K, w]``; ``chosen``, ``[P * L, K]``.
    """

    def shape(name: str) -> jax.ShapeDtypeStruct:
        stages, rows, _, *rest = split.shapes[name].shape
        if name in split.expert_names:
            rest = [num_experts, *rest[1:]]
        return jax.ShapeDtypeStruct((stages, rows, 1, *rest), split.shapes[name].dtype)

    return {
        "dense": {name: shape(name) for name in split.dense_shapes if name in split.ranked_names},
        "experts": {name: shape(name) for name in split.expert_names},
        "chosen": jax.ShapeDtypeStruct((split.num_layers, num_experts), np.int32),
    }


def as_snapshot(split: StateSplit, copy: Mapping[str, Any]) -> Snapshot:
    """A copy as a snapshot of one rank (N = 1), its blocks ``[P * L, K, V, 1, w]``."""
    chosen_LK = copy["chosen"]
    blocks = {
        dtype: np.empty((*chosen_LK.shape, len(names), 1, split.unit_shapes[dtype].shape[-1]), dtype)
        for dtype, names in split.names_of_type.items()
    }
    for name, array in copy["experts"].items():
        split.view(blocks, name)[...] = array
    return Snapshot(dict(copy["dense"]), blocks, chosen_LK)
