"""Layouts worth planning after a failure: pipelines of unequal length, cut by block costs.

A pipeline with fewer workers has longer stages and takes fewer micro-batches. Which of its stages are the longest can
be chosen, and the choice matters in two ways: few blocks move if the cut changes only near the lost worker, and peers
can share work more evenly if the cuts of pipelines differ.

Blocks are numbered in the order in which a pipeline's stages take them (``BlockOrder``). If a stage holds one run of
blocks, that is the order of the model. In a V a stage holds two runs: each stage takes the first and the last of the
blocks that earlier stages have left. In this order a stage of a V is a single run again, so the same algorithm cuts
pipelines and moves blocks in both cases.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from swift.errors import SettingError
from swift.schedules.problem import Chunk, Problem, joined
from swift.topology import Worker

Run = tuple[int, int]
"""Consecutive blocks, as (first block, end)."""

_PHASES = (0.5, 0.25, 0.75, 0.0)
"""Rounding thresholds for even cuts. Pipelines use them in turn, so that their long stages hold different blocks."""


@dataclass(frozen=True)
class BlockOrder:
    """The model's blocks in the order in which stages take them.

    Attributes:
        blocks: blocks in that order.
        num_first: number of blocks in the first runs of all stages. In a V the remaining blocks are in the second runs.
    """

    blocks: tuple[int, ...]
    num_first: int

    @classmethod
    def of(cls, cut: Sequence[int], stages: Sequence[int]) -> "BlockOrder":
        """Builds the order for a pipeline.

        Args:
            cut: number of blocks in each run, in the order of the model.
            stages: stage of each run.

        Raises:
            SettingError: stages hold neither one run each nor two runs in a V.

        >>> BlockOrder.of((2, 2, 1, 3), (0, 1, 1, 0))
        BlockOrder(blocks=(7, 0, 6, 1, 5, 2, 4, 3), num_first=4)
        """
        P, runs = max(stages) + 1, list(pairwise(accumulate(cut, initial=0)))
        if tuple(stages) == tuple(range(P)):
            return cls(tuple(range(sum(cut))), sum(cut))
        if tuple(stages) != (*range(P), *reversed(range(P))):
            raise SettingError("Problem.stage_of_chunk", tuple(stages), "must be one run a stage, or two runs in a V")
        blocks: list[int] = []
        for first, last in zip(runs[:P], reversed(runs[P:]), strict=True):
            run_blocks = range(*first), range(*last)[::-1]
            # Interleave the two runs evenly, so that any part of the stage takes about the same share of both.
            positions = [((index + 0.5) / len(run), block) for run in run_blocks for index, block in enumerate(run)]
            blocks += [block for _, block in sorted(positions, key=lambda pair: pair[0])]
        return cls(tuple(blocks), sum(cut[:P]))

    def runs(self, run: Run) -> tuple[Run, ...]:
        """Converts a run in this order to runs in the order of the model: one run, or up to two in a V.

        >>> BlockOrder.of((2, 2, 1, 3), (0, 1, 1, 0)).runs((3, 6))
        ((1, 3), (5, 6))
        """
        blocks = self.blocks[slice(*run)]
        halves = [[block for block in blocks if (block < self.num_first) == is_first] for is_first in (True, False)]
        return tuple((min(half), max(half) + 1) for half in halves if half)


@dataclass(frozen=True)
class BlockProblem:
    """A fault-free problem and the blocks that its stages consist of.

    Attributes:
        problem: problem without failures, in which all pipelines are alike.
        blocks: costs of every block, as factors on ``problem.costs``. The first block's costs include the embedding,
            the last block's costs include the head.
        cut: number of blocks in every chunk of the problem: in every stage, or in each of its two runs in a V.
        order: blocks in the order in which stages take them, derived from ``cut``.

    Raises:
        SettingError: pipelines differ, a worker has failed, or stages hold neither one run of blocks each nor two runs
            in a V.
    """

    problem: Problem
    blocks: tuple[Chunk, ...]
    cut: tuple[int, ...]
    order: BlockOrder = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.problem.failed or not self.problem.is_uniform:
            allowed = "what is planned anew starts from pipelines that are alike, without a failure"
            raise SettingError("BlockProblem.problem", sorted(self.problem.failed), allowed)
        assert sum(self.cut) == len(self.blocks), "a cut of other blocks"
        assert len(self.cut) == self.problem.num_chunks, "a cut into other stages"
        object.__setattr__(self, "order", BlockOrder.of(self.cut, self.problem.stage_DP[0].tolist()))

    @classmethod
    def of_stages(cls, problem: Problem) -> "BlockProblem":
        """Treats every chunk as one block: a stage, or one run of a stage in a V."""
        return cls(problem, problem.chunks or (Chunk(),) * problem.num_chunks, (1,) * problem.num_chunks)

    @property
    def in_v(self) -> bool:
        """Whether stages hold two runs of blocks, in a V."""
        return not self.problem.is_plain

    @cached_property
    def runs_P(self) -> tuple[Run, ...]:
        """Run of blocks, in ``order``, that each stage holds without failures."""
        size_P = np.bincount(self.problem.stage_DP[0], self.cut).astype(int).tolist()
        return tuple(pairwise(accumulate(size_P, initial=0)))

    @cached_property
    def cost_L(self) -> np.ndarray:
        """Time of F, B and W together for each block, float64[blocks]."""
        t_f, t_b, t_w, _ = self.problem.costs.op_times
        return np.array([t_f * block.f + t_b * block.b + t_w * block.w for block in self.blocks])

    @cached_property
    def ordered_cost_L(self) -> np.ndarray:
        """``cost_L`` in the order in which stages take the blocks (``order``)."""
        return self.cost_L[list(self.order.blocks)]

    def chunks(self, bounds: Sequence[int]) -> tuple[Chunk, ...]:
        """Merges the blocks between consecutive bounds into chunks.

        Args:
            bounds: first block of each chunk, in the order of the model, and the number of blocks.
        """
        return tuple(joined(self.blocks[first:end]) for first, end in pairwise(bounds))

    def with_failures(self, failed: frozenset[Worker]) -> Problem:
        """Returns the re-routing problem: peers run the micro-batches of failed workers, and no block moves."""
        return replace(self.problem, failed=failed)


@dataclass(frozen=True)
class BlockLayout:
    """Assignment of blocks to a cluster's places.

    Attributes:
        order: blocks in the order in which stages take them.
        runs_DP: for each place (pipeline, stage), its run in that order; None for a place that no worker takes. The
            runs of a pipeline are consecutive and cover all blocks, unless the pipeline has no runs.
    """

    order: BlockOrder
    runs_DP: tuple[tuple[Run | None, ...], ...]

    @property
    def empty(self) -> frozenset[Worker]:
        """Places that no worker takes."""
        return frozenset((d, p) for d, runs in enumerate(self.runs_DP) for p, run in enumerate(runs) if run is None)

    @property
    def places(self) -> dict[Worker, Run]:
        """Run of each place that a worker takes, in mesh order."""
        return {(d, p): run for d, runs in enumerate(self.runs_DP) for p, run in enumerate(runs) if run is not None}

    @property
    def pipelines(self) -> tuple[int, ...]:
        """Pipelines that hold the blocks of the model; others are empty."""
        return tuple(d for d, runs in enumerate(self.runs_DP) if any(runs))

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Blocks at which a run in any pipeline begins, in the model's order, and the number of blocks."""
        runs = set(self.places.values())
        return tuple(sorted({0, *(end for run in runs for _, end in self.order.runs(run))}))

    def stages(self, bounds: Sequence[int]) -> list[list[int]]:
        """Finds the stage that holds each chunk between bounds, for each pipeline; -1 in a pipeline without blocks."""
        stages_D = []
        for runs in self.runs_DP:
            stage_runs = [(run, p) for p, run in enumerate(runs) if run is not None]
            ends = sorted((end, p) for run, p in stage_runs for _, end in self.order.runs(run))
            stages_D.append([next((p for end, p in ends if end > first), -1) for first in bounds[:-1]])
        return stages_D


def layouts(work: BlockProblem, failed: frozenset[Worker], *, in_run: bool = False) -> Iterator[BlockLayout]:
    """Yields distinct layouts that give every survivor a place; see ``recut`` for ``in_run``."""
    seen: set[BlockLayout] = set()
    as_they_are, *other_lengths = _lengths(work, failed)
    least = min(filter(None, as_they_are))
    for lengths in (
        as_they_are,
        *(other for other in other_lengths if not in_run or min(filter(None, other)) >= least),
    ):
        places = _places(work, failed, lengths)
        for style in ("near", "even", "mixed"):
            runs: list[tuple[Run | None, ...]] = []
            phase_index = 0
            for stages in places:
                if len(stages) == work.problem.num_stages and stages:
                    runs.append(work.runs_P)
                    continue
                phase = None if style == "near" else _PHASES[phase_index % (1 if style == "even" else len(_PHASES))]
                phase_index += bool(stages)
                runs.append(_runs(work, stages, phase))
            layout = BlockLayout(work.order, tuple(runs))
            if layout not in seen and layout.pipelines:
                seen.add(layout)
                yield layout


def whole_pipelines(work: BlockProblem, failed: frozenset[Worker]) -> BlockLayout | None:
    """Builds the layout with as many complete pipelines as survivors can fill, with the fault-free cut.

    Returns:
        The layout, in which remaining survivors are idle, or None if the survivors cannot fill a pipeline.
    """
    D, P = work.problem.num_pipelines, work.problem.num_stages
    number = (D * P - len(failed)) // P
    if not number:
        return None
    whole = sorted(range(D), key=lambda d: (sum(pipeline == d for pipeline, _ in failed), d))[:number]
    return BlockLayout(work.order, tuple(work.runs_P if d in whole else (None,) * P for d in range(D)))


def _lengths(work: BlockProblem, failed: frozenset[Worker]) -> Iterator[tuple[int, ...]]:
    """Yields numbers of workers for each pipeline.

    First the survivors of each pipeline as they are, then as many complete pipelines as possible, then pipelines of
    about equal length.
    """
    D, P, L = work.problem.num_pipelines, work.problem.num_stages, len(work.blocks)
    live = D * P - len(failed)
    present = [P - sum(pipeline == d for pipeline, _ in failed) for d in range(D)]
    longest_first = sorted(range(D), key=lambda d: (-present[d], d))

    def assign_lengths(sizes: Sequence[int]) -> tuple[int, ...]:
        """Assigns the greatest length to the pipeline with the most survivors, and so on in descending order."""
        lengths = [0] * D
        for d, size in zip(longest_first, sorted(sizes, reverse=True), strict=False):
            lengths[d] = min(size, L)
        return tuple(lengths)

    yield tuple(min(size, L) for size in present)
    whole, rest = divmod(live, P)
    yield assign_lengths([P] * whole + [rest] * (rest > 0))
    for number in range(D, 0, -1):
        if number * P >= live and live >= number:
            yield assign_lengths([live // number + (index < live % number) for index in range(number)])
    if whole and rest:
        # The remaining workers may be too few for a pipeline of their own: let two pipelines share the shortage.
        both = P + rest
        yield assign_lengths([P] * (whole - 1) + [both - both // 2, both // 2])


def _places(work: BlockProblem, failed: frozenset[Worker], lengths: Sequence[int]) -> list[list[int]]:
    """Chooses the stages that are filled in each pipeline: first those of survivors, and every stage at least once.

    Here a stage is only the name of a place, independent of the blocks that it holds. A run needs a worker in every
    stage.
    """
    num_stages = work.problem.num_stages
    stages_D = []
    for d, length in enumerate(lengths):
        ranked = sorted(range(num_stages), key=lambda p: ((d, p) in failed, p))
        stages_D.append(set(ranked[:length]))
    for missing in range(num_stages):
        times = Counter(p for places in stages_D for p in places)
        spare = [(d, p) for d, places in enumerate(stages_D) for p in sorted(places) if times[p] > 1]
        if not times[missing] and spare:
            d, p = min(spare, key=lambda place: place not in failed)
            stages_D[d] = stages_D[d] - {p} | {missing}
    return [sorted(places) for places in stages_D]


def _runs(work: BlockProblem, stages: Sequence[int], phase: float | None) -> tuple[Run | None, ...]:
    """Cuts a pipeline into runs for the stages that are filled.

    Args:
        work: problem without failures, and its blocks.
        stages: stages that are filled, ascending.
        phase: rounding threshold of an even cut, see ``_even_ends``; None to cut near the blocks that the stages hold
            without failures.
    """
    runs: list[Run | None] = [None] * work.problem.num_stages
    if not stages:
        return tuple(runs)
    ends = _near_ends(work, stages) if phase is None else _even_ends(work, len(stages), phase)
    first = 0
    for p, end in zip(stages, ends, strict=True):
        runs[p] = first, end
        first = end
    return tuple(runs)


def _least_longest(cost_L: np.ndarray, num_stages: int) -> float:
    """Returns the least possible time of the longest stage over all cuts into ``num_stages`` stages, by bisection."""
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
        longest_time = longest(middle)
        low, high, best = (
            (middle, high, best) if longest_time is None else (low, min(longest_time, middle), longest_time)
        )
    return best


def _even_ends(work: BlockProblem, num_stages: int, phase: float) -> list[int]:
    """Cuts where the cumulative cost reaches each stage's share; a fraction of a block above ``phase`` rounds up."""
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


def _near_ends(work: BlockProblem, stages: Sequence[int]) -> list[int]:
    """Finds the cut that moves the fewest blocks among those whose longest stage is as short as possible."""
    L, num = len(work.blocks), len(stages)
    sums = np.cumsum(np.append(0.0, work.ordered_cost_L)).tolist()
    cap = _least_longest(work.ordered_cost_L, num) * (1 + 1e-9)
    # Dynamic program. best[end]: (blocks moved, sum of squares, first block of the last stage) for the stages so far.
    best: dict[int, tuple[float, float, int]] = {0: (0, 0.0, 0)}
    steps: list[dict[int, tuple[float, float, int]]] = []
    for stage, p in enumerate(stages):
        held_first, held_end = work.runs_P[p]
        next_best: dict[int, tuple[float, float, int]] = {}
        for begin, (moved, squares, _) in best.items():
            for end in range(begin + 1, L - (num - 1 - stage) + 1):
                stage_time = sums[end] - sums[begin]
                if stage_time > cap:
                    break
                num_staying = max(0, min(end, held_end) - max(begin, held_first))
                way = moved + end - begin - num_staying, squares + stage_time * stage_time, begin
                if end not in next_best or way < next_best[end]:
                    next_best[end] = way
        steps.append(next_best)
        best = next_best
    ends = [L]
    for step in reversed(steps[1:]):
        ends.append(step[ends[-1]][2])
    assert math.isfinite(best[L][0])
    return ends[::-1]
