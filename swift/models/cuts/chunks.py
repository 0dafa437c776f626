"""Chunks: consecutive blocks that an op works on, and which of them each worker holds.

Where all pipelines have one cut, a chunk is a stage. Where they are cut differently, the chunks are what remains whole
in all of them: every stage of every pipeline is a run of chunks. Workers that hold the same chunks, such as those of a
stage in pipelines that are cut alike, have the same holding, and so the same arrays.

B blocks, C chunks, D pipelines, P stages, H holdings: what one worker or several hold.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product

import numpy as np

from swift.models.cuts.cut import Cut
from swift.models.cuts.stacks import BlockStacks


@dataclass(frozen=True)
class Chunks(BlockStacks):
    """The chunks of a model; its stacks are those of the holdings.

    Attributes:
        moe_layers: True for each block of the model that is a mixture of experts.
        sizes: number of blocks of each chunk.
        stage_DC: stage that holds each chunk, by pipeline; a stage whose worker is down may hold none.
    """

    moe_layers: tuple[bool, ...]
    sizes: tuple[int, ...]
    stage_DC: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        held = set().union(*self.stage_DC)
        assert held == set(range(self.num_stages)), f"a stage without a chunk in all pipelines: {self.stage_DC}"
        assert all(len(stage_C) == len(self.sizes) for stage_C in self.stage_DC), "a chunk without a stage"

    @property
    def num_stages(self) -> int:
        """P."""
        return max(map(max, self.stage_DC)) + 1

    @cached_property
    def stage_DB(self) -> np.ndarray:
        """Stage that holds each block, by pipeline, int64[D, B]."""
        return np.repeat(np.array(self.stage_DC), self.sizes, axis=1)

    @property
    def are_stages(self) -> bool:
        """Whether every chunk is a stage, in all pipelines."""
        return all(stage_C == tuple(range(len(self.sizes))) for stage_C in self.stage_DC)

    @cached_property
    def are_single(self) -> bool:
        """Whether every worker holds one chunk."""
        return all(len(chunks) == 1 for chunks in self.holdings)

    @cached_property
    def have_neighbours(self) -> bool:
        """Whether a worker holds a chunk and the next one, so that it sends messages to itself."""
        return bool((self.holds_HC[:, :-1] & self.holds_HC[:, 1:]).any())

    @property
    def is_one_cut(self) -> bool:
        """Whether all pipelines are cut alike."""
        return len(set(self.stage_DC)) == 1

    @cached_property
    def ops(self) -> Cut:
        """The chunks as a cut: the blocks of an op."""
        return Cut(self.moe_layers, self.sizes)

    @cached_property
    def holdings(self) -> tuple[tuple[int, ...], ...]:
        """Chunks of a worker, ascending, for all workers that differ; in the order of the first that have them."""
        workers = product(range(len(self.stage_DC)), range(self.num_stages))
        return tuple(dict.fromkeys(self._chunks(d, p) for d, p in workers))

    def holding(self, pipeline: int, stage: int) -> int:
        """The holding of a worker."""
        return self.holdings.index(self._chunks(pipeline, stage))

    def _chunks(self, pipeline: int, stage: int) -> tuple[int, ...]:
        return tuple(chunk for chunk, mine in enumerate(self.stage_DC[pipeline]) if mine == stage)

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Positions in the model of the blocks of each holding."""
        ends = list(accumulate(self.sizes, initial=0))
        return tuple(tuple(block for c in chunks for block in range(ends[c], ends[c + 1])) for chunks in self.holdings)

    def first_layers(self, is_moe: bool | None = None) -> np.ndarray:
        """Index in its stack of a chunk's first block of a kind, int32[H, C]; 0 where a holding lacks the chunk."""
        counts = self.ops.counts(is_moe)
        table = np.zeros((len(self.holdings), len(self.sizes)), np.int32)
        for holding, chunks in enumerate(self.holdings):
            table[holding, list(chunks)] = [*accumulate((counts[chunk] for chunk in chunks), initial=0)][:-1]
        return table

    @cached_property
    def holds_HC(self) -> np.ndarray:
        """Whether each holding holds each chunk."""
        table = np.zeros((len(self.holdings), len(self.sizes)), bool)
        for holding, chunks in enumerate(self.holdings):
            table[holding, list(chunks)] = True
        return table
