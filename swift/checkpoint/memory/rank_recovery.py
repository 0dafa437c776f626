"""What lost expert ranks had, from the best copies that are left: their snapshots, replicas in slots, storage.

In this order: the snapshot of this very iteration, in the memory of another rank (exact); for weights a replica in a
slot of a rank that lives (of this iteration, rounded where the compute type is narrower); the newest snapshot; storage.
The slices that a lost rank of one stage has in the others are where they were.

Legend: P stages, L MoE layers of a stage, N ranks, S slots of a rank, E classes, w numbers of a rank's slice,
W = N * w numbers of a slot.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from swift.checkpoint.memory.message_texts import Origin, RankSource, kept_lines, rank_facts, rank_lines
from swift.checkpoint.partial import Snapshot, StateSplit, Unit, by_name
from swift.checkpoint.storage import Ledger, RestorePlan
from swift.errors import RunError

_MASTER = "master."


@dataclass(frozen=True)
class RankCopy:
    """One snapshot of a rank's slices, in the memory of another rank.

    Attributes:
        rank: whose slices, of all stages.
        holder: the rank in whose memory they are, each in the same stage; lost with it.
        step: iterations done when it was taken.
        snapshot: of one rank (N = 1): the ranked arrays of the dense part, or none at all, and chosen experts.
        contained_LE: token updates that the experts contained then.
    """

    rank: int
    holder: int
    step: int
    snapshot: Snapshot
    contained_LE: np.ndarray


class Recovered(NamedTuple):
    """A state with all slices there.

    Attributes:
        state: of the old shape, on the host.
        ledger: with the token updates that are lost.
        lines: where every slice has come from.
        facts: the same for ``events.jsonl``.
    """

    state: Any
    ledger: Ledger
    lines: list[str]
    facts: dict[str, Any]


class _Part(NamedTuple):
    """What is restored on its own: a rank's slices of a stage's dense part (unit None), or of an expert."""

    stage: int
    rank: int
    unit: Unit | None


@dataclass(frozen=True)
class _Found:
    """A copy of a part: where it is, its numbers by array, and the token updates that it contains; None: all."""

    origin: Origin
    read: Callable[[str], np.ndarray]
    contained: int | None


def recover_ranks(
    state: Any,
    slots: Mapping[str, np.ndarray] | None,
    split: StateSplit,
    lost: Collection[tuple[int, int]],
    copies: Sequence[RankCopy],
    step: int,
    ledger: Ledger,
    stored: Callable[[], tuple[Any, RestorePlan] | None],
    names: Sequence[int] | None = None,
) -> Recovered:
    """Fills in the slices of lost ranks.

    Args:
        state: on the host, without slots, of all ranks that were; what the lost ones had of it is not read.
        slots: of the same ranks by group, ``[P, row, N, S, W]``, as the state's placement says; None: nobody's.
        split: of the state.
        lost: (stage, rank) of those whose memory is gone.
        copies: snapshots; those that lost ranks held, or that are newer than the state, are passed over.
        step: iterations done.
        ledger: as of this iteration.
        stored: reads the newest sound checkpoint, cut for the ranks that were, and says where it came from; called
            once, where memory has not all. None: there is none.
        names: of the ranks, where they are not their numbers: those of a run that has lost some before.

    Raises:
        RunError: something is neither in memory nor in storage.
    """
    arrays = {name: np.array(leaf) for name, leaf in by_name(state).items()}
    newest_first = sorted((copy for copy in copies if copy.step <= step), key=lambda copy: -copy.step)
    names = range(split.num_ranks) if names is None else names
    gone, stored = frozenset(lost), cache(stored)
    search = _Search(split, arrays["placement"], slots or {}, gone, newest_first, step, stored, names, ledger)
    sources, lost_LE = list[RankSource](), np.zeros_like(ledger.tally.contained_LE)
    for part in _parts(split, lost):
        weights, moments = search.find(part)
        masters, others = _names(split, part.unit)
        for found, of_kind in ((weights, masters), (moments, others)):
            for name in of_kind:
                _slice(split, arrays[name], part)[...] = found.read(name)
        if part.unit is not None and weights.contained is not None:
            lost_LE[part.unit] += max(0, int(ledger.tally.contained_LE[part.unit]) - weights.contained)
        sources.append(RankSource(*part, weights.origin, moments.origin if others else None).named(names))
    lost_LE = -(-lost_LE // split.num_ranks)  # each time only a slice of the expert has gone back
    tally = ledger.tally.fell_back(lost_LE)
    facts = {"sources": rank_facts(sources), "updates_lost": lost_LE.sum(axis=1).tolist()}
    return Recovered(
        jax.tree.unflatten(jax.tree.structure(split.abstract), [arrays[name] for name in split.shapes]),
        replace(ledger, tally=tally),
        [
            *rank_lines(sources, split, step),
            *kept_lines(gone, split.num_stages, names),
            *(f"passed over: {why}" for why in _passed_over(stored)),
        ],
        facts | {"plt": tally.plt, "faults": tally.num_faults},
    )


@dataclass(frozen=True)
class _Search:
    """Where to look for lost parts; see ``recover_ranks``."""

    split: StateSplit
    placement_PLNS: np.ndarray
    slots: Mapping[str, np.ndarray]
    lost: frozenset[tuple[int, int]]
    copies: Sequence[RankCopy]
    step: int
    stored: Callable[[], tuple[Any, RestorePlan] | None]
    names: Sequence[int]
    ledger: Ledger

    def find(self, part: _Part) -> tuple[_Found, _Found]:
        """The best copies of a part's weights, and of its moments."""
        newest = self._newest(part)
        if newest is not None and newest.origin.step == self.step:
            return newest, newest
        weights = self._in_slots(part) or newest or self._in_storage(part)
        _, others = _names(self.split, part.unit)
        return weights, newest or (self._in_storage(part) if others else weights)

    def _newest(self, part: _Part) -> _Found | None:
        """The newest snapshot, or what a checkpoint that was made after it has; None: there is no snapshot."""
        snapshot = next(filter(None, (self._in_snapshot(part, copy) for copy in self.copies)), None)
        if snapshot is None or snapshot.origin.step >= self._saved_step(part):
            return snapshot
        with suppress(RunError):  # it is not sound any more
            return max(snapshot, self._in_storage(part), key=lambda found: found.origin.step)
        return snapshot

    def _saved_step(self, part: _Part) -> int:
        """Of the newest checkpoint that has a part; -1: none."""
        if part.unit is None:
            return max(self.ledger.common, default=-1)
        return next((copy.step for copy in self.ledger.copies.get(part.unit, ())), -1)

    def _in_snapshot(self, part: _Part, copy: RankCopy) -> _Found | None:
        stage, rank, unit = part
        if copy.rank != rank or (stage, copy.holder) in self.lost:
            return None
        origin = Origin("snapshot", copy.step, copy.holder)
        if unit is None:
            arrays = copy.snapshot.dense
            return _Found(origin, lambda name: arrays[name][stage, :, 0], None) if arrays else None
        found = np.flatnonzero(copy.snapshot.chosen_LK[unit[0]] == unit[1])
        if not found.size:
            return None
        row = unit[0] % self.split.rows_per_stage
        return _Found(
            origin,
            lambda name: self.split.view(copy.snapshot.blocks, name)[stage, row, 0, found[0]],
            int(copy.contained_LE[unit]),
        )

    def _in_slots(self, part: _Part) -> _Found | None:
        """The weights as a rank of the stage that lives has them in a slot; those of the dense part all ranks have."""
        stage, rank, unit = part
        living = [other for other in range(self.split.num_ranks) if (stage, other) not in self.lost]
        if not self.slots or not living:
            return None
        row: int | slice = slice(None)
        holder, slot = living[0], 0
        if unit is not None:
            row = unit[0] % self.split.rows_per_stage
            places = np.argwhere(self.placement_PLNS[stage, row, living] == unit[1])
            if not places.size:
                return None
            holder, slot = living[places[0, 0]], places[0, 1]

        def read(name: str) -> np.ndarray:
            whole = self.slots[name.removeprefix(_MASTER)][stage, row, holder, slot]
            width = self.split.shapes[name].shape[-1]
            mine = whole[..., rank * width : (rank + 1) * width]
            return mine if unit is not None else mine[:, None]

        return _Found(Origin("replica", self.step, holder), read, None)

    def _in_storage(self, part: _Part) -> _Found:
        found = self.stored()
        if found is None:
            what = "the dense part" if part.unit is None else f"expert {part.unit[1]} of layer {part.unit[0]}"
            missing = f"its slice of {what} is in no other memory and in no checkpoint"
            raise RunError(f"rank {self.names[part.rank]} is lost, and {missing}")
        state, plan = found
        arrays = by_name(state)
        origin, contained = Origin("storage", plan.step), None
        if part.unit is not None:
            copy = plan.sources[part.unit]
            origin, contained = Origin("storage", copy.step), copy.contained
        return _Found(origin, lambda name: _slice(self.split, arrays[name], part), contained)


def _passed_over(stored: Any) -> tuple[str, ...]:
    """What was damaged in storage, if anybody has looked there."""
    found = stored() if stored.cache_info().currsize else None
    return () if found is None else found[1].passed_over


def _parts(split: StateSplit, lost: Collection[tuple[int, int]]) -> Iterator[_Part]:
    for stage, rank in sorted(lost):
        yield _Part(stage, rank, None)
        for row, class_ in np.ndindex(split.rows_per_stage, split.num_classes):
            yield _Part(stage, rank, (stage * split.rows_per_stage + row, class_))


def _names(split: StateSplit, unit: Unit | None) -> tuple[list[str], list[str]]:
    """The arrays that ranks have slices of, in the dense part or in experts: master weights, and moments."""
    among = split.expert_names if unit is not None else [n for n in split.dense_shapes if n in split.ranked_names]
    masters = [name for name in among if name.startswith(_MASTER)]
    return masters, [name for name in among if name not in masters]


def _slice(split: StateSplit, array: np.ndarray, part: _Part) -> np.ndarray:
    """A part's place in an array ``[P, row, N, ...]``."""
    if part.unit is None:
        return array[part.stage, :, part.rank]
    return array[part.stage, part.unit[0] % split.rows_per_stage, part.rank, part.unit[1]]
