"""Two runs of blocks a worker: periods of the planner ``v`` over those of published orders, in the same memory.

The orders are those of ``v_orders``, timed by this project's clock, which starts every op as early as its worker's
order allows. ``v`` gets the memory that the order takes, and a half and a third of 1F1B's, where it is compared with
the best order that fits. With a worker down it is compared with the planner ``adaptive`` of one run of blocks a worker.

D pipelines, P stages, M micro-batches.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from measure import cpu_seconds, publish
from v_orders import ORDERS, Op, interleaved, zbv_by_times

from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.v import v
from swift.schedules.problem import Costs, Problem
from swift.schedules.registry import with_chunk_shape
from swift.schedules.schedule import Schedule, peak_memory, period
from swift.schedules.sequences import time_round
from swift.topology import Topology

COSTS = {"unit": Costs(), "1, 1.3, 0.8, 0.1": Costs(1.0, 1.3, 0.8, 0.0, 0.1)}
SHARES = {"1F1B's memory": 1.0, "a half": 1 / 2, "a third": 1 / 3}


def timed(problem: Problem, order: list[list[Op]]) -> Schedule:
    """Times an order by this project's clock."""
    executor_DMP = np.zeros((1, problem.most_microbatches, problem.num_chunks), np.int32)
    return Schedule.from_round(problem, "", time_round(problem, executor_DMP, order))


def published(problem: Problem, limit: float) -> dict[str, Schedule]:
    """Times all published orders; the one that its authors plan by times and memory is planned for ``limit``."""
    P, M = problem.num_stages, problem.most_microbatches
    (f, b, w, _), stash_2P = problem.time_4P[:, 0].tolist(), problem.stash_2P
    found = dict(_orders(P, M))
    found["ZB-V by times"] = zbv_by_times(P, M, (f, b, w, problem.costs.t_comm), tuple(stash_2P[:, 0]), limit)
    return {name: timed(problem, order) for name, order in found.items() if order is not None}


@cache
def _orders(P: int, M: int) -> dict[str, list[list[Op]] | None]:
    return {name: order(P, M) for name, order in ORDERS.items()}


def without_failure(P: int, M: int, costs: Costs, staggered: bool) -> dict[str, dict[str, float]]:
    """Compares ``v`` with each order in that order's memory, and with the best order in shares of 1F1B's memory."""
    plain = Problem(Topology(1, P), M, costs=costs, staggered=staggered)
    problem, found = with_chunk_shape("v", plain), {}

    def plan(limit: float) -> dict[str, float]:
        started = cpu_seconds()
        ours = period(v(replace(problem, memory_limit=limit)))
        return {"period": ours, "seconds": cpu_seconds() - started}

    plans = {limit: plan(limit) for limit in {max(1.0, share * P) for share in SHARES.values()}}
    for name, theirs in published(problem, P).items():
        memory = float(peak_memory(theirs).max())
        plans[memory] = plans.get(memory) or plan(memory)
        found[name] = {"memory": memory, "over it": plans[memory]["period"] / period(theirs), **plans[memory]}
    looped = replace(problem, stage_of_chunk=((*range(P), *range(P)),), decoupled=False, staggered=False)
    theirs = timed(looped, interleaved(P, M) or [])
    memory = float(peak_memory(theirs).max())
    found["interleaved 1F1B"] = {"memory": memory, "over it": plans[float(P)]["period"] / period(theirs)}
    for name, share in SHARES.items():
        limit = max(1.0, share * P)
        orders = published(problem, limit).items()
        fit = {order: period(s) for order, s in orders if peak_memory(s).max() <= limit * (1 + 1e-9)}
        one_run = period(adaptive(replace(plain, memory_limit=limit)))
        found[name] = {"memory": limit, "over one run a worker": plans[limit]["period"] / one_run, **plans[limit]}
        if fit:
            found[name] |= {"over it": plans[limit]["period"] / min(fit.values()), "it": min(fit, key=fit.__getitem__)}
    return found


def with_failure(D: int, P: int, M: int, costs: Costs, share: float | None) -> dict[str, float]:
    """Compares ``v`` with one run per worker, with a worker of the first, middle or last stage down."""
    limit, found = None if share is None else share * P, {}
    for stage in (0, P // 2, P - 1):
        plain = Problem(Topology(D, P), M, frozenset({(0, stage)}), costs, limit)
        found[f"stage {stage}"] = period(v(with_chunk_shape("v", plain))) / period(adaptive(plain))
    return found


def cells() -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """Yields the comparisons without a failure."""
    for P, times, (name, costs), staggered in itertools.product((4, 8, 16), (1, 2, 4), COSTS.items(), (True, False)):
        cell = f"P = {P}, M = {times * P}, {name}{'' if staggered else ', barrier'}"
        yield cell, without_failure(P, times * P, costs, staggered)


def main() -> int:
    alone = dict(cells())
    lost = {
        f"D = {D}, P = {P}, M = {2 * P}, {name}, {label}": with_failure(D, P, 2 * P, costs, share)
        for D, P, (name, costs), (label, share) in itertools.product(
            (2, 4), (4, 8), COSTS.items(), {"no limit": None, "1F1B's memory": 1.0, "a half": 0.5}.items()
        )
    }
    rows: list[tuple[str, dict[str, Any]]] = [
        (cell, row) for cell, of_orders in alone.items() for row in of_orders.values()
    ]

    def worst(figures: list[float]) -> float:
        return round(max(figures), 9)

    return publish(
        "two runs of blocks a worker",
        {"without a failure, over published orders": alone, "with one, over one run a worker": lost},
        {
            "period over that of any published order in its memory": (
                worst([r.get("over it", 0) for _, r in rows]),
                1.0,
            ),
            "with a failure, over one run a worker, in 1F1B's memory or more": (
                worst([x for cell, of in lost.items() if "half" not in cell for x in of.values()]),
                1.0,
            ),
            "seconds, P = 8, M = 16": (
                worst([r.get("seconds", 0) for cell, r in rows if cell.startswith("P = 8, M = 16,")]),
                3.0,
            ),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
