"""A layout and a division of micro-batches, as a problem with the executor of every chunk.

Pipelines that are alike, and to which nothing is re-routed, run the same schedule: one of them is planned for all. So a
cluster of a thousand workers of whom a few are lost takes hardly longer to plan than its pipelines that differ.

K: chunks, J: micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from swift.schedules.adapt.division import Division, divide, whole_only
from swift.schedules.adapt.work import BlockLayout, BlockProblem
from swift.schedules.problem import Problem
from swift.schedules.schedule import Round
from swift.topology import Topology

_MOST_PARTS = 4_000
"""Blocks times pipelines up to which each block is divided for itself; beyond, as the cuts have them."""


@dataclass(frozen=True, eq=False)
class BlockMixture:
    """A problem with its executors, ready to be scheduled.

    Attributes:
        work: problem without failures, and its blocks.
        layout: runs of blocks of all places.
        bounds: blocks at which the chunks begin, and the number of blocks.
        routes_D: for each pipeline the executors of its micro-batches, int64[J, K].
        load: time of F, B and W of the worker that has the most.
        plans_each: whether pipelines that are alike are planned one by one.
    """

    work: BlockProblem
    layout: BlockLayout
    bounds: tuple[int, ...]
    routes_D: tuple[np.ndarray, ...]
    load: float
    plans_each: bool = False

    @cached_property
    def problem(self) -> Problem:
        """The problem of all pipelines."""
        return self._problem_of(range(self.work.problem.num_pipelines), self.work.problem)

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline."""
        return tuple(len(routes) for routes in self.routes_D)

    @cached_property
    def num_routed(self) -> int:
        """Micro-batches that change pipelines."""
        return sum(int((np.ptp(routes, axis=1) > 0).sum()) for routes in self.routes_D if len(routes))

    @cached_property
    def planned_as(self) -> tuple[int, ...]:
        """Pipeline whose schedule each pipeline runs; itself unless an earlier one is alike."""
        stages, found = self.layout.stages(self.bounds), dict[object, int]()
        visited = {d for e, routes in enumerate(self.routes_D) for d in np.unique(routes).tolist() if d != e}
        as_D = []
        for d, routes in enumerate(self.routes_D):
            alone = d not in visited and bool((routes == d).all()) and not self.plans_each
            kind = (tuple(stages[d]), self.layout.runs_DP[d], len(routes)) if alone else d
            as_D.append(found.setdefault(kind, d))
        return tuple(as_D)

    @cached_property
    def representatives(self) -> tuple[int, ...]:
        """Pipelines that are planned."""
        return tuple(sorted(set(self.planned_as) & set(self.layout.pipelines)))

    @cached_property
    def reduced(self) -> Problem:
        """The problem of the pipelines that are planned."""
        return self._problem_of(self.representatives, self.work.problem)

    @cached_property
    def fits_alone(self) -> bool:
        """Whether a single micro-batch fits the memory of every worker, some of which hold more blocks than before."""
        limit, unlimited = self.work.problem.memory_limit, replace(self.work.problem, memory_limit=None)
        return limit is None or self._problem_of(self.representatives, unlimited).microbatch_peak <= limit

    @cached_property
    def executor(self) -> list[int]:
        """``Policy.executor`` of the reduced problem."""
        index = {d: number for number, d in enumerate(self.representatives)}
        return [index[d] for one in self.representatives for d in self.routes_D[one].ravel().tolist()]

    def expanded(self, one: Round) -> Round:
        """Gives the schedule of each representative to all pipelines that are planned as it is."""
        D, M, K = self.work.problem.num_pipelines, self.problem.most_microbatches, len(self.bounds) - 1
        executor_DMK, start_3DMK = np.full((D, M, K), -1, np.int32), np.full((3, D, M, K), np.nan)
        for d, routes in enumerate(self.routes_D):
            if len(routes):
                executor_DMK[d, : len(routes)] = routes
                row = self.representatives.index(self.planned_as[d])
                start_3DMK[:, d, : len(routes)] = one.start_3DMP[:, row, : len(routes)]
        return Round(executor_DMK, start_3DMK, one.update_P, one.period)

    def _problem_of(self, pipelines: Sequence[int], base: Problem) -> Problem:
        stages = self.layout.stages(self.bounds)
        held = self.layout.pipelines
        return replace(
            base,
            topology=Topology(len(pipelines), base.num_stages),
            num_microbatches=tuple(len(self.routes_D[d]) for d in pipelines),
            failed=frozenset((row, p) for row, d in enumerate(pipelines) for e, p in self.layout.empty if d == e),
            chunks=self.work.chunks(self.bounds),
            # A pipeline without blocks runs nothing: it is taken to hold what another one does.
            stage_of_chunk=tuple(tuple(stages[d if d in held else held[0]]) for d in pipelines),
        )


def mixtures(work: BlockProblem, layout: BlockLayout, *, one_block: bool = False) -> list[BlockMixture]:
    """Divides the micro-batches among the pipelines of a layout.

    Args:
        work: problem without failures, and its blocks.
        layout: runs of blocks of all places.
        one_block: True for ops of one block each, False for as few chunks as there can be.

    Returns:
        One that changes pipelines nowhere, and, where that makes the most loaded worker's load less, one that
        re-routes a remainder.
    """
    whole = unrouted(work, layout, one_block=one_block)
    fine = one_block or len(work.blocks) * len(layout.pipelines) <= _MOST_PARTS
    bounds = _all_bounds(work) if fine else layout.bounds
    routed = _mixture(work, layout, bounds, partial(divide, unit=float(work.cost_L.min())), one_block)
    return [routed, whole] if routed.load < whole.load * (1 - 1e-6) else [whole]


def unrouted(work: BlockProblem, layout: BlockLayout, *, one_block: bool = False) -> BlockMixture:
    """Divides the micro-batches as ``mixtures`` does, each of them on one pipeline as a whole."""
    bounds = _all_bounds(work) if one_block else layout.bounds
    return _mixture(work, layout, bounds, whole_only, one_block)


def _all_bounds(work: BlockProblem) -> tuple[int, ...]:
    return tuple(range(len(work.blocks) + 1))


def parts(work: BlockProblem, layout: BlockLayout, bounds: Sequence[int]) -> tuple[np.ndarray, np.ndarray, int]:
    """Lists what is divided: the worker of each chunk, the cost of each chunk, the number of micro-batches."""
    P, stages = work.problem.num_stages, np.array(layout.stages(bounds))
    rows = list(layout.pipelines)
    worker_DK = np.arange(len(rows))[:, None] * P + stages[rows]
    return worker_DK, np.add.reduceat(work.cost_L, np.array(bounds[:-1])), work.problem.total_microbatches


def _mixture(
    work: BlockProblem, layout: BlockLayout, bounds: tuple[int, ...], divided: Callable[..., Division], one_block: bool
) -> BlockMixture:
    division = divided(*parts(work, layout, bounds))
    pipelines = np.array(layout.pipelines)
    routes_RK = pipelines[division.routes_RK]
    # A chunk begins where a pipeline's stage begins, or where a micro-batch changes pipelines.
    changes = (np.diff(routes_RK, axis=1) != 0).any(axis=0)
    begins = [not k or one_block or bounds[k] in layout.bounds or changes[k - 1] for k in range(len(bounds) - 1)]
    kept = [k for k, does in enumerate(begins) if does]
    routes_RK, K = routes_RK[:, kept], len(kept)
    # A re-routed micro-batch is one of the pipeline that begins it.
    routes_D: list[np.ndarray] = [np.zeros((0, K), int)] * work.problem.num_pipelines
    for d, number in zip(pipelines.tolist(), division.whole_D, strict=True):
        routes_D[d] = np.concatenate([np.full((number, K), d), routes_RK[routes_RK[:, 0] == d]])
    new_bounds = (*(bounds[k] for k in kept), bounds[-1])
    return BlockMixture(work, layout, new_bounds, tuple(routes_D), division.load)
