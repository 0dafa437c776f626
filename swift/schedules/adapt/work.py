"""Work of every block, which is planned anew after a failure, and layouts of it over places."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from swift.errors import SettingError
from swift.schedules.adapt.block_order import BlockOrder, Run
from swift.schedules.chunks import Chunk, joined
from swift.schedules.problem import Problem
from swift.topology import Worker


@dataclass(frozen=True)
class BlockProblem:
    """A fault-free problem, and the blocks that its stages are made of.

    Attributes:
        problem: problem without failures, in which all pipelines are alike.
        blocks: costs of every block, as factors of ``problem.costs``; those of the first one count the embedding, and
            those of the last one the head.
        cut: number of blocks of every chunk of the problem: of every stage, or of the two runs of each in a V.

    Raises:
        SettingError: pipelines differ, a worker has failed, or stages hold neither one run of blocks nor two in a V.
    """

    problem: Problem
    blocks: tuple[Chunk, ...]
    cut: tuple[int, ...]
    order: BlockOrder = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.problem.failed or not self.problem.is_alike:
            allowed = "what is planned anew starts from pipelines that are alike, without a failure"
            raise SettingError("BlockProblem.problem", sorted(self.problem.failed), allowed)
        assert sum(self.cut) == len(self.blocks), "a cut of other blocks"
        assert len(self.cut) == self.problem.num_chunks, "a cut into other stages"
        object.__setattr__(self, "order", BlockOrder.of(self.cut, self.problem.stage_DP[0].tolist()))

    @classmethod
    def of_stages(cls, problem: Problem) -> "BlockProblem":
        """Takes every chunk for a block: every stage, or every run of a stage."""
        return cls(problem, problem.chunks or (Chunk(),) * problem.num_chunks, (1,) * problem.num_chunks)

    @property
    def in_v(self) -> bool:
        """Whether stages hold two runs of blocks."""
        return not self.problem.is_plain

    @cached_property
    def runs_P(self) -> tuple[Run, ...]:
        """Positions in ``order`` of the blocks of every stage without a failure."""
        size_P = np.bincount(self.problem.stage_DP[0], self.cut).astype(int).tolist()
        return tuple(pairwise(accumulate(size_P, initial=0)))

    @cached_property
    def cost_L(self) -> np.ndarray:
        """Time of F, B and W of every block together, float64[blocks]."""
        t_f, t_b, t_w, _ = self.problem.costs.op_times
        return np.array([t_f * block.f + t_b * block.b + t_w * block.w for block in self.blocks])

    @cached_property
    def ordered_cost_L(self) -> np.ndarray:
        """``cost_L`` in the order in which stages take the blocks."""
        return self.cost_L[list(self.order.blocks)]

    def chunks(self, bounds: Sequence[int]) -> tuple[Chunk, ...]:
        """Joins the blocks between bounds, which begin with 0 and end with the number of blocks."""
        return tuple(joined(self.blocks[first:end]) for first, end in pairwise(bounds))

    def with_failures(self, failed: frozenset[Worker]) -> Problem:
        """Makes the problem in which peers run the micro-batches of failed workers, and nothing moves."""
        return replace(self.problem, failed=failed)


@dataclass(frozen=True)
class BlockLayout:
    """Assignment of blocks to the places of a cluster.

    Attributes:
        order: blocks in the order in which stages take them.
        runs_DP: run of that order of each place (pipeline, stage); None for a place that nobody takes. The runs of a
            pipeline follow each other and cover all blocks, or it has none.
    """

    order: BlockOrder
    runs_DP: tuple[tuple[Run | None, ...], ...]

    @property
    def empty(self) -> frozenset[Worker]:
        """Places that nobody takes."""
        return frozenset((d, p) for d, runs in enumerate(self.runs_DP) for p, run in enumerate(runs) if run is None)

    @property
    def places(self) -> dict[Worker, Run]:
        """The runs of all places that are taken, in mesh order."""
        return {(d, p): run for d, runs in enumerate(self.runs_DP) for p, run in enumerate(runs) if run is not None}

    @property
    def pipelines(self) -> tuple[int, ...]:
        """Pipelines that hold the model."""
        return tuple(d for d, runs in enumerate(self.runs_DP) if any(runs))

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Blocks of the model at which a run of any pipeline begins, and the number of blocks."""
        taken = set(self.places.values())
        return tuple(sorted({0, *(end for one in taken for _, end in self.order.runs(one))}))

    def stages(self, bounds: Sequence[int]) -> list[list[int]]:
        """Finds the stage of each pipeline that holds each chunk between bounds; -1 in a pipeline without blocks."""
        found = []
        for runs in self.runs_DP:
            taken = [(run, p) for p, run in enumerate(runs) if run is not None]
            ends = sorted((end, p) for run, p in taken for _, end in self.order.runs(run))
            found.append([next((p for end, p in ends if end > first), -1) for first in bounds[:-1]])
        return found
