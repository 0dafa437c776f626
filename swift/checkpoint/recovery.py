"""Rebuilds the slices of lost expert ranks from the best remaining copies.

``recover_ranks`` tries these sources in order: a snapshot of the current iteration in another rank's memory (exact);
for weights, a replica in a slot of a live rank (of this iteration, but rounded if the compute dtype is narrower); and
the newer of the newest snapshot and the newest stored copy. A rank that is lost in one stage still has its slices of
the other stages. The source of every slice is reported in lines for the terminal and in fields of events.

Legend: P stages, N ranks, S slots of a rank, w values of a rank's slice, W values of a slot, which is N * w if slots
hold whole experts.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, product
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from swift.checkpoint.manifest import Ledger
from swift.checkpoint.reader import RestorePlan
from swift.checkpoint.units import Snapshot, StateSplit, Unit, by_name
from swift.errors import RunError

_MASTER = "master."


class _CopySource(NamedTuple):
    """The origin of a slice's copy.

    Attributes:
        kind: a snapshot of the rank, a replica of the expert in a slot, or a checkpoint in storage.
        step: iterations done when the copy was made.
        holder: rank in whose memory the copy is; -1 for storage.
    """

    kind: Literal["snapshot", "replica", "storage"]
    step: int
    holder: int = -1

    def named(self, names: Sequence[int]) -> "_CopySource":
        """Replaces the holder's rank number with its name."""
        return self if self.holder < 0 else self._replace(holder=names[self.holder])


class _RankSource(NamedTuple):
    """The origins of a lost rank's slices, either for one expert or for the dense part.

    Attributes:
        stage, rank: the lost rank.
        unit: the expert; None for the dense part.
        weights: origin of the master weights.
        moments: origin of the optimizer's moments; None if the optimizer has no moments.
    """

    stage: int
    rank: int
    unit: Unit | None
    weights: _CopySource
    moments: _CopySource | None

    def named(self, names: Sequence[int]) -> "_RankSource":
        """Replaces rank numbers with names."""
        moments = self.moments and self.moments.named(names)
        return _RankSource(self.stage, names[self.rank], self.unit, self.weights.named(names), moments)


@dataclass(frozen=True)
class RankCopy:
    """A snapshot of one rank's slices in another rank's memory.

    Attributes:
        rank: rank whose slices these are, in all stages.
        holder: rank that holds them in each stage; if it is lost in a stage, so are that stage's copies.
        step: iterations done when the snapshot was taken.
        snapshot: snapshot of a single rank (N = 1) with the ranked dense arrays, or none, and the chosen experts.
        contained_LE: token updates that the experts' state contained.
    """

    rank: int
    holder: int
    step: int
    snapshot: Snapshot
    contained_LE: np.ndarray


class Recovered(NamedTuple):
    """A state in which the slices of lost ranks are recovered.

    Attributes:
        state: state on the host, with the ranks before the loss.
        ledger: ledger that includes the lost token updates.
        lines: description of the source of every slice, as lines for the terminal.
        facts: the sources and losses, as fields of an event in ``events.jsonl``.
    """

    state: Any
    ledger: Ledger
    lines: list[str]
    facts: dict[str, Any]


def recover_ranks(
    state: Any,
    slots: Mapping[str, np.ndarray] | None,
    split: StateSplit,
    lost: Collection[tuple[int, int]],
    *,
    copies: Sequence[RankCopy],
    step: int,
    ledger: Ledger,
    stored: Callable[[], tuple[Any, RestorePlan] | None],
    names: Sequence[int] | None = None,
) -> Recovered:
    """Fills in the slices of lost ranks from the best copies.

    Args:
        state: state on the host, without slots, of all ranks before the loss; the slices of lost ranks are not read.
        slots: slots of the same ranks by group, ``[P, layer, N, S, W]``, in the state's placement; None for no slots.
        split: division of the state.
        lost: pairs (stage, rank) whose memory is lost.
        copies: snapshots; copies that lost ranks held, or that are newer than the state, are ignored.
        step: iterations done.
        ledger: ledger as of this iteration.
        stored: function that reads the newest intact checkpoint, in the shape of the state, with its plan; returns None
            if there is no checkpoint. It is called at most once, and only if a slice has no copy in memory or a newer
            copy in storage.
        names: names of the ranks if they differ from their numbers, as in a run that has lost ranks before.

    Raises:
        RunError: a slice has a copy neither in memory nor in storage.
    """
    arrays = {name: np.array(leaf) for name, leaf in by_name(state).items()}
    newest_first = sorted((copy for copy in copies if copy.step <= step), key=lambda copy: -copy.step)
    names = range(split.num_ranks) if names is None else names
    lost_ranks, stored = frozenset(lost), cache(stored)
    search = _SliceSearch(
        split=split,
        placement_PLNS=arrays["placement"],
        slots=slots or {},
        lost=lost_ranks,
        copies=newest_first,
        step=step,
        stored=stored,
        names=names,
        ledger=ledger,
    )
    sources, lost_LE = list[_RankSource](), np.zeros_like(ledger.tally.contained_LE)
    for lost_slices in _lost_slices(split, lost):
        source, num_lost = _fill(search, arrays, lost_slices)
        sources.append(source)
        if lost_slices.unit is not None:
            lost_LE[lost_slices.unit] += num_lost
    lost_LE = -(-lost_LE // split.num_ranks)  # each lost slice is 1/N of its expert; rounded up
    tally = ledger.tally.fell_back(lost_LE)
    passed_over = [f"passed over: {reason}" for reason in _skipped_copies(stored)]
    facts = {"sources": _rank_facts(sources), "updates_lost": lost_LE.sum(axis=1).tolist()}
    return Recovered(
        jax.tree.unflatten(jax.tree.structure(split.abstract), [arrays[name] for name in split.shapes]),
        replace(ledger, tally=tally),
        [*_rank_lines(sources, split, step), *_retained_lines(lost_ranks, split.num_stages, names), *passed_over],
        facts | {"plt": tally.plt, "faults": tally.num_faults},
    )


class _LostSlices(NamedTuple):
    """Slices of one rank that are recovered together, for one expert or for its stage's dense part (``unit`` None)."""

    stage: int
    rank: int
    unit: Unit | None


@dataclass(frozen=True)
class _SliceSource:
    """A copy of lost slices.

    Attributes:
        origin: origin of the copy.
        read: function that returns the copy's values of an array, by name.
        contained: token updates that the copy contains; None if it contains all of them.
    """

    origin: _CopySource
    read: Callable[[str], np.ndarray]
    contained: int | None


@dataclass(frozen=True, kw_only=True)
class _SliceSearch:
    """Searches for the best copies of lost slices; see ``recover_ranks`` for the attributes."""

    split: StateSplit
    placement_PLNS: np.ndarray
    slots: Mapping[str, np.ndarray]
    lost: frozenset[tuple[int, int]]
    copies: Sequence[RankCopy]
    step: int
    stored: Callable[[], tuple[Any, RestorePlan] | None]
    names: Sequence[int]
    ledger: Ledger

    def find(self, lost_slices: _LostSlices) -> tuple[_SliceSource, _SliceSource]:
        """Returns the best copies of lost slices, as (source for the weights, source for the moments)."""
        newest = self._newest(lost_slices)
        # A copy of the current iteration is exact, while a replica's weights may be rounded.
        if newest is not None and newest.origin.step == self.step:
            return newest, newest
        weights = self._in_slots(lost_slices) or newest or self._in_storage(lost_slices)
        _, moment_names = _slice_names(self.split, lost_slices.unit)
        return weights, newest or (self._in_storage(lost_slices) if moment_names else weights)

    def _newest(self, lost_slices: _LostSlices) -> _SliceSource | None:
        """Returns the newest snapshot of lost slices, or a checkpoint's copy if newer; None if there is no snapshot."""
        snapshot = next(filter(None, (self._in_snapshot(lost_slices, copy) for copy in self.copies)), None)
        if snapshot is None or snapshot.origin.step >= self._saved_step(lost_slices):
            return snapshot
        with suppress(RunError):  # the checkpoint may have been damaged since: use the snapshot
            return max(snapshot, self._in_storage(lost_slices), key=lambda source: source.origin.step)
        return snapshot

    def _saved_step(self, lost_slices: _LostSlices) -> int:
        """Returns the step of the newest checkpoint that contains these slices, or -1 if there is none."""
        if lost_slices.unit is None:
            return max(self.ledger.common, default=-1)
        return next((copy.step for copy in self.ledger.copies.get(lost_slices.unit, ())), -1)

    def _in_snapshot(self, lost_slices: _LostSlices, copy: RankCopy) -> _SliceSource | None:
        stage, rank, unit = lost_slices
        if copy.rank != rank or (stage, copy.holder) in self.lost:
            return None
        origin = _CopySource("snapshot", copy.step, copy.holder)
        if unit is None:
            arrays = copy.snapshot.dense
            return _SliceSource(origin, lambda name: arrays[name][stage, :, 0], None) if arrays else None
        indices = np.flatnonzero(copy.snapshot.chosen_LK[unit[0]] == unit[1])
        if not indices.size:
            return None
        return _SliceSource(
            origin,
            lambda name: self.split.view(copy.snapshot.blocks, name)[unit[0], 0, indices[0]],
            int(copy.contained_LE[unit]),
        )

    @property
    def _has_whole_experts(self) -> bool:
        """Whether slots hold whole experts; with exact capacity they hold only the ranks' own slices."""
        width = self.split.shapes[f"{_MASTER}expert"].shape[-1]
        return self.slots["expert"].shape[-1] >= self.split.num_ranks * width

    def _in_slots(self, lost_slices: _LostSlices) -> _SliceSource | None:
        """Returns the weights in a slot of a live rank in the same stage, or None; every rank has the dense weights."""
        stage, rank, unit = lost_slices
        living = [other for other in range(self.split.num_ranks) if (stage, other) not in self.lost]
        if not self.slots or not living:
            return None
        layer: int | slice = slice(None)
        holder, slot = living[0], 0
        if unit is not None:
            if not self._has_whole_experts:
                return None
            _, layer = self.split.location(unit[0])
            replicas = np.argwhere(self.placement_PLNS[stage, layer, living] == unit[1])
            if not replicas.size:
                return None
            holder, slot = living[replicas[0, 0]], replicas[0, 1]

        def read(name: str) -> np.ndarray:
            weights = self.slots[name.removeprefix(_MASTER)][stage, layer, holder, slot]
            width = self.split.shapes[name].shape[-1]
            rank_slice = weights[..., rank * width : (rank + 1) * width]
            return rank_slice if unit is not None else rank_slice[:, None]

        return _SliceSource(_CopySource("replica", self.step, holder), read, None)

    def _in_storage(self, lost_slices: _LostSlices) -> _SliceSource:
        stored = self.stored()
        if stored is None:
            unit = lost_slices.unit
            subject = "the dense part" if unit is None else f"expert {unit[1]} of layer {unit[0]}"
            missing = f"no memory and no checkpoint has a copy of its slice of {subject}"
            raise RunError(f"rank {self.names[lost_slices.rank]} is lost, and {missing}")
        state, plan = stored
        arrays = by_name(state)
        origin, contained = _CopySource("storage", plan.step), None
        if lost_slices.unit is not None:
            copy = plan.sources[lost_slices.unit]
            origin, contained = _CopySource("storage", copy.step), copy.contained
        return _SliceSource(origin, lambda name: _slice_of(self.split, arrays[name], lost_slices), contained)


def _lost_slices(split: StateSplit, lost: Collection[tuple[int, int]]) -> Iterator[_LostSlices]:
    """Yields all slices of lost ranks; ``lost`` has pairs (stage, rank)."""
    for stage, rank in sorted(lost):
        yield _LostSlices(stage, rank, None)
        for layer, class_ in product(split.layers_of_stages[stage], range(split.num_classes)):
            yield _LostSlices(stage, rank, (layer, class_))


def _slice_names(split: StateSplit, unit: Unit | None) -> tuple[list[str], list[str]]:
    """Returns the names of the arrays whose slices ranks hold, as (master weights, moments).

    They are the arrays of an expert, or those of the dense part if ``unit`` is None.
    """
    among = split.expert_names if unit is not None else [n for n in split.dense_shapes if n in split.ranked_names]
    masters = [name for name in among if name.startswith(_MASTER)]
    return masters, [name for name in among if name not in masters]


def _slice_of(split: StateSplit, array: np.ndarray, lost_slices: _LostSlices) -> np.ndarray:
    """Returns a view of lost slices in an array ``[P, layer, N, ...]``."""
    if lost_slices.unit is None:
        return array[lost_slices.stage, :, lost_slices.rank]
    return array[lost_slices.stage, split.location(lost_slices.unit[0])[1], lost_slices.rank, lost_slices.unit[1]]


def _fill(search: _SliceSearch, arrays: Mapping[str, np.ndarray], lost_slices: _LostSlices) -> tuple[_RankSource, int]:
    """Fills in lost slices from their best copies; returns (the copies' origins, number of lost token updates)."""
    weights, moments = search.find(lost_slices)
    weight_names, moment_names = _slice_names(search.split, lost_slices.unit)
    for slice_source, names in ((weights, weight_names), (moments, moment_names)):
        for name in names:
            _slice_of(search.split, arrays[name], lost_slices)[...] = slice_source.read(name)
    num_lost = 0
    if lost_slices.unit is not None and weights.contained is not None:
        num_lost = max(0, int(search.ledger.tally.contained_LE[lost_slices.unit]) - weights.contained)
    source = _RankSource(*lost_slices, weights.origin, moments.origin if moment_names else None)
    return source.named(search.names), num_lost


def _skipped_copies(stored: Any) -> tuple[str, ...]:
    """Returns the damage found in storage; empty if the checkpoint was not read."""
    restored = stored() if stored.cache_info().currsize else None
    return () if restored is None else restored[1].passed_over


def _rank_lines(sources: Sequence[_RankSource], split: StateSplit, step: int) -> list[str]:
    """Writes a line for each source of each lost rank, such as these for rank 3.

        rank 3 is lost: dense and experts 0-7: snapshot of rank 4, 0 steps old
        rank 3: weights of experts 1, 2 of layer 0: a replica on rank 6; their moments: snapshot of rank 4, 3 steps old
        rank 3: expert 5 of layer 1: storage, step 40

    Args:
        sources: sources, rank by rank.
        split: division of the state.
        step: iterations done.
    """
    lines = []
    for (stage, rank), rank_sources in groupby(sources, key=lambda source: (source.stage, source.rank)):
        name = f"rank {rank}" + (f" of stage {stage}" if split.num_stages > 1 else "")
        for index, alike in enumerate(_by_origin(rank_sources)):
            weights, moments = alike[0].weights, alike[0].moments
            text = f"{_content_text(alike, split)}: {_origin_text({source.weights for source in alike}, step)}"
            if moments is not None and moments != weights:
                text = f"weights of {text}; their moments: {_origin_text({moments}, step)}"
            lines.append(f"{name}{' is lost' if index == 0 else ''}: {text}")
    return lines


def _retained_lines(lost: Collection[tuple[int, int]], num_stages: int, names: Sequence[int]) -> list[str]:
    """Writes a line for each rank that is lost in only some of the stages.

    >>> _retained_lines({(1, 3)}, 3, range(4))
    ['rank 3: slices of stages 0, 2: still on their devices']
    """
    lines = []
    for rank in sorted({rank for _, rank in lost}):
        stages = [stage for stage in range(num_stages) if (stage, rank) not in lost]
        where = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        lines += [f"rank {names[rank]}: slices of {where}: still on their devices"] * bool(stages)
    return lines


def _rank_facts(sources: Sequence[_RankSource]) -> list[dict[str, Any]]:
    """Returns the sources as fields for ``events.jsonl``; experts are ``[layer, class]``."""
    facts = []
    for (stage, rank), rank_sources in groupby(sources, key=lambda source: (source.stage, source.rank)):
        for alike in _by_origin(rank_sources):
            weights, moments = alike[0].weights, alike[0].moments
            facts.append(
                {
                    "stage": stage,
                    "rank": rank,
                    "dense": any(source.unit is None for source in alike),
                    "experts": [list(source.unit) for source in alike if source.unit is not None],
                    "weights": _fact(weights, {source.weights.holder for source in alike}),
                    "moments": None if moments is None else _fact(moments, {moments.holder}),
                }
            )
    return facts


def _by_origin(sources: Iterable[_RankSource]) -> list[list[_RankSource]]:
    """Groups the sources that share a line, which have the same origin; the ranks of replicas may differ."""
    groups = defaultdict(list)
    for source in sources:
        weights = source.weights
        where = weights._replace(holder=-1) if weights.kind == "replica" else weights
        groups[where, source.moments].append(source)
    return list(groups.values())


def _fact(origin: _CopySource, holders: Collection[int]) -> dict[str, Any]:
    fact = {"source": origin.kind, "step": origin.step}
    return fact if origin.kind == "storage" else fact | {"ranks": sorted(holders)}


def _origin_text(origins: Collection[_CopySource], step: int) -> str:
    """Describes one origin, or several replicas on different ranks."""
    kind, origin_step, holder = min(origins)
    if kind == "storage":
        return f"storage, step {origin_step}"
    if kind == "snapshot":
        age = step - origin_step
        return f"snapshot of rank {holder}, {age} step{'s' * (age != 1)} old"
    ranks = ", ".join(str(origin.holder) for origin in sorted(origins))
    return f"replicas on ranks {ranks}" if len(origins) > 1 else f"a replica on rank {ranks}"


def _content_text(sources: Sequence[_RankSource], split: StateSplit) -> str:
    """Describes the recovered slices, such as ``dense and experts 0-7``; names layers only if they are not all."""
    classes_by_layer = defaultdict(list)
    for source in sources:
        if source.unit is not None:
            classes_by_layer[source.unit[0]].append(source.unit[1])
    layers_of = defaultdict(list)
    for layer, classes in classes_by_layer.items():
        layers_of[_ranges(classes)].append(layer)
    texts = ["dense"] * any(source.unit is None for source in sources)
    for named, layers in layers_of.items():
        text = f"expert{'s' * (not named.isdigit())} {named}"
        if len(layers) < min(map(len, split.layers_of_stages)):
            text += f" of layer{'s' * (len(layers) > 1)} {_ranges(layers)}"
        texts.append(text)
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _ranges(numbers: Sequence[int]) -> str:
    """Abbreviates ascending numbers, such as ``0-3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ', '}{run[-1]}" for run in runs]
    return ", ".join(parts)
