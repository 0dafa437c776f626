"""The cut of a model's blocks into stages, which hold consecutive blocks, any number of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from swift.errors import SettingError
from swift.models.cuts.stacks import BlockStacks


@dataclass(frozen=True)
class Cut(BlockStacks):
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
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Positions in the model of the blocks of each stage."""
        ends = list(accumulate(self.sizes, initial=0))
        return tuple(tuple(range(first, end)) for first, end in pairwise(ends))

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


def make_cut(
    moe_layers: Sequence[bool], num_stages: int, sizes: Sequence[int] | None, setting: str, num_runs: int = 1
) -> Cut:
    """Makes the cut that a user gave by its numbers of blocks.

    Args:
        moe_layers: True for each block of the model that is a mixture of experts.
        num_stages: P.
        sizes: number of blocks of each stage, or of each run of blocks; None: equally many.
        setting: name of the setting, for errors.
        num_runs: runs of blocks of a stage. The cut then has that many parts for each of them.

    Raises:
        SettingError: there are more parts than blocks, a part without a block, or the numbers do not add up.
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
        allowed = f"must add up to ModelConfig.num_layers = {num_layers}, and add up to {sum(sizes)}"
        raise SettingError(setting, sizes, allowed)
    return Cut(tuple(moe_layers), sizes)
