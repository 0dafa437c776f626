"""Texts and event fields that name the sources of lost ranks' slices."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from swift.checkpoint.partial.expert_units import StateSplit, Unit


class Origin(NamedTuple):
    """The origin of a copy of a slice.

    Attributes:
        kind: a snapshot of the rank, a replica of the expert in a slot, or a checkpoint.
        step: iterations done when the copy was made.
        holder: rank in whose memory it was; -1 for storage.
    """

    kind: Literal["snapshot", "replica", "storage"]
    step: int
    holder: int = -1

    def named(self, names: Sequence[int]) -> "Origin":
        """The origin with the name of a rank in place of its number."""
        return self if self.holder < 0 else self._replace(holder=names[self.holder])


class RankSource(NamedTuple):
    """The source of a lost rank's slices of the dense part or of an expert.

    Attributes:
        stage, rank: the lost rank.
        unit: the expert; None: the dense part.
        weights: origin of the master weights.
        moments: origin of the optimizer's moments; None if the optimizer has none.
    """

    stage: int
    rank: int
    unit: Unit | None
    weights: Origin
    moments: Origin | None

    def named(self, names: Sequence[int]) -> "RankSource":
        """The source with the names of ranks in place of their numbers."""
        moments = self.moments and self.moments.named(names)
        return RankSource(self.stage, names[self.rank], self.unit, self.weights.named(names), moments)


def rank_lines(sources: Sequence[RankSource], split: StateSplit, step: int) -> list[str]:
    """Writes a line for each source of each lost rank, such as these of rank 3.

        rank 3 is lost: dense and experts 0-7: snapshot of rank 4, 0 steps old
        rank 3: weights of experts 1, 2 of layer 0: a replica on rank 6; their moments: snapshot of rank 4, 3 steps old
        rank 3: expert 5 of layer 1: storage, step 40

    Args:
        sources: sources, rank by rank.
        split: division of the state.
        step: iterations done.
    """
    lines = []
    for (stage, rank), of_rank in groupby(sources, key=lambda source: (source.stage, source.rank)):
        name = f"rank {rank}" + (f" of stage {stage}" if split.num_stages > 1 else "")
        for index, alike in enumerate(_by_origin(of_rank)):
            weights, moments = alike[0].weights, alike[0].moments
            text = f"{_content_text(alike, split)}: {_origin_text({source.weights for source in alike}, step)}"
            if moments is not None and moments != weights:
                text = f"weights of {text}; their moments: {_origin_text({moments}, step)}"
            lines.append(f"{name}{' is lost' if index == 0 else ''}: {text}")
    return lines


def kept_lines(lost: Collection[tuple[int, int]], num_stages: int, names: Sequence[int]) -> list[str]:
    """A line for each rank that is lost in only some stages.

    >>> kept_lines({(1, 3)}, 3, range(4))
    ['rank 3: slices of stages 0, 2: still on their devices']
    """
    lines = []
    for rank in sorted({rank for _, rank in lost}):
        stages = [stage for stage in range(num_stages) if (stage, rank) not in lost]
        where = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        lines += [f"rank {names[rank]}: slices of {where}: still on their devices"] * bool(stages)
    return lines


def rank_facts(sources: Sequence[RankSource]) -> list[dict[str, Any]]:
    """Fields of the sources for ``events.jsonl``; experts are ``[layer, class]``."""
    facts = []
    for (stage, rank), of_rank in groupby(sources, key=lambda source: (source.stage, source.rank)):
        for alike in _by_origin(of_rank):
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


def _by_origin(sources: Iterable[RankSource]) -> list[list[RankSource]]:
    """Groups the sources that share a line: those of one origin, and replicas on whichever ranks."""
    groups = defaultdict(list)
    for source in sources:
        weights = source.weights
        where = weights._replace(holder=-1) if weights.kind == "replica" else weights
        groups[where, source.moments].append(source)
    return list(groups.values())


def _fact(origin: Origin, holders: Collection[int]) -> dict[str, Any]:
    fact = {"source": origin.kind, "step": origin.step}
    return fact if origin.kind == "storage" else fact | {"ranks": sorted(holders)}


def _origin_text(origins: Collection[Origin], step: int) -> str:
    """The text for one origin, or for several replicas on different ranks."""
    kind, taken, holder = min(origins)
    if kind == "storage":
        return f"storage, step {taken}"
    if kind == "snapshot":
        age = step - taken
        return f"snapshot of rank {holder}, {age} step{'s' * (age != 1)} old"
    ranks = ", ".join(str(origin.holder) for origin in sorted(origins))
    return f"replicas on ranks {ranks}" if len(origins) > 1 else f"a replica on rank {ranks}"


def _content_text(sources: Sequence[RankSource], split: StateSplit) -> str:
    """The text for what sources hold, such as ``dense and experts 0-7``; layers are named where they differ."""
    of_layer = defaultdict(list)
    for source in sources:
        if source.unit is not None:
            of_layer[source.unit[0]].append(source.unit[1])
    layers_of = defaultdict(list)
    for layer, classes in of_layer.items():
        layers_of[_ranges(classes)].append(layer)
    texts = ["dense"] * any(source.unit is None for source in sources)
    for named, layers in layers_of.items():
        text = f"expert{'s' * (not named.isdigit())} {named}"
        if len(layers) < min(map(len, split.layers_of_stages)):
            text += f" of layer{'s' * (len(layers) > 1)} {_ranges(layers)}"
        texts.append(text)
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _ranges(numbers: Sequence[int]) -> str:
    """The text of ascending numbers, such as ``0-3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ', '}{run[-1]}" for run in runs]
    return ", ".join(parts)
