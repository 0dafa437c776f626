"""Division of micro-batches over a layout's pipelines, as a problem with an executor for every chunk.

Every block of a micro-batch runs on one of the workers that hold it. Most micro-batches stay on one pipeline; a
remainder is re-routed block by block, so that no worker has much more work than another. A linear program finds the
least possible load of the busiest worker; a small integer program rounds the remainder.

Equal pipelines without re-routed micro-batches run the same schedule, so only one of them is planned. Planning a
cluster of a thousand workers with a few losses then takes hardly longer than planning the pipelines that differ.

Shape suffixes: D pipelines that hold the model, K chunks, W workers, J micro-batches.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from swift.schedules.adapt.layouts import BlockLayout, BlockProblem
from swift.schedules.problem import Problem
from swift.schedules.schedule import Round
from swift.topology import Topology

_MOST_NODES = 20
"""Node limit of an integer program, used instead of a time limit so that a plan is the same on every machine."""
_SLACK = 1e-6
_REST_SLACK = 1e-3
"""Solver error to expect in sums of micro-batches; limits are at least 0.01 away from whole numbers."""
_MOST_UNITS = 5
"""Number of loads to try, one unit apart. The first one may be too low, since chunks may have several units."""
_FEW, _FEW_SHARE = 24, 0.01
"""Micro-batches that may be re-routed at any load but the largest: this number, or this fraction of all, if more."""
_AS_GOOD = 1.002
"""Loads within this factor of the least are equally good."""

_MOST_PARTS = 4_000
"""Limit on blocks times pipelines up to which every block is routed separately; beyond it, whole chunks are."""


@dataclass(frozen=True, eq=False)
class Division:
    """A division of micro-batches over pipelines.

    Attributes:
        whole_D: number of micro-batches that run entirely on each pipeline.
        routes_RK: pipeline that runs each chunk of every other micro-batch.
        load: total time of F, B and W on the busiest worker, per iteration.
    """

    whole_D: tuple[int, ...]
    routes_RK: np.ndarray
    load: float


def min_max_load(worker_DK: np.ndarray, cost_K: np.ndarray, number: int) -> float:
    """Computes the least possible load of the busiest worker if micro-batches could be divided arbitrarily."""
    solution = _program(worker_DK, cost_K, number, None, is_integral=False)
    assert solution is not None, "some load is enough"
    return float(solution[-1])


def divide(worker_DK: np.ndarray, cost_K: np.ndarray, number: int, unit: float) -> Division:
    """Divides micro-batches so that the busiest worker has as little work as possible.

    Args:
        worker_DK: worker that holds each chunk in each pipeline.
        cost_K: time of F, B and W together for each chunk.
        number: number of micro-batches in all pipelines together.
        unit: time of F, B and W together for the smallest block.
    """
    divisions = [_whole_only(worker_DK, cost_K, number)]
    least = np.ceil(min_max_load(worker_DK, cost_K, number) / unit - _SLACK) * unit
    for more in range(_MOST_UNITS):
        load = least + more * unit
        if load >= min(division.load for division in divisions) * (1 - _SLACK):
            break
        most_rest = max(_FEW, number * _FEW_SHARE) if more + 1 < _MOST_UNITS else number
        whole_D = most_whole(worker_DK, cost_K, number, load * (1 + _SLACK), most_rest)
        if whole_D is None:
            continue  # too many would be re-routed: one more unit of load needs fewer
        rest = number - int(whole_D.sum())
        routed_DK = _rounded(worker_DK, cost_K, whole_D, rest, load, unit)
        loads_W = np.zeros(int(worker_DK.max()) + 1)
        np.add.at(loads_W, worker_DK, (whole_D[:, None] + routed_DK) * cost_K)
        divisions.append(Division(tuple(whole_D.tolist()), _routes(routed_DK), float(loads_W.max())))
    enough = min(division.load for division in divisions) * _AS_GOOD
    # Prefer routes over few pipelines: pipelines without re-routed micro-batches stay equal and are planned once.
    return min(
        (division for division in divisions if division.load <= enough),
        key=lambda division: (len(np.unique(division.routes_RK)), division.load),
    )


def _whole_only(worker_DK: np.ndarray, cost_K: np.ndarray, number: int) -> Division:
    """Divides micro-batches like ``divide``, but keeps each of them on one pipeline."""
    D, K = worker_DK.shape
    loads_W = np.zeros(int(worker_DK.max()) + 1)
    np.add.at(loads_W, worker_DK, np.broadcast_to(cost_K, (D, K)))
    longest_D = loads_W[worker_DK].max(axis=1).tolist()
    queue = [(longest, d, 1) for d, longest in enumerate(longest_D)]
    heapq.heapify(queue)
    whole_D, load = [0] * D, 0.0
    for _ in range(number):
        load, d, count = queue[0]
        whole_D[d] = count
        heapq.heapreplace(queue, (longest_D[d] * (count + 1), d, count + 1))
    return Division(tuple(whole_D), np.zeros((0, K), int), load)


def most_whole(
    worker_DK: np.ndarray, cost_K: np.ndarray, number: int, load: float, most_rest: float
) -> np.ndarray | None:
    """Maximizes the number of micro-batches that stay on one pipeline if no worker exceeds a load.

    The integer program takes seconds for a thousand workers. The remainder of the linear program is a lower bound, so
    the linear program is solved first and often suffices to rule out a load.

    Args:
        worker_DK, cost_K, number: see ``divide``.
        load: load that no worker may exceed.
        most_rest: largest number of micro-batches that may be re-routed.

    Returns:
        Number of micro-batches that stay on each pipeline, int64[D], or None if more than ``most_rest`` would remain.
    """
    whole_D = np.zeros(len(worker_DK))
    for is_integral in (False, True):
        solution = _program(worker_DK, cost_K, number, load, is_integral=is_integral)
        if solution is None:
            return None
        whole_D = solution[: len(worker_DK)]
        if number - whole_D.sum() > most_rest + _REST_SLACK:
            return None
    return np.rint(whole_D).astype(int)


def _program(
    worker_DK: np.ndarray, cost_K: np.ndarray, number: int, load: float | None, *, is_integral: bool
) -> np.ndarray | None:
    """Minimizes the busiest worker's load or, at a given load, the number of re-routed micro-batches.

    Args:
        worker_DK, cost_K, number: see ``divide``.
        load: load that no worker may exceed; None to minimize it.
        is_integral: whether the number of micro-batches that stay on a pipeline must be whole.

    Returns:
        float64[D + D * K + 1]: micro-batches that stay on each pipeline, routed chunks (not rounded), and the load; or
        None if there is no solution.
    """
    # Imported on use: scipy.optimize takes 0.4 s.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    D, K = worker_DK.shape
    number_of_workers, size = int(worker_DK.max()) + 1, D + D * K + 1
    d_n, k_n = np.repeat(np.arange(D), K), np.tile(np.arange(K), D)
    # Columns: micro-batches that stay on each pipeline, routed chunks, the load. Rows of ``equal``: each chunk runs
    # once for every micro-batch. Rows of ``most``: no worker exceeds the load.
    equal = coo_array((np.ones(2 * D * K), (np.tile(k_n, 2), np.append(d_n, D + np.arange(D * K)))), shape=(K, size))
    w_n = np.append(np.tile(worker_DK.ravel(), 2), np.arange(number_of_workers))
    columns = np.concatenate([d_n, D + np.arange(D * K), np.full(number_of_workers, size - 1)])
    values = np.concatenate([np.tile(cost_K[k_n], 2), np.full(number_of_workers, -1.0)])
    most = coo_array((values, (w_n, columns)), shape=(number_of_workers, size))
    goal, high = np.zeros(size), np.full(size, np.inf)
    if load is None:
        goal[-1] = 1.0
        high[:D] = 0.0  # the least load is the same if all chunks are routed separately
    else:
        goal[D:-1] = cost_K[k_n] / cost_K.sum()
        high[-1] = load
    result = milp(
        goal,
        constraints=[
            LinearConstraint(equal.tocsr(), number, number),
            LinearConstraint(most.tocsr(), -np.inf, 0.0),
        ],
        bounds=Bounds(np.zeros(size), high),
        integrality=np.append(np.full(D, float(is_integral)), np.zeros(size - D)),
        options={"node_limit": _MOST_NODES, "mip_rel_gap": 1e-3},
    )
    return result.x


def _rounded(
    worker_DK: np.ndarray, cost_K: np.ndarray, whole_D: np.ndarray, rest: int, load: float, unit: float
) -> np.ndarray:
    """Rounds the remainder to whole micro-batches at each pipeline and chunk, int64[D, K]; chunks sum to ``rest``."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    D, K = worker_DK.shape
    if not rest:
        return np.zeros((D, K), int)
    W, n = int(worker_DK.max()) + 1, D * K
    base_W = np.zeros(W)
    np.add.at(base_W, worker_DK, whole_D[:, None] * cost_K)
    cost_n, rows_W = np.tile(cost_K, D), np.arange(W)
    equal = coo_array((np.ones(n), (np.tile(np.arange(K), D), np.arange(n))), shape=(K, n + 2 * W + 1))
    # Work below the last unit of a worker's load is free, work within it is cheap, and work above it costs as much as
    # the worker that exceeds the load the most.
    rows = np.concatenate([worker_DK.ravel(), rows_W, rows_W])
    columns = np.concatenate([np.arange(n), n + rows_W, np.full(W, n + 2 * W)])
    values = np.concatenate([cost_n, np.full(2 * W, -1.0)])
    within = coo_array((values, (rows, columns)), shape=(W, n + 2 * W + 1))
    result = milp(
        np.concatenate([np.zeros(n), np.full(W, 1.0 / W), np.zeros(W), [1e3]]),
        constraints=[
            LinearConstraint(equal.tocsr(), rest, rest),
            LinearConstraint(within.tocsr(), -np.inf, load - unit - base_W),
        ],
        bounds=Bounds(
            np.zeros(n + 2 * W + 1), np.concatenate([np.full(n, rest), np.full(W, unit), np.full(W + 1, np.inf)])
        ),
        integrality=np.concatenate([np.ones(n), np.zeros(2 * W + 1)]),
        options={"node_limit": _MOST_NODES, "mip_rel_gap": 1e-2},
    )
    if result.x is not None:
        return np.rint(result.x[:n]).astype(int).reshape(D, K)
    return _rounded_by_hand(worker_DK, cost_K, base_W, rest)


def _rounded_by_hand(worker_DK: np.ndarray, cost_K: np.ndarray, base_W: np.ndarray, rest: int) -> np.ndarray:
    routed_DK, load_W = np.zeros(worker_DK.shape, int), base_W.copy()
    for _ in range(rest):
        for k in np.argsort(-cost_K, kind="stable").tolist():
            d = int(np.argmin(load_W[worker_DK[:, k]]))
            routed_DK[d, k] += 1
            load_W[worker_DK[d, k]] += cost_K[k]
    return routed_DK


def _routes(routed_DK: np.ndarray) -> np.ndarray:
    """Combines routed chunks into micro-batches that rarely change pipelines, int64[R, K]."""
    D, K = routed_DK.shape
    rest = int(routed_DK[:, 0].sum())
    routes_RK = np.zeros((rest, K), int)
    at_R = np.repeat(np.arange(D), routed_DK[:, 0])
    for k in range(K):
        left_D, lost = routed_DK[:, k].copy(), []
        for j in range(rest):
            if left_D[at_R[j]] > 0:
                left_D[at_R[j]] -= 1
            else:
                lost.append(j)
        at_R[lost] = np.repeat(np.arange(D), left_D)
        routes_RK[:, k] = at_R
    return routes_RK


@dataclass(frozen=True, eq=False)
class BlockMixture:
    """A layout with its micro-batches divided over pipelines: a problem with its executors, ready to be scheduled.

    Attributes:
        work: problem without failures, and its blocks.
        layout: run of blocks of each place.
        bounds: first block of each chunk, and the number of blocks.
        routes_D: for each pipeline, the executors of its micro-batches, int64[J, K].
        load: total time of F, B and W on the busiest worker, per iteration.
        plans_each: whether equal pipelines are planned separately.
    """

    work: BlockProblem
    layout: BlockLayout
    bounds: tuple[int, ...]
    routes_D: tuple[np.ndarray, ...]
    load: float
    plans_each: bool = False

    @cached_property
    def problem(self) -> Problem:
        """Problem of scheduling all pipelines."""
        return self._problem_of(range(self.work.problem.num_pipelines), self.work.problem)

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Number of micro-batches in each pipeline."""
        return tuple(len(routes) for routes in self.routes_D)

    @cached_property
    def num_routed(self) -> int:
        """Number of micro-batches that change pipelines."""
        return sum(int((np.ptp(routes, axis=1) > 0).sum()) for routes in self.routes_D if len(routes))

    @cached_property
    def planned_as(self) -> tuple[int, ...]:
        """Pipeline whose schedule each pipeline copies: the first pipeline equal to it, or itself."""
        stages, first_of_kind = self.layout.stages(self.bounds), dict[object, int]()
        visited = {d for e, routes in enumerate(self.routes_D) for d in np.unique(routes).tolist() if d != e}
        as_D = []
        for d, routes in enumerate(self.routes_D):
            alone = d not in visited and bool((routes == d).all()) and not self.plans_each
            kind = (tuple(stages[d]), self.layout.runs_DP[d], len(routes)) if alone else d
            as_D.append(first_of_kind.setdefault(kind, d))
        return tuple(as_D)

    @cached_property
    def representatives(self) -> tuple[int, ...]:
        """Pipelines that are actually planned."""
        return tuple(sorted(set(self.planned_as) & set(self.layout.pipelines)))

    @cached_property
    def reduced(self) -> Problem:
        """Problem of scheduling only the pipelines that are planned (``representatives``)."""
        return self._problem_of(self.representatives, self.work.problem)

    @cached_property
    def fits_alone(self) -> bool:
        """Whether a single micro-batch fits on every worker, although some hold more blocks than without failures."""
        limit, unlimited = self.work.problem.memory_limit, replace(self.work.problem, memory_limit=None)
        return limit is None or self._problem_of(self.representatives, unlimited).microbatch_peak <= limit

    @cached_property
    def executor(self) -> list[int]:
        """Executors of the reduced problem, laid out as in ``Policy.executor``."""
        index = {d: number for number, d in enumerate(self.representatives)}
        return [
            index[d] for representative in self.representatives for d in self.routes_D[representative].ravel().tolist()
        ]

    def expanded(self, reduced_plan: Round) -> Round:
        """Copies each representative's schedule to all pipelines that it represents."""
        D, M, K = self.work.problem.num_pipelines, self.problem.most_microbatches, len(self.bounds) - 1
        executor_DMK, start_3DMK = np.full((D, M, K), -1, np.int32), np.full((3, D, M, K), np.nan)
        for d, routes in enumerate(self.routes_D):
            if len(routes):
                executor_DMK[d, : len(routes)] = routes
                row = self.representatives.index(self.planned_as[d])
                start_3DMK[:, d, : len(routes)] = reduced_plan.start_3DMP[:, row, : len(routes)]
        return Round(executor_DMK, start_3DMK, reduced_plan.update_P, reduced_plan.period)

    def _problem_of(self, pipelines: Sequence[int], base: Problem) -> Problem:
        stages = self.layout.stages(self.bounds)
        nonempty_pipelines = self.layout.pipelines
        return replace(
            base,
            topology=Topology(len(pipelines), base.num_stages),
            num_microbatches=tuple(len(self.routes_D[d]) for d in pipelines),
            failed=frozenset((row, p) for row, d in enumerate(pipelines) for e, p in self.layout.empty if d == e),
            chunks=self.work.chunks(self.bounds),
            # A pipeline without blocks runs nothing. ``Problem`` needs a stage for each of its chunks, so use those of
            # another pipeline.
            stage_of_chunk=tuple(
                tuple(stages[d if d in nonempty_pipelines else nonempty_pipelines[0]]) for d in pipelines
            ),
        )


def mixtures(work: BlockProblem, layout: BlockLayout, *, one_block: bool = False) -> list[BlockMixture]:
    """Divides the micro-batches over the pipelines of a layout, in one or two ways.

    Args:
        work: problem without failures, and its blocks.
        layout: run of blocks of each place.
        one_block: True for ops that work on one block each, False for as few chunks as possible.

    Returns:
        A mixture without re-routing, preceded by one that re-routes a remainder if that lowers the load of the busiest
        worker.
    """
    whole = unrouted(work, layout, one_block=one_block)
    fine = one_block or len(work.blocks) * len(layout.pipelines) <= _MOST_PARTS
    bounds = _all_bounds(work) if fine else layout.bounds
    routed = _mixture(work, layout, bounds, partial(divide, unit=float(work.cost_L.min())), one_block)
    return [routed, whole] if routed.load < whole.load * (1 - 1e-6) else [whole]


def unrouted(work: BlockProblem, layout: BlockLayout, *, one_block: bool = False) -> BlockMixture:
    """Divides the micro-batches like ``mixtures``, but keeps each of them on one pipeline."""
    bounds = _all_bounds(work) if one_block else layout.bounds
    return _mixture(work, layout, bounds, _whole_only, one_block)


def _all_bounds(work: BlockProblem) -> tuple[int, ...]:
    return tuple(range(len(work.blocks) + 1))


def parts(work: BlockProblem, layout: BlockLayout, bounds: Sequence[int]) -> tuple[np.ndarray, np.ndarray, int]:
    """Computes the first three arguments of ``divide``: ``worker_DK``, ``cost_K`` and ``number``."""
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
    chunk_starts = [k for k, does in enumerate(begins) if does]
    routes_RK, K = routes_RK[:, chunk_starts], len(chunk_starts)
    # A re-routed micro-batch belongs to the pipeline on which it begins.
    routes_D: list[np.ndarray] = [np.zeros((0, K), int)] * work.problem.num_pipelines
    for d, number in zip(pipelines.tolist(), division.whole_D, strict=True):
        routes_D[d] = np.concatenate([np.full((number, K), d), routes_RK[routes_RK[:, 0] == d]])
    new_bounds = (*(bounds[k] for k in chunk_starts), bounds[-1])
    return BlockMixture(work, layout, new_bounds, tuple(routes_D), division.load)
