"""The order in which the stages of a pipeline take the blocks of the model.

Where a stage holds one run of blocks, it is that of the model. In a V a stage holds two: it takes the first and the
last of the blocks that earlier stages have left, in turn. In this order a stage of a V is one run again, so that
pipelines are cut, and blocks are moved, in the same way for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from swift.errors import SettingError

Run = tuple[int, int]
"""Consecutive blocks, as (first block, end)."""


@dataclass(frozen=True)
class BlockOrder:
    """The blocks of the model in the order in which stages take them.

    Attributes:
        blocks: blocks in that order.
        num_first: number of blocks of all first runs, to which those of the last runs come in a V.
    """

    blocks: tuple[int, ...]
    num_first: int

    @classmethod
    def of(cls, cut: Sequence[int], stages: Sequence[int]) -> "BlockOrder":
        """Finds the order for a pipeline.

        Args:
            cut: number of blocks of every run, in the order of the model.
            stages: stage of every run.

        Raises:
            SettingError: stages hold neither one run each nor two in a V.

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
            of_runs = range(*first), range(*last)[::-1]
            # Evenly, so that any part of the stage's blocks is about as much of both runs.
            turns = [((index + 0.5) / len(run), block) for run in of_runs for index, block in enumerate(run)]
            blocks += [block for _, block in sorted(turns, key=lambda turn: turn[0])]
        return cls(tuple(blocks), sum(cut[:P]))

    def runs(self, taken: Run) -> tuple[Run, ...]:
        """Finds the runs of the model that consecutive blocks of this order are, one, or two in a V.

        >>> BlockOrder.of((2, 2, 1, 3), (0, 1, 1, 0)).runs((3, 6))
        ((1, 3), (5, 6))
        """
        mine = self.blocks[slice(*taken)]
        halves = [[one for one in mine if (one < self.num_first) == is_first] for is_first in (True, False)]
        return tuple((min(half), max(half) + 1) for half in halves if half)
