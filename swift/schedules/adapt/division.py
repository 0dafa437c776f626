"""Division of the micro-batches: how many run as a whole on each pipeline, and where the blocks of the others run.

Every block of a micro-batch runs on some worker that holds it. Most micro-batches stay on one pipeline; the remainder
is re-routed block by block, so that no worker has much more work than another. The least work of the most loaded worker
is that of a linear program; its remainder is rounded by a small integer program.

D: pipelines that hold the model, K: chunks, W: workers.
"""

import heapq
from dataclasses import dataclass

import numpy as np

_MOST_NODES = 20
"""Nodes that an integer program may search: no limit of time, so that a plan is the same on every machine."""
_SLACK = 1e-6
_REST_SLACK = 1e-3
"""Micro-batches by which the solver's sums may be off; limits are a hundredth or more away from whole numbers."""
_MOST_UNITS = 5
"""Loads to try, each a unit above the last, since chunks of several units cannot be divided so evenly."""
_FEW, _FEW_SHARE = 24, 0.01
"""Micro-batches that may be re-routed at any load but the largest: so many, or this share of all."""
_AS_GOOD = 1.002
"""Loads that are as good as the least."""


@dataclass(frozen=True, eq=False)
class Division:
    """Division of micro-batches among pipelines.

    Attributes:
        whole_D: micro-batches that run on one pipeline, of each pipeline.
        routes_RK: pipeline that runs each chunk of every other micro-batch.
        load: time of F, B and W of the worker that has the most.
    """

    whole_D: tuple[int, ...]
    routes_RK: np.ndarray
    load: float


def least_load(worker_DK: np.ndarray, cost_K: np.ndarray, number: int) -> float:
    """Least time of the most loaded worker, if micro-batches could be divided at will."""
    found = _program(worker_DK, cost_K, number, None, is_integral=False)
    assert found is not None, "some load is enough"
    return float(found[-1])


def divide(worker_DK: np.ndarray, cost_K: np.ndarray, number: int, unit: float) -> Division:
    """Divides micro-batches so that the most loaded worker has as little work as possible.

    Args:
        worker_DK: worker that holds each chunk in each pipeline.
        cost_K: time of F, B and W of each chunk.
        number: micro-batches of all pipelines.
        unit: time of F, B and W of the smallest block.
    """
    found = [whole_only(worker_DK, cost_K, number)]
    least = np.ceil(least_load(worker_DK, cost_K, number) / unit - _SLACK) * unit
    for more in range(_MOST_UNITS):
        load = least + more * unit
        if load >= min(one.load for one in found) * (1 - _SLACK):
            break
        most_rest = max(_FEW, number * _FEW_SHARE) if more + 1 < _MOST_UNITS else number
        whole_D = most_whole(worker_DK, cost_K, number, load * (1 + _SLACK), most_rest)
        if whole_D is None:
            continue  # another unit re-routes fewer
        rest = number - int(whole_D.sum())
        routed_DK = _rounded(worker_DK, cost_K, whole_D, rest, load, unit)
        loads_W = np.zeros(int(worker_DK.max()) + 1)
        np.add.at(loads_W, worker_DK, (whole_D[:, None] + routed_DK) * cost_K)
        found.append(Division(tuple(whole_D.tolist()), _routes(routed_DK), float(loads_W.max())))
    enough = min(one.load for one in found) * _AS_GOOD
    # Pipelines to which nothing is re-routed remain alike, and are planned once.
    return min((one for one in found if one.load <= enough), key=lambda one: (len(np.unique(one.routes_RK)), one.load))


def whole_only(worker_DK: np.ndarray, cost_K: np.ndarray, number: int) -> Division:
    """Divides micro-batches as ``divide`` does, each of them on one pipeline as a whole."""
    D, K = worker_DK.shape
    loads_W = np.zeros(int(worker_DK.max()) + 1)
    np.add.at(loads_W, worker_DK, np.broadcast_to(cost_K, (D, K)))
    longest_D = loads_W[worker_DK].max(axis=1).tolist()
    queue = [(longest, d, 1) for d, longest in enumerate(longest_D)]
    heapq.heapify(queue)
    whole_D, load = [0] * D, 0.0
    for _ in range(number):
        load, d, taken = queue[0]
        whole_D[d] = taken
        heapq.heapreplace(queue, (longest_D[d] * (taken + 1), d, taken + 1))
    return Division(tuple(whole_D), np.zeros((0, K), int), load)


def most_whole(
    worker_DK: np.ndarray, cost_K: np.ndarray, number: int, load: float, most_rest: float
) -> np.ndarray | None:
    """Numbers of micro-batches that stay on each pipeline at a load, int64[D]; None if the rest would be too many.

    The integer program takes seconds for a thousand workers. No division has a smaller rest than the linear program's,
    so that it is asked first.
    """
    whole_D = np.zeros(len(worker_DK))
    for is_integral in (False, True):
        found = _program(worker_DK, cost_K, number, load, is_integral=is_integral)
        if found is None:
            return None
        whole_D = found[: len(worker_DK)]
        if number - whole_D.sum() > most_rest + _REST_SLACK:
            return None
    return np.rint(whole_D).astype(int)


def _program(
    worker_DK: np.ndarray, cost_K: np.ndarray, number: int, load: float | None, *, is_integral: bool
) -> np.ndarray | None:
    """Solves for the least load, or, with a given load, for the most micro-batches that stay on one pipeline.

    Args:
        worker_DK, cost_K, number: see ``divide``.
        load: load that no worker exceeds; None: the least.
        is_integral: whether what stays on a pipeline is whole micro-batches.

    Returns:
        float64[D + D * K + 1]: micro-batches that stay, routed chunks (not rounded), load; None if there is nothing.
    """
    # Imported here, since it takes 0.4 s.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    D, K = worker_DK.shape
    number_of_workers, size = int(worker_DK.max()) + 1, D + D * K + 1
    d_n, k_n = np.repeat(np.arange(D), K), np.tile(np.arange(K), D)
    equal = coo_array((np.ones(2 * D * K), (np.tile(k_n, 2), np.append(d_n, D + np.arange(D * K)))), shape=(K, size))
    w_n = np.append(np.tile(worker_DK.ravel(), 2), np.arange(number_of_workers))
    columns = np.concatenate([d_n, D + np.arange(D * K), np.full(number_of_workers, size - 1)])
    values = np.concatenate([np.tile(cost_K[k_n], 2), np.full(number_of_workers, -1.0)])
    most = coo_array((values, (w_n, columns)), shape=(number_of_workers, size))
    goal, high = np.zeros(size), np.full(size, np.inf)
    if load is None:
        goal[-1] = 1.0
        high[:D] = 0.0  # routed chunks alone say as much
    else:
        goal[D:-1] = cost_K[k_n] / cost_K.sum()
        high[-1] = load
    found = milp(
        goal,
        constraints=[
            LinearConstraint(equal.tocsr(), number, number),
            LinearConstraint(most.tocsr(), -np.inf, 0.0),
        ],
        bounds=Bounds(np.zeros(size), high),
        integrality=np.append(np.full(D, float(is_integral)), np.zeros(size - D)),
        options={"node_limit": _MOST_NODES, "mip_rel_gap": 1e-3},
    )
    return found.x


def _rounded(
    worker_DK: np.ndarray, cost_K: np.ndarray, whole_D: np.ndarray, rest: int, load: float, unit: float
) -> np.ndarray:
    """Rounds the remainder to whole micro-batches, int64[D, K]: ``rest`` of them at each chunk."""
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
    # Each worker's load has to be below the last unit (free), within it, or above it (all that counts for the most).
    rows = np.concatenate([worker_DK.ravel(), rows_W, rows_W])
    columns = np.concatenate([np.arange(n), n + rows_W, np.full(W, n + 2 * W)])
    values = np.concatenate([cost_n, np.full(2 * W, -1.0)])
    within = coo_array((values, (rows, columns)), shape=(W, n + 2 * W + 1))
    found = milp(
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
    if found.x is not None:
        return np.rint(found.x[:n]).astype(int).reshape(D, K)
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
    """Strings routed chunks together to micro-batches that change pipelines seldom, int64[R, K]."""
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
