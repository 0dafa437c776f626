"""Gain of ops of fewer blocks than a stage has, against the ticks that they add.

Plans of one cut, every stage divided into chunks of at most so many blocks, for an SPMD program whose ticks take as
long as their longest op. ``period``: of ``lockstep``, over the period with a stage as one chunk, ticks at no cost.
``ticks``: of an iteration. ``break_even``: cost of a tick, in times of F of one block, at which both programs take
equally long; 0 where smaller ops gain nothing. Prints JSON.
"""

import json
from collections.abc import Sequence
from itertools import product

from swift.pipeline.reconfigure.configuration import Plan
from swift.schedules.problem import Chunk, Costs, Problem
from swift.schedules.registry import plan_with
from swift.topology import Topology, Worker

CASES: dict[str, tuple[int, tuple[int, ...], int, frozenset[Worker]]] = {
    "7 blocks, 2 x 4, M = 8": (2, (2, 2, 2, 1), 8, frozenset()),
    "16 blocks, 2 x 4, M = 8": (2, (4, 4, 4, 4), 8, frozenset()),
    "16 blocks, 2 x 4, M = 8, 0:2 down": (2, (4, 4, 4, 4), 8, frozenset({(0, 2)})),
    "16 blocks as (5, 4, 4, 3), 2 x 4, M = 8": (2, (5, 4, 4, 3), 8, frozenset()),
    "43 blocks, 2 x 8, M = 16": (2, (6, 6, 6, 5, 5, 5, 5, 5), 16, frozenset()),
    "32 blocks, 4 x 8, M = 16, 0:3 down": (4, (4,) * 8, 16, frozenset({(0, 3)})),
    "61 blocks, 2 x 16, M = 32": (2, (4,) * 13 + (3,) * 3, 32, frozenset()),
}
"""Pipelines, blocks of each stage, micro-batches, workers down."""
COSTS = {"unit": Costs(), "1, 1.3, 0.8, 0.1": Costs(t_b=1.3, t_w=0.8, t_comm=0.1)}


def parts(size: int, most: int) -> list[int]:
    """Divides blocks into as few chunks of at most ``most`` as there can be, as evenly as possible."""
    number = -(-size // most)
    return [size // number + (part < size % number) for part in range(number)]


def planned(
    num_pipelines: int, cut: Sequence[int], num_microbatches: int, failed: frozenset[Worker], costs: Costs, most: int
) -> tuple[float, float]:
    """Plans with ops of at most ``most`` blocks; returns the period, in times of F of one block, and its ticks."""
    mean = sum(cut) / len(cut)
    chunks = [(stage, size) for stage, blocks in enumerate(cut) for size in parts(blocks, most)]
    problem = Problem(
        Topology(num_pipelines, len(cut)),
        num_microbatches,
        failed,
        costs,
        num_iterations=3,
        chunks=tuple(Chunk.of_size(size / mean, size) for _, size in chunks),
        stage_of_chunk=(tuple(stage for stage, _ in chunks),) * num_pipelines,
    )
    plan = Plan.of(plan_with("lockstep", problem))
    return plan.period * mean, len(plan.table.opcode_TR) / problem.num_iterations


def main() -> None:
    found: dict[str, dict[str, float]] = {}
    for (case, (*problem, failed)), (name, costs) in product(CASES.items(), COSTS.items()):
        cut = problem[1]
        whole, few = planned(*problem, failed, costs, max(cut))
        for most in sorted({1, 2} - {max(cut)}, reverse=True):
            period, ticks = planned(*problem, failed, costs, most)
            key = f"{case}, {name}, at most {most} blocks an op"
            found[key] = {
                "period": round(period / whole, 4),
                "ticks": round(ticks),
                "ticks_with_stages": round(few),
                "break_even": round(max(0.0, (whole - period) / (ticks - few)), 4) if ticks > few else 0.0,
            }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
