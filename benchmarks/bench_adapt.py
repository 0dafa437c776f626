"""Plans after a failure: throughput over the live share, that no other way is better, and the time to plan."""

import argparse
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from children import tell
from measure import cpu_seconds, publish

from swift.schedules.adapt.choice import adapt, fault_free, recut, rerouted, with_roles_moved
from swift.schedules.adapt.layouts import BlockProblem
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.baselines import one_f_one_b, zero_bubble
from swift.schedules.problem import Chunk, Costs, Problem
from swift.schedules.rules import violations
from swift.schedules.schedule import period
from swift.simulate.engine import simulate
from swift.simulate.job import Job
from swift.simulate.published import published
from swift.simulate.registry import strategies
from swift.simulate.strategies import Adapting, Gaps
from swift.simulate.traces import evenly_spaced, poisson
from swift.topology import Topology, Worker

MEASURED = Costs(t_b=1.3, t_w=0.8, t_comm=0.1)
BLOCKS_A_STAGE = 4


def block_problem(D: int, P: int, M: int, costs: Costs, stashes: float | None, a_stage: int) -> BlockProblem:
    """Builds a planning problem of equal blocks."""
    blocks = tuple(Chunk.of_size(1 / a_stage, 1) for _ in range(P * a_stage))
    problem = Problem(Topology(D, P), M, costs=costs, num_iterations=2).limited(stashes)
    return BlockProblem(problem, blocks, (a_stage,) * P)


def failure_sets(D: int, P: int, number: int, count: int, source: random.Random) -> Iterator[frozenset[Worker]]:
    """Draws sets of failures that leave every stage a survivor."""
    while count:
        failed = frozenset(source.sample(Topology(D, P).workers, number))
        if all(any((d, p) not in failed for d in range(D)) for p in range(P)):
            count -= 1
            yield failed


def share(work: BlockProblem, failed: frozenset[Worker], reference: float) -> tuple[float, float]:
    """Throughput over the live share, and CPU-seconds of planning."""
    began = cpu_seconds()
    plan = recut(work, failed)
    took = cpu_seconds() - began
    assert plan is not None, failed
    return reference / plan.period / plan.ideal_throughput, took


def shares() -> dict[str, Any]:
    """Plans random failure sets of several sizes, and computes throughput over the live share."""
    source, found = random.Random(0), {}
    for name, costs, stashes in (("unit costs, no limit", Costs(), None), ("measured costs, limit P", MEASURED, 1.0)):
        for D, P in ((4, 8), (3, 4), (8, 4)):
            work = block_problem(D, P, 2 * P, costs, stashes and P * stashes, BLOCKS_A_STAGE)
            reference = fault_free(work).period
            for number in (1, 2, 3, 4) if (D, P) == (4, 8) else (1,):
                every = [frozenset({(1, p)}) for p in range(P)] if number == 1 else None
                sets = every or list(failure_sets(D, P, number, 16, source))
                results = [share(work, failed, reference) for failed in sets]
                found[f"{D} x {P}, {number} failed, {name}"] = {
                    "mean": statistics.mean(ratio for ratio, _ in results),
                    "worst": min(ratio for ratio, _ in results),
                    "re-routing, worst": min(
                        reference / rerouted(work, failed).period * D * P / (D * P - number) for failed in sets
                    ),
                    "seconds": max(seconds for _, seconds in results),
                }
                tell(f"{D} x {P}, {number} failed, {name}: {found[f'{D} x {P}, {number} failed, {name}']}")
    return found


def large() -> dict[str, float]:
    """Measures planning for one failure among 1,536 workers."""
    work = block_problem(24, 64, 128, Costs(), None, BLOCKS_A_STAGE)
    ratio, seconds = share(work, frozenset({(1, 32)}), fault_free(work).period)
    return {"worst": ratio, "seconds": seconds}


def random_problem(source: random.Random) -> tuple[BlockProblem, frozenset[Worker]]:
    """Draws a problem with random sizes, costs and memory, and a random set of failures."""
    D, P, a_stage = source.choice(((2, 2, 4), (3, 2, 2), (2, 4, 1), (3, 3, 2), (4, 3, 1), (2, 3, 3), (5, 2, 3)))
    costs = Costs(
        t_b=source.choice((1.0, 1.3)),
        t_w=source.choice((1.0, 0.7)),
        t_u=source.choice((0.0, 0.0, 0.4)),
        t_comm=source.choice((0.0, 0.1)),
        inbox=source.choice((0.0, 0.0, 0.2)),
    )
    limit = source.choice((None, P + 1.0, P + 2.0))
    work = block_problem(D, P, source.randint(P, 2 * P + 1), costs, limit, a_stage)
    return work, next(failure_sets(D, P, source.randint(1, min(3, D * P - P)), 1, source))


def whole_pipelines(work: BlockProblem, failed: frozenset[Worker]) -> float:
    """Computes the period with as many whole pipelines as the survivors can form."""
    D, P = work.problem.num_pipelines, work.problem.num_stages
    number = (D * P - len(failed)) // P
    each, more = divmod(work.problem.total_microbatches, number)
    numbers = tuple(each + (d < more) for d in range(number))
    return period(adaptive(replace(work.problem, topology=Topology(number, P), num_microbatches=numbers)))


def comparison(num_problems: int) -> dict[str, Any]:
    """Compares the chosen adaptation with every alternative on random problems."""
    source = random.Random(1)
    modes: dict[str, int] = {}
    over = {"re-routing": 0.0, "roles": 0.0, "whole pipelines": 0.0}
    invalid = 0
    for number in range(num_problems):
        work, failed = random_problem(source)
        plan = adapt(work, failed)
        modes[plan.mode] = modes.get(plan.mode, 0) + 1
        invalid += bool(violations(plan.schedule))
        for name, other in (
            ("re-routing", rerouted(work, failed).period),
            ("roles", with_roles_moved(work, failed).period),
            ("whole pipelines", whole_pipelines(work, failed)),
        ):
            over[name] = max(over[name], plan.period / other)
        if number % 100 == 99:
            tell(f"{number + 1} of {num_problems} problems: {modes}, {over}")
    return {"problems": num_problems, "modes": modes, "worst_over": over, "invalid": invalid}


def in_runs(num_problems: int) -> dict[str, float]:
    """Compares the lockstep periods that a run can have after random failures with the best of all plans."""
    source = random.Random(2)
    over_all, rerouting, stayed = list[float](), list[float](), 0
    for _ in range(num_problems):
        D, P = source.choice(((3, 4), (4, 4), (8, 4), (4, 8)))
        costs = source.choice((Costs(), Costs(t_b=1.3, t_w=0.8)))
        work = block_problem(D, P, 2 * P, costs, None, source.choice((1, 2, 4)))
        work = replace(work, problem=replace(work.problem, num_iterations=1))
        failed = next(failure_sets(D, P, source.randint(1, 4), 1, source))
        stays = rerouted(work, failed, in_lockstep=True).period
        roles = with_roles_moved(work, failed, in_lockstep=True).period
        anew, at_all = (recut(work, failed, in_lockstep=True, in_run=is_run) for is_run in (True, False))
        assert anew is not None, failed
        assert at_all is not None, failed
        in_run = min(stays, roles, anew.period)
        over_all.append(in_run / min(in_run, at_all.period))
        rerouting.append(stays / in_run)
        stayed += in_run >= stays * (1 - 1e-6)
    return {
        "mean over all plans": statistics.mean(over_all),
        "worst over all plans": max(over_all),
        "re-routing over it, mean": statistics.mean(rerouting),
        "share in which re-routing is as short": stayed / num_problems,
    }


def removals() -> dict[str, dict[str, float]]:
    """Simulates the removal of 14 of 30 nodes, one at a time, beside Oobleck according to its artifact's tables."""
    figures = {}
    for model, (D, P) in (("gpt3-medium", (15, 2)), ("gpt3-6.7b", (5, 6)), ("bert-large", (5, 6))):
        problem = Problem(Topology(D, P), 2 * P)
        gain = period(one_f_one_b(problem)) / period(zero_bubble(problem))
        for every_s in (21_600.0, 7_200.0, 1_800.0, 600.0):
            trace = evenly_spaced(30, every_s, 14)
            chosen = strategies(Job(problem), trace, published(model), ("adapt", "ideal", "oobleck"))
            ettr = {one.name: simulate(one, trace).ettr for one in chosen}
            figures[f"{model}, {D} x {P}, {every_s:g} s"] = ettr | {
                "over the ideal": ettr["adapt"] / ettr["ideal"],
                "over oobleck, with the schedule's gain": ettr["adapt"] / ettr["oobleck"] * gain,
            }
        tell(f"removals, {model}: {figures[f'{model}, {D} x {P}, 600 s']}")
    return figures


def over_oobleck(removed: dict[str, dict[str, float]], shape: str) -> list[float]:
    """Lists the gains over Oobleck in all rows of a shape."""
    return [row["over oobleck, with the schedule's gain"] for name, row in removed.items() if shape in name]


def fixed_choices() -> dict[str, float]:
    """Divides the ETTR of the choice by that of the best fixed mode, by time between failures and time to return."""
    job, figures = Job(Problem(Topology(4, 8), 16)), {}
    (one,) = strategies(job, poisson(32, 600.0, 60.0, 6_000.0), names=("adapt",))
    assert isinstance(one, Adapting)
    for mtbf_s in (600.0, 3_600.0, 21_600.0, 86_400.0):
        for repair_s in (60.0, 600.0, 7_200.0, 1e7):
            # Without returns, the trace ends when a third of the workers is lost.
            trace = poisson(32, mtbf_s, repair_s, 10 * mtbf_s if repair_s > 1e6 else max(86_400.0, 10 * mtbf_s))
            ways = (replace(one, gaps=Gaps.of(trace), way=way) for way in ("auto", "reroute", "recut"))
            chosen, *fixed = (simulate(way, trace).ettr for way in ways)
            figures[f"{mtbf_s:g} s, back after {repair_s:g} s"] = chosen / max(fixed)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=1_000, help="random problems (default: %(default)s)")
    options = parser.parse_args()
    found, big, removed, chosen = shares(), large(), removals(), fixed_choices()
    compared, in_run = comparison(options.problems), in_runs(options.problems // 4)

    def lack(name: str, key: str) -> float:
        return 1 - found[name][key]

    unit, measured = "unit costs, no limit", "measured costs, limit P"
    of_several = [found[f"4 x 8, {number} failed, {unit}"] for number in (1, 2, 3, 4)]
    claims = {
        "4 x 8, one failed, lack of the live share": (lack(f"4 x 8, 1 failed, {unit}", "worst"), 0.03),
        "3 x 4, one failed": (lack(f"3 x 4, 1 failed, {unit}", "worst"), 0.05),
        "8 x 4, one failed": (lack(f"8 x 4, 1 failed, {unit}", "worst"), 0.05),
        "24 x 64, one failed": (1 - big["worst"], 0.01),
        "4 x 8, one to four failed, mean": (1 - statistics.mean(one["mean"] for one in of_several), 0.05),
        "4 x 8, one to four failed, worst": (1 - min(one["worst"] for one in of_several), 0.10),
        "4 x 8, one failed, measured costs": (lack(f"4 x 8, 1 failed, {measured}", "worst"), 0.06),
        "seconds for 32 workers": (max(one["seconds"] for name, one in found.items() if name[0] == "4"), 1.0),
        "seconds for 1,536 workers": (big["seconds"], 15.0),
        "period over the best other way, worst of the random problems": (
            max(compared["worst_over"].values()),
            1 + 1e-6,
        ),
        "removals of 30 nodes, lack of the ideal": (1 - min(row["over the ideal"] for row in removed.values()), 0.05),
        "Oobleck over it, 15 x 2": (1 / min(over_oobleck(removed, "15 x 2")), 1 / 1.15),
        "Oobleck over it, 5 x 6": (1 / min(over_oobleck(removed, "5 x 6")), 1 / 1.3),
        "best fixed choice over it": (1 / min(chosen.values()), 1 / 0.99),
        "periods of a run over those of all plans, mean": (in_run["mean over all plans"], 1.01),
        "invalid plans": (float(compared["invalid"]), 0.0),
    }
    figures = {"shares": found, "1,536 workers": big, "removals": removed, "over fixed choices": chosen}
    figures |= {"comparison": compared, "in runs": in_run}
    return publish("plans after a failure: throughput over the live share", figures, claims)


if __name__ == "__main__":
    sys.exit(main())
