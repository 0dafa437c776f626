"""The cut of a model's blocks into stages: which blocks each stage holds, and in which rows of its arrays.

A stage holds consecutive blocks, any number of them. In the arrays of a group of parameters each of its blocks has a
row; all stages have as many rows as the stage with the most blocks of that kind, and the rows that a stage does not
need are padding.

P stages, B blocks of the longest stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from swift.errors import SettingError

PADDING = -1


@dataclass(frozen=True)
class Cut:
    """The blocks of every stage.

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
        """P."""
        return len(self.sizes)

    @cached_property
    def stages(self) -> tuple[tuple[bool, ...], ...]:
        """True for each block of each stage that is a mixture of experts."""
        ends = list(accumulate(self.sizes, initial=0))
        return tuple(self.moe_layers[first:end] for first, end in pairwise(ends))

    @property
    def kinds(self) -> tuple[bool, ...]:
        """The kinds of block that the model has, by whether they are mixtures of experts."""
        return tuple(sorted(set(self.moe_layers)))

    @property
    def is_uniform(self) -> bool:
        """Whether all stages are alike."""
        return len(set(self.stages)) == 1

    @property
    def text(self) -> str:
        """The stages in words.

        >>> Cut((True,) * 8, (4, 4)).text, Cut((True,) * 7, (2, 2, 2, 1)).text
        ('2 stages', '4 stages (2, 2, 2, 1 layers)')
        """
        sizes = f" ({', '.join(map(str, self.sizes))} layers)"
        return f"{self.num_stages} stages{sizes * (len(set(self.sizes)) > 1)}"

    def counts(self, is_moe: bool | None = None) -> tuple[int, ...]:
        """Number of blocks of a kind, or of any kind (None), of each stage."""
        return tuple(len(_of_kind(stage, is_moe)) for stage in self.stages)

    def num_rows(self, is_moe: bool | None = None) -> int:
        """Rows for blocks of a kind, or of any kind (None): the most that a stage has."""
        return max(self.counts(is_moe))

    def model_rows(self, is_moe: bool | None = None) -> np.ndarray:
        """Position of each row's block among the model's blocks of a kind, int64[P, rows]; ``PADDING`` where none."""
        counts = self.counts(is_moe)
        rows = np.full((self.num_stages, self.num_rows(is_moe)), PADDING)
        for stage, (first, count) in enumerate(zip(accumulate(counts, initial=0), counts, strict=False)):
            rows[stage, :count] = first + np.arange(count)
        return rows

    def places(self, is_moe: bool | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(stage, row) of each of the model's blocks of a kind, int64[L] each: the inverse of ``model_rows``."""
        stage, row = np.nonzero(self.model_rows(is_moe) != PADDING)
        return stage, row

    @cached_property
    def is_moe_PB(self) -> np.ndarray:
        """Whether each block of a stage is a mixture of experts; False for padding."""
        table = np.zeros((self.num_stages, max(self.sizes)), bool)
        for stage, pattern in enumerate(self.stages):
            table[stage, : len(pattern)] = pattern
        return table

    @cached_property
    def row_PB(self) -> np.ndarray:
        """Row of each block of a stage among those of its kind, int32; 0 for padding."""
        table = np.zeros((self.num_stages, max(self.sizes)), np.int32)
        for stage, pattern in enumerate(self.stages):
            table[stage, : len(pattern)] = [pattern[:block].count(kind) for block, kind in enumerate(pattern)]
        return table

    def block_rows(self, is_moe: bool) -> np.ndarray:
        """Index in its stage of each row's block of a kind, int32[P, rows]; 0 for padding."""
        table = np.zeros((self.num_stages, self.num_rows(is_moe)), np.int32)
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
        return np.arange(max(self.sizes)) < np.array(self.sizes)[:, None]


def _of_kind(pattern: Sequence[bool], is_moe: bool | None) -> list[bool]:
    return [kind for kind in pattern if is_moe is None or kind == is_moe]


def make_cut(moe_layers: Sequence[bool], num_stages: int, sizes: Sequence[int] | None, setting: str) -> Cut:
    """Makes the cut that a user gave by its numbers of blocks.

    Args:
        moe_layers: True for each block of the model that is a mixture of experts.
        num_stages: P.
        sizes: number of blocks of each stage; None: equally many.
        setting: name of the setting, for errors.

    Raises:
        SettingError: there are more stages than blocks, a stage without a block, or the numbers do not add up.
    """
    num_layers = len(moe_layers)
    if num_stages > num_layers:
        allowed = f"must be at most ModelConfig.num_layers = {num_layers}: every stage needs a layer"
        raise SettingError("Topology.num_stages", num_stages, allowed)
    if sizes is None:
        sizes = [num_layers // num_stages] * num_stages
    if not isinstance(sizes, tuple | list):  # gin passes what the user wrote
        raise SettingError(setting, sizes, f"must be {num_stages} numbers of layers")
    sizes = tuple(sizes)
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise SettingError(setting, sizes, "must be whole numbers of at least 1: every stage needs a layer")
    if len(sizes) != num_stages:
        raise SettingError(setting, sizes, f"must be Topology.num_stages = {num_stages} numbers")
    if sum(sizes) != num_layers:
        allowed = f"must add up to ModelConfig.num_layers = {num_layers}, and add up to {sum(sizes)}"
        raise SettingError(setting, sizes, allowed)
    return Cut(tuple(moe_layers), sizes)
