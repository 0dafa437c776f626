"""Layouts worth planning for the survivors of a failure: pipelines of unequal length, cut by the costs of blocks.

A pipeline of fewer workers has longer stages and takes fewer micro-batches. Which of its stages are the longest is
free, and matters twice: where the cut is next to the lost worker few blocks move, and where the pipelines' cuts differ
their peers can share work more evenly.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from swift.schedules.adapt.block_order import Run
from swift.schedules.adapt.work import BlockLayout, BlockProblem
from swift.topology import Worker

_PHASES = (0.5, 0.25, 0.75, 0.0)
"""Positions at which even cuts are rounded, turn by turn, so that pipelines have long stages at different blocks."""


def layouts(work: BlockProblem, failed: frozenset[Worker], *, in_run: bool = False) -> Iterator[BlockLayout]:
    """Yields layouts in which every survivor has a place, each once; ``in_run``: see ``recut``."""
    seen: set[BlockLayout] = set()
    as_they_are, *others = _lengths(work, failed)
    least = min(filter(None, as_they_are))
    for lengths in (as_they_are, *(one for one in others if not in_run or min(filter(None, one)) >= least)):
        places = _places(work, failed, lengths)
        for style in ("near", "even", "mixed"):
            runs: list[tuple[Run | None, ...]] = []
            turn = 0
            for taken in places:
                if len(taken) == work.problem.num_stages and taken:
                    runs.append(work.runs_P)
                    continue
                phase = None if style == "near" else _PHASES[turn % (1 if style == "even" else len(_PHASES))]
                turn += bool(taken)
                runs.append(_runs(work, taken, phase))
            layout = BlockLayout(work.order, tuple(runs))
            if layout not in seen and layout.pipelines:
                seen.add(layout)
                yield layout


def whole_pipelines(work: BlockProblem, failed: frozenset[Worker]) -> BlockLayout | None:
    """Makes as many whole pipelines, cut as without a failure, as there are survivors for; the rest are idle."""
    D, P = work.problem.num_pipelines, work.problem.num_stages
    number = (D * P - len(failed)) // P
    if not number:
        return None
    whole = sorted(range(D), key=lambda d: (sum(pipeline == d for pipeline, _ in failed), d))[:number]
    return BlockLayout(work.order, tuple(work.runs_P if d in whole else (None,) * P for d in range(D)))


def _lengths(work: BlockProblem, failed: frozenset[Worker]) -> Iterator[tuple[int, ...]]:
    """Yields the lengths of the pipelines: as they are, as many whole ones as possible, or all about equal."""
    D, P, L = work.problem.num_pipelines, work.problem.num_stages, len(work.blocks)
    live = D * P - len(failed)
    present = [P - sum(pipeline == d for pipeline, _ in failed) for d in range(D)]
    longest_first = sorted(range(D), key=lambda d: (-present[d], d))

    def given(sizes: Sequence[int]) -> tuple[int, ...]:
        """Gives the greatest length to the pipeline with the most survivors, and so on."""
        lengths = [0] * D
        for d, size in zip(longest_first, sorted(sizes, reverse=True), strict=False):
            lengths[d] = min(size, L)
        return tuple(lengths)

    yield tuple(min(size, L) for size in present)
    whole, rest = divmod(live, P)
    yield given([P] * whole + [rest] * (rest > 0))
    for number in range(D, 0, -1):
        if number * P >= live and live >= number:
            yield given([live // number + (turn < live % number) for turn in range(number)])
    if whole and rest:
        # The rest of a whole pipeline may be too short to be worth a pipeline: two share the lack.
        both = P + rest
        yield given([P] * (whole - 1) + [both - both // 2, both // 2])


def _places(work: BlockProblem, failed: frozenset[Worker], lengths: Sequence[int]) -> list[list[int]]:
    """Chooses the stages that are taken in each pipeline: those with survivors first, and every stage somewhere.

    A stage is but the name of a place here, whatever blocks it holds; a run has somebody in every stage.
    """
    num_stages = work.problem.num_stages
    taken = []
    for d, length in enumerate(lengths):
        ranked = sorted(range(num_stages), key=lambda p: ((d, p) in failed, p))
        taken.append(set(ranked[:length]))
    for missing in range(num_stages):
        times = Counter(p for places in taken for p in places)
        spare = [(d, p) for d, places in enumerate(taken) for p in sorted(places) if times[p] > 1]
        if not times[missing] and spare:
            d, p = min(spare, key=lambda place: place not in failed)
            taken[d] = taken[d] - {p} | {missing}
    return [sorted(places) for places in taken]


def _runs(work: BlockProblem, taken: Sequence[int], phase: float | None) -> tuple[Run | None, ...]:
    """Cuts a pipeline over the places taken; ``phase`` None: near the blocks that they hold without a failure."""
    runs: list[Run | None] = [None] * work.problem.num_stages
    if not taken:
        return tuple(runs)
    ends = _near_ends(work, taken) if phase is None else _even_ends(work, len(taken), phase)
    first = 0
    for p, end in zip(taken, ends, strict=True):
        runs[p] = first, end
        first = end
    return tuple(runs)


def _least_longest(cost_L: np.ndarray, num_stages: int) -> float:
    """Finds the least time of the longest of this many stages."""
    sums = np.cumsum(np.append(0.0, cost_L))
    low, high = max(float(cost_L.max()), float(sums[-1]) / num_stages), float(sums[-1])

    def longest(cap: float) -> float | None:
        first, most = 0, 0.0
        for _ in range(num_stages):
            end = int(np.searchsorted(sums, sums[first] + cap * (1 + 1e-12), side="right")) - 1
            most, first = max(most, float(sums[end] - sums[first])), end
        return most if first == len(cost_L) else None

    best = longest(high) or high
    for _ in range(50):
        if high - low <= 1e-9 * high:
            break
        middle = (low + high) / 2
        found = longest(middle)
        low, high, best = (middle, high, best) if found is None else (low, min(found, middle), found)
    return best


def _even_ends(work: BlockProblem, num_stages: int, phase: float) -> list[int]:
    """Cuts where the costs before a stage are its share, rounded down from ``phase`` on."""
    L = len(work.blocks)
    sums = np.cumsum(work.ordered_cost_L)
    ends: list[int] = []
    for stage in range(num_stages):
        share = sums[-1] * (stage + 1) / num_stages
        before = int(np.searchsorted(sums, share * (1 + 1e-12), side="right"))
        part = (share - (sums[before - 1] if before else 0.0)) / work.ordered_cost_L[before] if before < L else 0.0
        end = before + int(part > phase)
        ends.append(int(min(max(end, (ends[-1] if ends else 0) + 1), L - (num_stages - 1 - stage))))
    return ends


def _near_ends(work: BlockProblem, taken: Sequence[int]) -> list[int]:
    """Cuts so that the longest stage is as short as it can be, and as few blocks as possible move."""
    L, num = len(work.blocks), len(taken)
    sums = np.cumsum(np.append(0.0, work.ordered_cost_L)).tolist()
    cap = _least_longest(work.ordered_cost_L, num) * (1 + 1e-9)
    # best[end]: (blocks that move, sum of squares, begin) of the stages so far, by the end of the last.
    best: dict[int, tuple[float, float, int]] = {0: (0, 0.0, 0)}
    steps: list[dict[int, tuple[float, float, int]]] = []
    for stage, p in enumerate(taken):
        held_first, held_end = work.runs_P[p]
        found: dict[int, tuple[float, float, int]] = {}
        for begin, (moved, squares, _) in best.items():
            for end in range(begin + 1, L - (num - 1 - stage) + 1):
                took = sums[end] - sums[begin]
                if took > cap:
                    break
                kept = max(0, min(end, held_end) - max(begin, held_first))
                way = moved + end - begin - kept, squares + took * took, begin
                if end not in found or way < found[end]:
                    found[end] = way
        steps.append(found)
        best = found
    ends = [L]
    for found in reversed(steps[1:]):
        ends.append(found[ends[-1]][2])
    assert math.isfinite(best[L][0])
    return ends[::-1]
