"""Cuts of a model's blocks into stages, and into chunks, on which pipeline ops work and which workers hold.

A stage of a ``Cut`` has one or more consecutive blocks. If all pipelines have the same cut, a chunk is a stage. If
their cuts differ, the ``Chunks`` are the pieces that no pipeline cuts: every stage of every pipeline is a sequence of
consecutive chunks. The set of chunks of a worker is its holding. Workers with the same chunks, such as one stage's
workers in pipelines with the same cut, have the same holding, and therefore the same arrays.

The arrays of a group of parameters are stacks ``[layer, ...]``, with a layer for every block that has such a module.
``BlockStacks`` defines which block of the model is at which index. The stacks of all stages, or holdings, have the same
length: the maximum number of blocks of that kind in any of them. Surplus layers are padding.

Legend: B maximum blocks of a stage or holding, C chunks, D pipelines, P stages or holdings, L blocks of a kind,
H holdings.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product

import numpy as np

from swift.errors import SettingError

_PADDING = -1


class BlockStacks(ABC):
    """Positions of the model's blocks in each stage's parameter stacks in a ``Cut``, or each holding's in ``Chunks``.

    In ``Chunks``, a stage of these methods is a holding.

    Attributes:
        moe_layers: True for each block of the model that is a mixture of experts.
        blocks: numbers of the model's blocks in each stage or holding, in the order of its stacks.
    """

    moe_layers: tuple[bool, ...]

    @property
    @abstractmethod
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """See the class."""

    @cached_property
    def stages(self) -> tuple[tuple[bool, ...], ...]:
        """Block patterns by stage: True for each block that is a mixture of experts."""
        return tuple(tuple(self.moe_layers[block] for block in blocks) for blocks in self.blocks)

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Block kinds in the model, sorted; a kind is whether the block is a mixture of experts."""
        return tuple(sorted(set(self.moe_layers)))

    def counts(self, is_moe: bool | None = None) -> tuple[int, ...]:
        """Counts each stage's blocks of a kind, or all its blocks (None)."""
        return tuple(len(_of_kind(stage, is_moe)) for stage in self.stages)

    def stack_size(self, is_moe: bool | None = None) -> int:
        """Returns the stack length for blocks of a kind, or for all blocks (None): the maximum over the stages."""
        return max(self.counts(is_moe))

    def model_index(self, is_moe: bool | None = None) -> np.ndarray:
        """Returns each layer's index among the model's blocks of a kind, int64[P, layers]; ``_PADDING`` for padding."""
        is_kind = [is_moe is None or kind == is_moe for kind in self.moe_layers]
        number = np.cumsum(is_kind) - 1
        table = np.full((len(self.blocks), self.stack_size(is_moe)), _PADDING)
        for stage, blocks in enumerate(self.blocks):
            indices = [number[block] for block in blocks if is_kind[block]]
            table[stage, : len(indices)] = indices
        return table

    def locations(self, is_moe: bool | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Locates the model's blocks of a kind: (stage, index in its stack), int64[L] each.

        The inverse of ``model_index``. If several holdings have a block, its location is in the first of them.
        """
        table = self.model_index(is_moe)
        stage, layer = np.nonzero(table != _PADDING)
        _, first = np.unique(table[stage, layer], return_index=True)
        return stage[first], layer[first]

    @cached_property
    def is_moe_PB(self) -> np.ndarray:
        """Whether each block in a stage is a mixture of experts; False for padding."""
        table = np.zeros((len(self.blocks), self.stack_size()), bool)
        for stage, pattern in enumerate(self.stages):
            table[stage, : len(pattern)] = pattern
        return table

    @cached_property
    def stack_index_PB(self) -> np.ndarray:
        """Index of each block in its stage's stack for its kind, int32; 0 for padding."""
        table = np.zeros((len(self.blocks), self.stack_size()), np.int32)
        for stage, pattern in enumerate(self.stages):
            table[stage, : len(pattern)] = [pattern[:block].count(kind) for block, kind in enumerate(pattern)]
        return table

    def stage_index(self, is_moe: bool) -> np.ndarray:
        """Returns each layer's index among its stage's blocks, for one kind, int32[P, layers]; 0 for padding."""
        table = np.zeros((len(self.blocks), self.stack_size(is_moe)), np.int32)
        for stage, pattern in enumerate(self.stages):
            blocks = [block for block, kind in enumerate(pattern) if kind == is_moe]
            table[stage, : len(blocks)] = blocks
        return table

    @cached_property
    def joined_index_PB(self) -> np.ndarray:
        """Index of each block in its stage's dense stack and expert stack, concatenated, int32."""
        return (self.stack_index_PB + self.stack_size(False) * self.is_moe_PB).astype(np.int32)

    @cached_property
    def is_block_PB(self) -> np.ndarray:
        """True for each block of a stage; False for padding."""
        return np.arange(self.stack_size()) < np.array(self.counts())[:, None]


def _of_kind(pattern: Sequence[bool], is_moe: bool | None) -> list[bool]:
    return [kind for kind in pattern if is_moe is None or kind == is_moe]


@dataclass(frozen=True)
class Cut(BlockStacks):
    """Division of the model's blocks into stages.

    Attributes:
        moe_layers: True for each block of the model that is a mixture of experts.
        sizes: number of blocks of each stage.
    """

    moe_layers: tuple[bool, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert sum(self.sizes) == len(self.moe_layers), f"stages of {self.sizes} blocks, and {len(self.moe_layers)}"
        assert min(self.sizes) > 0, f"a stage without a block: {self.sizes}"

    @property
    def num_stages(self) -> int:
        """Number of stages, P."""
        return len(self.sizes)

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the model's blocks in each stage."""
        ends = list(accumulate(self.sizes, initial=0))
        return tuple(tuple(range(first, end)) for first, end in pairwise(ends))

    @property
    def is_uniform(self) -> bool:
        """Whether all stages have the same number and kinds of blocks, in the same order."""
        return len(set(self.stages)) == 1

    @property
    def text(self) -> str:
        """Description of the cut for messages.

        >>> Cut((True,) * 8, (4, 4)).text, Cut((True,) * 7, (2, 2, 2, 1)).text
        ('2 stages', '4 stages (2, 2, 2, 1 layers)')
        """
        sizes = f" ({', '.join(map(str, self.sizes))} layers)"
        return f"{self.num_stages} stages{sizes * (len(set(self.sizes)) > 1)}"


def make_cut(
    moe_layers: Sequence[bool], num_stages: int, sizes: Sequence[int] | None, setting: str, num_runs: int = 1
) -> Cut:
    """Builds the cut that a user specified by numbers of blocks.

    Args:
        moe_layers: True for each block of the model that is a mixture of experts.
        num_stages: number of stages, P.
        sizes: number of blocks of each stage, or of each run of blocks; None for equally many.
        setting: name of the setting for ``sizes``, for error messages.
        num_runs: number of runs of consecutive blocks per stage; the cut has ``num_stages * num_runs`` parts.

    Raises:
        SettingError: there are more parts than blocks, a part has no block, or the numbers do not add up.
    """
    num_layers, num_parts = len(moe_layers), num_stages * num_runs
    part, divided = ("stage", "") if num_runs == 1 else ("run", f" / {num_runs}")
    if num_parts > num_layers:
        allowed = f"must be at most ModelConfig.num_layers = {num_layers}{divided}: every {part} needs a layer"
        raise SettingError("Topology.num_stages", num_stages, allowed)
    if sizes is None:
        sizes = [num_layers // num_parts] * num_parts
    if not isinstance(sizes, tuple | list):  # gin passes what the user wrote
        raise SettingError(setting, sizes, f"must be {num_parts} numbers of layers")
    sizes = tuple(sizes)
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise SettingError(setting, sizes, f"must be whole numbers of at least 1: every {part} needs a layer")
    if len(sizes) != num_parts:
        product = "" if num_runs == 1 else f" times {num_runs}"
        raise SettingError(setting, sizes, f"must be Topology.num_stages = {num_stages}{product} numbers")
    if sum(sizes) != num_layers:
        allowed = f"must sum to ModelConfig.num_layers = {num_layers}, not {sum(sizes)}"
        raise SettingError(setting, sizes, allowed)
    return Cut(tuple(moe_layers), sizes)


@dataclass(frozen=True)
class Chunks(BlockStacks):
    """Chunks of a model, and the stage that holds each one in each pipeline; there is a stack per holding.

    Attributes:
        moe_layers: True for each block of the model that is a mixture of experts.
        sizes: number of blocks of each chunk.
        stage_DC: stage that holds each chunk, by pipeline; a stage whose worker is down may have no chunk.
    """

    moe_layers: tuple[bool, ...]
    sizes: tuple[int, ...]
    stage_DC: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        stages = set().union(*self.stage_DC)
        assert stages == set(range(self.num_stages)), f"a stage without a chunk in all pipelines: {self.stage_DC}"
        assert all(len(stage_C) == len(self.sizes) for stage_C in self.stage_DC), "a chunk without a stage"

    @property
    def num_stages(self) -> int:
        """Number of stages, P."""
        return max(map(max, self.stage_DC)) + 1

    @cached_property
    def stage_DB(self) -> np.ndarray:
        """Stage that holds each model block, by pipeline, int64[D, number of blocks]."""
        return np.repeat(np.array(self.stage_DC), self.sizes, axis=1)

    @property
    def matches_stages(self) -> bool:
        """Whether every chunk is a whole stage in all pipelines."""
        return all(stage_C == tuple(range(len(self.sizes))) for stage_C in self.stage_DC)

    @cached_property
    def is_one_chunk_per_worker(self) -> bool:
        """Whether every worker holds exactly one chunk."""
        return all(len(chunks) == 1 for chunks in self.worker_chunks)

    @cached_property
    def have_neighbours(self) -> bool:
        """Whether some worker holds two consecutive chunks, and therefore sends messages to itself."""
        return bool((self.holds_HC[:, :-1] & self.holds_HC[:, 1:]).any())

    @property
    def is_uniform_cut(self) -> bool:
        """Whether all pipelines have the same cut."""
        return len(set(self.stage_DC)) == 1

    @cached_property
    def ops(self) -> Cut:
        """Cut into chunks: the blocks that an op works on."""
        return Cut(self.moe_layers, self.sizes)

    @cached_property
    def worker_chunks(self) -> tuple[tuple[int, ...], ...]:
        """Chunks in each holding, ascending; holdings are the distinct chunk sets, in order of first use."""
        workers = product(range(len(self.stage_DC)), range(self.num_stages))
        return tuple(dict.fromkeys(self._chunks(d, p) for d, p in workers))

    def holding(self, pipeline: int, stage: int) -> int:
        """Returns the number of a worker's holding."""
        return self.worker_chunks.index(self._chunks(pipeline, stage))

    def _chunks(self, pipeline: int, stage: int) -> tuple[int, ...]:
        return tuple(chunk for chunk, chunk_stage in enumerate(self.stage_DC[pipeline]) if chunk_stage == stage)

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the model's blocks in each holding."""
        ends = list(accumulate(self.sizes, initial=0))
        return tuple(
            tuple(block for c in chunks for block in range(ends[c], ends[c + 1])) for chunks in self.worker_chunks
        )

    def first_layers(self, is_moe: bool | None = None) -> np.ndarray:
        """Returns where a chunk's blocks of a kind start in a stack, int32[H, C]; 0 if the holding lacks the chunk."""
        counts = self.ops.counts(is_moe)
        table = np.zeros((len(self.worker_chunks), len(self.sizes)), np.int32)
        for holding, chunks in enumerate(self.worker_chunks):
            table[holding, list(chunks)] = [*accumulate((counts[chunk] for chunk in chunks), initial=0)][:-1]
        return table

    @cached_property
    def holds_HC(self) -> np.ndarray:
        """Whether each holding has each chunk, bool[H, C]."""
        table = np.zeros((len(self.worker_chunks), len(self.sizes)), bool)
        for holding, chunks in enumerate(self.worker_chunks):
            table[holding, list(chunks)] = True
        return table
