"""Search for the best copy of each slice that lost ranks had: a snapshot, a replica in a slot, or storage.

Legend: P stages, N ranks, S slots of a rank, w values of a rank's slice, W = N * w values of a slot.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from swift.checkpoint.memory.message_texts import Origin
from swift.checkpoint.partial.expert_units import Snapshot, StateSplit, Unit, by_name
from swift.checkpoint.storage.manifest import Ledger
from swift.checkpoint.storage.reader import RestorePlan
from swift.errors import RunError

_MASTER = "master."


@dataclass(frozen=True)
class RankCopy:
    """A snapshot of a rank's slices, in the memory of another rank.

    Attributes:
        rank: rank that the slices belong to, in all stages.
        holder: rank in whose memory they are, each in the same stage; lost with it.
        step: iterations done when it was taken.
        snapshot: snapshot of one rank (N = 1): the ranked arrays of the dense part, or none, and chosen experts.
        contained_LE: token updates that the experts contained then.
    """

    rank: int
    holder: int
    step: int
    snapshot: Snapshot
    contained_LE: np.ndarray


class LostSlices(NamedTuple):
    """A rank's slices of a stage's dense part (unit None), or of an expert, which are recovered on their own."""

    stage: int
    rank: int
    unit: Unit | None


@dataclass(frozen=True)
class FoundCopy:
    """A copy of lost slices: its origin, a reader of its values by array, and its token updates; None: all."""

    origin: Origin
    read: Callable[[str], np.ndarray]
    contained: int | None


@dataclass(frozen=True, kw_only=True)
class SliceSearch:
    """The copies to search for lost slices; see ``recover_ranks``."""

    split: StateSplit
    placement_PLNS: np.ndarray
    slots: Mapping[str, np.ndarray]
    lost: frozenset[tuple[int, int]]
    copies: Sequence[RankCopy]
    step: int
    stored: Callable[[], tuple[Any, RestorePlan] | None]
    names: Sequence[int]
    ledger: Ledger

    def find(self, wanted: LostSlices) -> tuple[FoundCopy, FoundCopy]:
        """The best copies of the weights of lost slices, and of their moments."""
        newest = self._newest(wanted)
        if newest is not None and newest.origin.step == self.step:
            return newest, newest
        weights = self._in_slots(wanted) or newest or self._in_storage(wanted)
        _, moment_names = slice_names(self.split, wanted.unit)
        return weights, newest or (self._in_storage(wanted) if moment_names else weights)

    def _newest(self, wanted: LostSlices) -> FoundCopy | None:
        """The newest snapshot of lost slices, or their copy in a newer checkpoint; None: there is no snapshot."""
        snapshot = next(filter(None, (self._in_snapshot(wanted, copy) for copy in self.copies)), None)
        if snapshot is None or snapshot.origin.step >= self._saved_step(wanted):
            return snapshot
        with suppress(RunError):  # the checkpoint may be damaged by now
            return max(snapshot, self._in_storage(wanted), key=lambda found: found.origin.step)
        return snapshot

    def _saved_step(self, wanted: LostSlices) -> int:
        """The step of the newest checkpoint that has these slices; -1: none."""
        if wanted.unit is None:
            return max(self.ledger.common, default=-1)
        return next((copy.step for copy in self.ledger.copies.get(wanted.unit, ())), -1)

    def _in_snapshot(self, wanted: LostSlices, copy: RankCopy) -> FoundCopy | None:
        stage, rank, unit = wanted
        if copy.rank != rank or (stage, copy.holder) in self.lost:
            return None
        origin = Origin("snapshot", copy.step, copy.holder)
        if unit is None:
            arrays = copy.snapshot.dense
            return FoundCopy(origin, lambda name: arrays[name][stage, :, 0], None) if arrays else None
        found = np.flatnonzero(copy.snapshot.chosen_LK[unit[0]] == unit[1])
        if not found.size:
            return None
        return FoundCopy(
            origin,
            lambda name: self.split.view(copy.snapshot.blocks, name)[unit[0], 0, found[0]],
            int(copy.contained_LE[unit]),
        )

    @property
    def _has_whole_experts(self) -> bool:
        """Whether slots have whole experts; with exact capacity they have the ranks' own slices."""
        width = self.split.shapes[f"{_MASTER}expert"].shape[-1]
        return self.slots["expert"].shape[-1] >= self.split.num_ranks * width

    def _in_slots(self, wanted: LostSlices) -> FoundCopy | None:
        """The weights in a slot of a live rank of the stage; every rank has those of the dense part."""
        stage, rank, unit = wanted
        living = [other for other in range(self.split.num_ranks) if (stage, other) not in self.lost]
        if not self.slots or not living:
            return None
        layer: int | slice = slice(None)
        holder, slot = living[0], 0
        if unit is not None:
            if not self._has_whole_experts:
                return None
            _, layer = self.split.location(unit[0])
            found = np.argwhere(self.placement_PLNS[stage, layer, living] == unit[1])
            if not found.size:
                return None
            holder, slot = living[found[0, 0]], found[0, 1]

        def read(name: str) -> np.ndarray:
            whole = self.slots[name.removeprefix(_MASTER)][stage, layer, holder, slot]
            width = self.split.shapes[name].shape[-1]
            mine = whole[..., rank * width : (rank + 1) * width]
            return mine if unit is not None else mine[:, None]

        return FoundCopy(Origin("replica", self.step, holder), read, None)

    def _in_storage(self, wanted: LostSlices) -> FoundCopy:
        found = self.stored()
        if found is None:
            what = "the dense part" if wanted.unit is None else f"expert {wanted.unit[1]} of layer {wanted.unit[0]}"
            missing = f"no memory and no checkpoint has a copy of its slice of {what}"
            raise RunError(f"rank {self.names[wanted.rank]} is lost, and {missing}")
        state, plan = found
        arrays = by_name(state)
        origin, contained = Origin("storage", plan.step), None
        if wanted.unit is not None:
            copy = plan.sources[wanted.unit]
            origin, contained = Origin("storage", copy.step), copy.contained
        return FoundCopy(origin, lambda name: slice_of(self.split, arrays[name], wanted), contained)


def lost_slices(split: StateSplit, lost: Collection[tuple[int, int]]) -> Iterator[LostSlices]:
    """The slices that lost ranks had; ``lost`` has pairs (stage, rank)."""
    for stage, rank in sorted(lost):
        yield LostSlices(stage, rank, None)
        for layer, class_ in product(split.layers_of_stages[stage], range(split.num_classes)):
            yield LostSlices(stage, rank, (layer, class_))


def slice_names(split: StateSplit, unit: Unit | None) -> tuple[list[str], list[str]]:
    """Names of the arrays in slices, of the dense part or of experts: (master weights, moments)."""
    among = split.expert_names if unit is not None else [n for n in split.dense_shapes if n in split.ranked_names]
    masters = [name for name in among if name.startswith(_MASTER)]
    return masters, [name for name in among if name not in masters]


def slice_of(split: StateSplit, array: np.ndarray, wanted: LostSlices) -> np.ndarray:
    """A view of lost slices in an array ``[P, layer, N, ...]``."""
    if wanted.unit is None:
        return array[wanted.stage, :, wanted.rank]
    return array[wanted.stage, split.location(wanted.unit[0])[1], wanted.rank, wanted.unit[1]]
