"""The planner: time and memory by size, gaps between its periods and the lower bound, and the cost of lockstep."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from measure import cpu_seconds, publish

from swift.schedules.bounds import lower_bound, tight_bound
from swift.schedules.lowering.lower import lower
from swift.schedules.lowering.ticks import assign_ticks, lockstep_period
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.lockstep import lockstep
from swift.schedules.plans.normalize import num_plans
from swift.schedules.problem import Costs, Problem
from swift.schedules.schedule import period
from swift.topology import Topology

MEASURED = Costs(t_f=1.0, t_b=1.3, t_w=0.8, t_u=0.4, t_comm=0.1)
SIZES = {  # pipelines, stages, micro-batches
    "32 workers": (4, 8, 32),
    "384 workers": (24, 16, 64),
    "768 workers": (24, 32, 64),
    "1536 workers": (24, 64, 64),
}
LIMITS = {"none": None, "1.5P": 1.5, "P": 1.0}


def failure_sets(num_pipelines: int, num_stages: int) -> dict[str, frozenset]:
    """Builds failure sets of no worker, one worker, and one worker in a hundred, in different stages."""
    percent = max(2, num_pipelines * num_stages // 100)
    return {
        "no failure": frozenset(),
        "one failure": frozenset({(1, num_stages // 3)}),
        "many failures": frozenset((7 * i % num_pipelines, 5 * i % num_stages) for i in range(percent)),
    }


def planning() -> dict[str, Any]:
    """Measures planning time in seconds, and gaps to the bounds, for every size."""
    figures = {}
    for size, (D, P, M) in SIZES.items():
        for failures, failed in failure_sets(D, P).items():
            for costs in (Costs(), MEASURED):
                problem = Problem(Topology(D, P), M, failed, costs, memory_limit=float(P))
                start = cpu_seconds()
                schedule = adaptive(problem)
                figures[f"{size}, {failures}, {'unit' if costs == Costs() else 'measured'} costs"] = {
                    "seconds": round(cpu_seconds() - start, 3),
                    "ops": schedule.num_ops,
                    **gap(problem, period(schedule)),
                }
    return figures


def gap(problem: Problem, found: float) -> dict[str, float]:
    """Computes the gaps between a period and the two lower bounds."""
    over = {"gap": lower_bound(problem), "gap_to_tight_bound": tight_bound(problem)}
    return {name: round(found / bound - 1, 4) for name, bound in over.items()}


def peak_bytes_per_op() -> dict[str, float]:
    """Measures the peak memory per op of a process that plans one failure, less that of a trivial plan (Linux)."""
    program = (
        "import json, sys\n"
        "from swift.schedules import Problem, adaptive\n"
        "from swift.topology import Topology\n"
        "D, P, M = json.loads(sys.argv[1])\n"
        "ops = adaptive(Problem(Topology(D, P), M, frozenset({(1, 0)}))).num_ops\n"
        # Not ru_maxrss, which includes the parent before exec.
        "peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(int(peak) * 1024, ops)\n"
    )

    def peak(size: tuple[int, int, int]) -> tuple[int, int]:
        command = [sys.executable, "-c", program, json.dumps(size)]
        bytes_, ops = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        return int(bytes_), int(ops)

    base, _ = peak((2, 1, 1))
    measured = {name: peak(size) for name, size in SIZES.items() if size[0] == 24}
    return {name: round((bytes_ - base) / ops, 1) for name, (bytes_, ops) in measured.items()}


def small_problems(factor: int, limit: float | None) -> Iterator[Problem]:
    """Yields problems with unit costs, no failure or any single one, D in 2, 3, 4 and P in 2, 4, 8."""
    for D in (2, 3, 4):
        for P in (2, 4, 8):
            for failed in [frozenset(), *(frozenset({(0, p)}) for p in range(P))]:
                memory_limit = None if limit is None else limit * P
                yield Problem(Topology(D, P), factor * P, failed, memory_limit=memory_limit)


def gaps() -> dict[str, dict[str, float]]:
    """Computes mean and worst gaps to the bounds, by memory limit and number of micro-batches."""
    figures = {}
    for name, limit in LIMITS.items():
        for factor in (2, 1):
            found = [gap(problem, period(adaptive(problem))) for problem in small_problems(factor, limit)]
            figures[f"limit {name}, M = {factor}P"] = {
                f"{label} {key}": round(pick([one[key] for one in found]), 4)
                for key in found[0]
                for label, pick in (("mean", statistics.fmean), ("worst", max))
            }
    return figures


def in_lockstep() -> dict[str, dict[str, float]]:
    """Computes the cost of lockstep ticks, and of their ops alone, for lockstep plans; M = 2P, no memory limit."""
    ratios: dict[str, list[float]] = {"ops and messages": [], "ops": []}
    silent = replace(MEASURED, t_comm=0.0)
    for problem in small_problems(2, None):
        schedule = lockstep(replace(problem, costs=MEASURED, num_iterations=4))
        own, tick_n = period(schedule), assign_ticks(schedule)
        without = replace(schedule, problem=replace(schedule.problem, costs=silent))
        ratios["ops and messages"].append(lockstep_period(schedule, tick_n) / own)
        ratios["ops"].append(lockstep_period(without, tick_n) / own)
    return {
        name: {"mean": round(statistics.fmean(found), 4), "worst": round(max(found), 4)}
        for name, found in ratios.items()
    }


def permutations() -> dict[str, dict[str, list[int]]]:
    """Counts distinct permutations of activations and gradients, without failures and with one in each stage."""
    figures: dict[str, dict[str, list[int]]] = {}
    for problem in small_problems(2, None):
        table = lower(adaptive(problem))
        name = f"{problem.num_pipelines} x {problem.num_stages}"
        by_direction = figures.setdefault(name, {"activations": [], "gradients": []})
        by_direction["activations"].append(len(table.activations.permutations))
        by_direction["gradients"].append(len(table.gradients.permutations))
    return figures


def to_prepare() -> dict[str, dict[str, int]]:
    """Counts plans by the number of failures, with fixed and with movable roles."""
    figures = {}
    for D, P in ((4, 8), (24, 64)):
        for most in (1, 2, 4):
            counts = {"roles stay": num_plans(Topology(D, P), most)}
            counts["roles move"] = num_plans(Topology(D, P), most, move_roles=True)
            figures[f"{D} x {P}, up to {most} failures"] = counts
    return figures


def main() -> int:
    plans, table, memory, ticks = planning(), gaps(), peak_bytes_per_op(), in_lockstep()

    def slowest(size: str) -> float:
        return max(plan["seconds"] for name, plan in plans.items() if name.startswith(size))

    return publish(
        "planning: CPU-seconds, bytes of peak memory by op, gaps to the lower bounds",
        {
            "plans": plans,
            "peak_bytes_per_op": memory,
            "gaps": table,
            "lockstep_period_over_period": ticks,
            "permutations": permutations(),
            "plans_to_prepare": to_prepare(),
        },
        {
            "seconds for 32 workers, M = 32": (slowest("32 workers"), 1.0),
            "seconds for 1,536 workers, M = 64": (slowest("1536 workers"), 10.0),
            "lockstep period over period": (ticks["ops and messages"]["worst"], 1.15),
            "the same, ops alone": (ticks["ops"]["worst"], 1.1),
            "peak bytes per op, 1,536 over 384 workers": (memory["1536 workers"] / memory["384 workers"], 1.1),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
