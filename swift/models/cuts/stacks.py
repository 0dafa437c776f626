"""Stacks of layers: which block of the model each stage, or each worker, has at which index of its arrays.

The arrays of a group of parameters are stacks ``[layer, ...]``, with a layer for every block that has such a module.
All stages, or workers, have stacks as long as that of the one with the most blocks of that kind; the layers that a
stage does not need are padding.

P stages or workers, B blocks of the one that has most.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import numpy as np

PADDING = -1


class BlockStacks(ABC):
    """The stacks of whatever has blocks: of the stages of a ``Cut``, or of the workers of ``Chunks``.

    Attributes:
        moe_layers: True for each block of the model that is a mixture of experts.
        blocks: positions in the model of the blocks of each stage or worker, in the order in which it has them.
    """

    moe_layers: tuple[bool, ...]

    @property
    @abstractmethod
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """See the class."""

    @cached_property
    def stages(self) -> tuple[tuple[bool, ...], ...]:
        """True for each block of each stage that is a mixture of experts."""
        return tuple(tuple(self.moe_layers[block] for block in blocks) for blocks in self.blocks)

    @property
    def kinds(self) -> tuple[bool, ...]:
        """The kinds of block that the model has, by whether they are mixtures of experts."""
        return tuple(sorted(set(self.moe_layers)))

    def counts(self, is_moe: bool | None = None) -> tuple[int, ...]:
        """Number of blocks of a kind, or of any kind (None), of each stage."""
        return tuple(len(_of_kind(stage, is_moe)) for stage in self.stages)

    def stack_size(self, is_moe: bool | None = None) -> int:
        """Layers of the stack for blocks of a kind, or of any kind (None): the most that a stage has."""
        return max(self.counts(is_moe))

    def model_index(self, is_moe: bool | None = None) -> np.ndarray:
        """Index of each layer among the model's blocks of a kind, int64[P, layers]; ``PADDING`` where there is none."""
        is_kind = [is_moe is None or kind == is_moe for kind in self.moe_layers]
        number = np.cumsum(is_kind) - 1
        table = np.full((len(self.blocks), self.stack_size(is_moe)), PADDING)
        for stage, blocks in enumerate(self.blocks):
            mine = [number[block] for block in blocks if is_kind[block]]
            table[stage, : len(mine)] = mine
        return table

    def locations(self, is_moe: bool | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(stage, index in its stack) of each of the model's blocks of a kind, int64[L] each: inverts ``model_index``.

        Of several that have a block, the first one.
        """
        table = self.model_index(is_moe)
        stage, layer = np.nonzero(table != PADDING)
        _, first = np.unique(table[stage, layer], return_index=True)
        return stage[first], layer[first]

    @cached_property
    def is_moe_PB(self) -> np.ndarray:
        """Whether each block of a stage is a mixture of experts; False for padding."""
        table = np.zeros((len(self.blocks), self.stack_size()), bool)
        for stage, pattern in enumerate(self.stages):
            table[stage, : len(pattern)] = pattern
        return table

    @cached_property
    def stack_index_PB(self) -> np.ndarray:
        """Index of each block of a stage in the stack of its kind, int32; 0 for padding."""
        table = np.zeros((len(self.blocks), self.stack_size()), np.int32)
        for stage, pattern in enumerate(self.stages):
            table[stage, : len(pattern)] = [pattern[:block].count(kind) for block, kind in enumerate(pattern)]
        return table

    def stage_index(self, is_moe: bool) -> np.ndarray:
        """Index of each layer of a kind among the blocks of its stage, int32[P, layers]; 0 for padding."""
        table = np.zeros((len(self.blocks), self.stack_size(is_moe)), np.int32)
        for stage, pattern in enumerate(self.stages):
            blocks = [block for block, kind in enumerate(pattern) if kind == is_moe]
            table[stage, : len(blocks)] = blocks
        return table

    @cached_property
    def joined_index_PB(self) -> np.ndarray:
        """Index of each block of a stage in a stack of the dense blocks followed by those with experts, int32."""
        return (self.stack_index_PB + self.stack_size(False) * self.is_moe_PB).astype(np.int32)

    @cached_property
    def is_block_PB(self) -> np.ndarray:
        """False for padding."""
        return np.arange(self.stack_size()) < np.array(self.counts())[:, None]


def _of_kind(pattern: Sequence[bool], is_moe: bool | None) -> list[bool]:
    return [kind for kind in pattern if is_moe is None or kind == is_moe]
