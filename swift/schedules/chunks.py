"""Chunks: consecutive blocks of the model, the unit of an op's work, and the stages that hold them.

Pipelines that are cut differently have the common refinement of their cuts as chunks, so that every worker holds whole
chunks; a stage with two runs of blocks holds two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from swift.errors import SettingError, check_count, check_number
from swift.topology import Topology


@dataclass(frozen=True)
class Chunk:
    """Consecutive blocks of the model, and what their ops cost: factors of the fields of ``Costs``.

    Attributes:
        num_blocks: number of blocks; 0 where it is not said.
        f, b, w, u: factors of the times of F, B, W and U. Those of the first chunk count the embedding, and those of
            the last one the head.
        f_stash, w_stash: factors of the stashes.
    """

    num_blocks: int = 0
    f: float = 1.0
    b: float = 1.0
    w: float = 1.0
    u: float = 1.0
    f_stash: float = 1.0
    w_stash: float = 1.0

    def __post_init__(self) -> None:
        check_count("Chunk.num_blocks", self.num_blocks, least=0)
        for name in ("f", "b", "w", "f_stash"):
            check_number(f"Chunk.{name}", getattr(self, name), above=0)
        for name in ("u", "w_stash"):
            check_number(f"Chunk.{name}", getattr(self, name), least=0)
        for name in ("f", "b", "w", "u", "f_stash", "w_stash"):
            object.__setattr__(self, name, float(getattr(self, name)))

    @classmethod
    def of_size(cls, size: float, num_blocks: int = 0, *, more_f: float = 0.0, more_b: float = 0.0) -> "Chunk":
        """Makes a chunk whose ops cost ``size`` times what ``Costs`` says.

        Args:
            size: factor of all times and stashes.
            num_blocks: number of blocks; 0 where it is not said.
            more_f: addition to the factor of F: the head computes its gradient at once.
            more_b: addition to the factor of B, for the embedding.
        """
        return cls(num_blocks, size + more_f, size + more_b, *(size,) * 4)


def joined(blocks: Sequence[Chunk]) -> Chunk:
    """Joins consecutive chunks into one, whose ops cost what those of all of them do."""
    names = ("f", "b", "w", "u", "f_stash", "w_stash")
    return Chunk(sum(one.num_blocks for one in blocks), *(sum(getattr(one, name) for one in blocks) for name in names))


def cut_by_costs(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Cuts blocks so that the longest stage is as short as it can be; among such cuts, the most even one.

    Args:
        costs: time of each block.
        num_stages: P, at most as many as there are blocks.
        first: additional time of the first stage, for the embedding.
        last: additional time of the last stage, for the head.

    Returns:
        The number of blocks of each stage.

    >>> cut_by_costs([1.0] * 7, 4), cut_by_costs([1.0] * 8, 4, last=1.0)
    ((2, 2, 2, 1), (3, 2, 2, 1))
    """
    sums = [0.0, *accumulate(costs)]
    num_blocks = len(costs)

    def time(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + first * (stage == 0) + last * (stage == num_stages - 1)

    # best[e]: (longest stage, sum of squares, sizes) of the stages so far, which hold the first e blocks.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage + 1, num_blocks - (num_stages - 1 - stage) + 1):
            ways = []
            for begin, (longest, squares, sizes) in best.items():
                if begin < end:
                    took = time(stage, begin, end)
                    ways.append((max(longest, took), squares + took**2, (*sizes, end - begin)))
            found[end] = min(ways, key=lambda way: (round(way[0], 9), round(way[1], 9), [-size for size in way[2]]))
        best = found
    return best[num_blocks][2]


def common_chunks(cuts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Refines the cuts of several pipelines into chunks that every pipeline's stages hold as a whole.

    Args:
        cuts: number of blocks of each stage, for each pipeline; all have equal sums.

    Returns:
        (number of blocks of each chunk, ``Problem.stage_of_chunk``).

    >>> common_chunks([(2, 2), (1, 3)])
    ((1, 1, 2), ((0, 0, 1), (0, 1, 1)))
    """
    ends = [list(accumulate(cut)) for cut in cuts]
    assert len({end[-1] for end in ends}) == 1, f"cuts of different models: {cuts}"
    bounds = sorted({0, *(bound for end in ends for bound in end)})
    # A stage without blocks ends where the one before it ends, and holds no chunk.
    stages = [tuple(next(p for p, last in enumerate(end) if last > first) for first in bounds[:-1]) for end in ends]
    return tuple(after - before for before, after in pairwise(bounds)), tuple(stages)


def checked_chunks(chunks: Any, stage_of_chunk: Any, topology: Topology) -> tuple[Any, Any]:
    """Checks these fields of ``Problem``; returns them in their simplest form.

    Raises:
        SettingError: a stage is not one of the topology's, or the chunks are not those that the stages hold.
    """
    D, P = topology.num_pipelines, topology.num_stages
    chunks, holders, setting = tuple(chunks), tuple(map(tuple, stage_of_chunk)), "Problem.stage_of_chunk"
    if holders and len(holders) != D:
        raise SettingError(setting, holders, f"must be one for each of the {D} pipelines")
    if len({len(stages) for stages in holders}) > 1 or () in holders:
        raise SettingError(setting, holders, "must name a stage for each chunk, equally many for each pipeline")
    if any(not isinstance(p, int) or isinstance(p, bool) or not 0 <= p < P for stages in holders for p in stages):
        raise SettingError(setting, holders, f"must be stages: whole numbers from 0 to {P - 1}")
    number = len(holders[0]) if holders else P
    if chunks and len(chunks) != number:
        raise SettingError("Problem.chunks", len(chunks), f"must be {number}, as many as the stages hold")
    chunks = () if set(chunks) == {Chunk()} else chunks
    return chunks, () if set(holders) == {tuple(range(P))} else holders


def checked_microbatches(value: Any, num_pipelines: int) -> int | tuple[int, ...]:
    """Checks ``Problem.num_microbatches``; returns a whole number where all pipelines have equally many."""
    setting = "Problem.num_microbatches"
    if not isinstance(value, tuple | list):
        check_count(setting, value, least=1)
        return value
    if len(value) != num_pipelines:
        raise SettingError(setting, tuple(value), f"must be one number for each of the {num_pipelines} pipelines")
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in value):
        raise SettingError(setting, tuple(value), "must be whole numbers of at least 0")
    if not any(value):
        raise SettingError(setting, tuple(value), "must be at least one micro-batch")
    return value[0] if len(set(value)) == 1 else tuple(value)
