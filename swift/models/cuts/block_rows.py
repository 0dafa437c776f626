"""Rows of blocks: in which row of its arrays each stage, or each worker, has which block of the model.

In the arrays of a group of parameters every block that has such a module has a row. All stages, or workers, have as
many rows as the one with the most blocks of that kind, and the rows that one does not need are padding.

P stages or workers, B blocks of the one that has most.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import numpy as np

PADDING = -1


class BlockRows(ABC):
    """The rows of whatever has blocks: of the stages of a ``Cut``, or of the workers of ``Chunks``.

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

    def num_rows(self, is_moe: bool | None = None) -> int:
        """Rows for blocks of a kind, or of any kind (None): the most that a stage has."""
        return max(self.counts(is_moe))

    def model_rows(self, is_moe: bool | None = None) -> np.ndarray:
        """Position of each row's block among the model's blocks of a kind, int64[P, rows]; ``PADDING`` where none."""
        is_kind = [is_moe is None or kind == is_moe for kind in self.moe_layers]
        number = np.cumsum(is_kind) - 1
        rows = np.full((len(self.blocks), self.num_rows(is_moe)), PADDING)
        for stage, blocks in enumerate(self.blocks):
            mine = [number[block] for block in blocks if is_kind[block]]
            rows[stage, : len(mine)] = mine
        return rows

    def places(self, is_moe: bool | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(stage, row) of each of the model's blocks of a kind, int64[L] each: the inverse of ``model_rows``.

        Of several that have a block, the first one.
        """
        rows = self.model_rows(is_moe)
        stage, row = np.nonzero(rows != PADDING)
        _, first = np.unique(rows[stage, row], return_index=True)
        return stage[first], row[first]

    @cached_property
    def is_moe_PB(self) -> np.ndarray:
        """Whether each block of a stage is a mixture of experts; False for padding."""
        table = np.zeros((len(self.blocks), self.num_rows()), bool)
        for stage, pattern in enumerate(self.stages):
            table[stage, : len(pattern)] = pattern
        return table

    @cached_property
    def row_PB(self) -> np.ndarray:
        """Row of each block of a stage among those of its kind, int32; 0 for padding."""
        table = np.zeros((len(self.blocks), self.num_rows()), np.int32)
        for stage, pattern in enumerate(self.stages):
            table[stage, : len(pattern)] = [pattern[:block].count(kind) for block, kind in enumerate(pattern)]
        return table

    def block_rows(self, is_moe: bool) -> np.ndarray:
        """Index in its stage of each row's block of a kind, int32[P, rows]; 0 for padding."""
        table = np.zeros((len(self.blocks), self.num_rows(is_moe)), np.int32)
        for stage, pattern in enumerate(self.stages):
            blocks = [block for block, kind in enumerate(pattern) if kind == is_moe]
            table[stage, : len(blocks)] = blocks
        return table

    @cached_property
    def joined_rows_PB(self) -> np.ndarray:
        """Row of each block of a stage where the rows of dense blocks are followed by those with experts, int32."""
        return (self.row_PB + self.num_rows(False) * self.is_moe_PB).astype(np.int32)

    @cached_property
    def is_block_PB(self) -> np.ndarray:
        """False for padding."""
        return np.arange(self.num_rows()) < np.array(self.counts())[:, None]


def _of_kind(pattern: Sequence[bool], is_moe: bool | None) -> list[bool]:
    return [kind for kind in pattern if is_moe is None or kind == is_moe]
