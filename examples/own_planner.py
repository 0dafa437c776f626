"""Plans a pipeline schedule with a custom planner, and compares it with built-in planners and the lower bound.

    python examples/own_planner.py

A planner decides which worker runs each micro-batch, and in which order a worker runs its forwards (F), input gradients
(B) and weight gradients (W). These determine the times. No JAX is needed. D: pipelines, M: micro-batches, P: stages.
"""

from dataclasses import dataclass

import numpy as np

from swift.schedules import Kind, Problem, Schedule, adaptive, lockstep, period, tight_bound, time_round, verify
from swift.topology import Topology


@dataclass(frozen=True)
class BreadthFirst:
    """A planner that runs all forwards of a worker before its backwards, and re-routes lost micro-batches in turn."""

    name = "breadth first"

    def plan(self, problem: Problem) -> Schedule:
        """Plans an iteration."""
        D, M, P = problem.num_pipelines, problem.num_microbatches, problem.num_stages
        executor_DMP = np.empty((D, M, P), np.int32)
        for d, m, p in np.ndindex(D, M, P):
            peers = problem.survivors[p]
            executor_DMP[d, m, p] = d if d in peers else peers[m % len(peers)]

        def order(pipeline: int, stage: int) -> list[tuple[Kind, int, int]]:
            mine = [(d, m) for m, d in np.ndindex(M, D) if executor_DMP[d, m, stage] == pipeline]
            return [(Kind.F, d, m) for d, m in mine] + [(kind, d, m) for d, m in mine for kind in (Kind.B, Kind.W)]

        orders = [order(pipeline, stage) for pipeline, stage in np.ndindex(D, P)]
        return Schedule.from_round(problem, self.name, time_round(problem, executor_DMP, orders))


def main() -> None:
    for failed in (frozenset(), frozenset({(1, 2)})):
        problem = Problem(Topology(3, 4), num_microbatches=6, failed=failed)
        print(f"{len(failed)} of 12 workers down; no schedule has a period below {tight_bound(problem):g}")
        for plan in (BreadthFirst().plan, lockstep, adaptive):
            schedule = plan(problem)
            verify(schedule)
            print(f"  {schedule.solver:14} {period(schedule):g}")


if __name__ == "__main__":
    main()
