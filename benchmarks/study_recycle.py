"""ReCycle's figures (arXiv 2405.14009), planned and simulated: ablation, throughput under failures, traces, scale.

Figures are relative to the same strategy without failures, or to 1F1B where stated; no accelerator is needed.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import publish

from swift.schedules.bounds import lower_bound, tight_bound
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.baselines import one_f_one_b, zero_bubble
from swift.schedules.plans.normalize import canonical, spread
from swift.schedules.problem import Problem
from swift.schedules.schedule import period
from swift.simulate.engine import simulate
from swift.simulate.job import Job
from swift.simulate.published import published
from swift.simulate.registry import CannotRun, strategies
from swift.simulate.traces import Trace, evenly_spaced, poisson, read_trace
from swift.topology import Topology

OF_JOB = ("ideal", "adapt", "swift", "recycle", "memory", "moc", "full")
PUBLISHED = ("ideal", "adapt", "swift", "recycle", "oobleck", "varuna", "bamboo")
SHAPES_OF_32 = ((16, 2), (8, 4), (4, 8))
"""Pipelines and stages, chosen here; 128 micro-batches in all."""
SHAPES_OF_30 = {"gpt3-medium": (15, 2), "gpt3-6.7b": (5, 6), "bert-large": (5, 6)}
"""Shapes for the models with figures in Oobleck's artifact; M = 2P."""
FAILURES = 100
"""Approximate number of failures of a random trace; a trace of one day would have four at 6 h."""
INTERVALS_S = {"6 h": 21600.0, "2 h": 7200.0, "30 min": 1800.0, "10 min": 600.0}
SCALES = {256: (32, 8), 512: (32, 16), 1024: (32, 32), 1536: (24, 64)}
"""Devices -> pipelines and stages, one device per worker; the paper does not give its shapes."""
PLANNED_WORKERS = 256
"""Number of workers above which the tight bound replaces the planner's period, as in ``swift simulate``."""


def ablation() -> dict[str, Any]:
    """Periods with one failure by its stage, for combinations of the three techniques, in units of tF = tB = tW."""
    figures = {}
    for shape, num_microbatches in (((3, 4), 6), ((4, 4), 8), ((4, 8), 16), ((8, 4), 16)):
        whole = Problem(Topology(*shape), num_microbatches)
        failed = [replace(whole, failed=frozenset({(shape[0] - 1, stage)})) for stage in range(shape[1])]
        variants = {
            "re-routed": [replace(problem, decoupled=False, staggered=False) for problem in failed],
            "decoupled": [replace(problem, staggered=False) for problem in failed],
            "decoupled, staggered": failed,
        }
        figures[f"{shape[0]} x {shape[1]}, M = {num_microbatches}"] = {
            "no failure": {"1F1B": period(one_f_one_b(whole)), "decoupled, staggered": period(zero_bubble(whole))},
            "periods by failed stage": {name: [period(adaptive(one)) for one in of] for name, of in variants.items()},
            "lower bounds": [lower_bound(problem) for problem in failed],
        }
    return {"ablation": figures}


def ratios(job: Job, trace: Trace, names: tuple[str, ...] = OF_JOB, model: str | None = None) -> dict[str, Any]:
    """Computes the effective training time ratio of every strategy; None where it cannot run."""
    found = strategies(job, trace, published(model) if model else None, names)
    return {one.name: None if isinstance(one, CannotRun) else round(simulate(one, trace).ettr, 4) for one in found}


def failures() -> dict[str, Any]:
    """Computes throughput relative to that without failures, for failures with and without repair.

    ``of_job`` is on 32 workers; ``published`` on the 30 nodes of Oobleck's artifact, 14 of which go, with its figures
    of Oobleck, Varuna and Bamboo.
    """
    of_job: list[dict[str, Any]] = []
    for D, P in SHAPES_OF_32:
        job, shape = Job(Problem(Topology(D, P), 128 // D)), f"{D} x {P}"
        for name, interval_s in INTERVALS_S.items():
            trace = poisson(32, interval_s, 600.0, FAILURES * interval_s)
            of_job.append({"shape": shape, "every": name, "back": "after 10 min", "ratios": ratios(job, trace)})
        trace = evenly_spaced(32, 1800.0, 8)
        of_job.append({"shape": shape, "every": "30 min", "back": "never, 8 in all", "ratios": ratios(job, trace)})
    compared = []
    for model, (D, P) in SHAPES_OF_30.items():
        job = Job(Problem(Topology(D, P), 2 * P))
        for name, interval_s in INTERVALS_S.items():
            found = ratios(job, evenly_spaced(30, interval_s, 14), PUBLISHED, model)
            compared.append({"model": model, "shape": f"{D} x {P}", "every": name, "ratios": found})
    return {"of_job": of_job, "published": compared}


def period_of(problem: Problem) -> float:
    """Period of a plan; for a large problem, the tight bound."""
    small = problem.num_pipelines * problem.num_stages <= PLANNED_WORKERS
    return period(adaptive(problem)) if small else tight_bound(problem)


def scale() -> dict[str, Any]:
    """Computes throughput with 1, 5 and 10 % failed devices relative to that without failures, and the live share.

    The failures are spread over the stages by ReCycle's dynamic program. ``over_1f1b`` has 1F1B without failures as
    its base, as the paper does; the other one the planner's own schedule without failures.
    """
    figures: dict[str, Any] = {}
    for num_devices, (D, P) in SCALES.items():
        whole = Problem(Topology(D, P), 2 * P)
        without, plain = period_of(whole), period(one_f_one_b(whole.single_pipeline()))
        for percent in (1, 5, 10):
            down = round(num_devices * percent / 100)
            with_failures = period_of(canonical(whole, spread(whole, down)))
            figures[f"{num_devices} devices, {percent} %"] = {
                "pipelines x stages": f"{D} x {P}",
                "fault_scaled": round(1 - down / num_devices, 4),
                "throughput": round(without / with_failures, 4),
                "over_1f1b": round(plain / with_failures, 4),
            }
    return {"scale": figures}


def traces(paths: list[Path]) -> dict[str, Any]:
    """Computes effective training time ratios on recorded traces, with four stages and as many pipelines as fit."""
    figures = {}
    for path in paths:
        trace = read_trace(path, lambda line: print(line, file=sys.stderr))
        topology = Topology(trace.most_nodes // 4, 4)
        figures[path.stem] = {
            "pipelines x stages": f"{topology.num_pipelines} x 4",
            "hours": round(trace.horizon_s / 3600, 1),
            "most_nodes": trace.most_nodes,
            "removals": trace.num_failures,
            "ratios": ratios(Job(Problem(topology, 16)), trace),
        }
    return {"traces": figures}


def claims_of(figures: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Makes the claims of a study: ReCycle's example, no strategy ahead of ``adapt``, the live share at scale."""
    if "ablation" in figures:
        example = figures["ablation"]["3 x 4, M = 6"]["periods by failed stage"]["decoupled, staggered"]
        return {"worst period of ReCycle's example": (max(example), 27)}
    if "scale" in figures:
        behind = max(row["fault_scaled"] / row["throughput"] for row in figures["scale"].values())
        return {"live share over the planned throughput, worst scale": (round(behind, 4), 1.08)}
    alike = [row["ratios"] for row in (*figures.get("of_job", ()), *figures.get("traces", {}).values())]
    others = [max(row[name] for name in row if name not in ("ideal", "adapt")) / row["adapt"] for row in alike]
    rows = alike + [row["ratios"] for row in figures.get("published", ())]
    return {
        "best other strategy of the same job over `adapt`, worst row": (round(max(others), 4), 1.0),
        "ideal over `adapt`, worst row": (round(max(row["ideal"] / row["adapt"] for row in rows), 4), 1.0526),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=["ablation", "failures", "scale", "traces"])
    parser.add_argument("--trace", type=Path, nargs="+", default=[], help="files, for 'traces'")
    options = parser.parse_args()
    studies = {"ablation": ablation, "failures": failures, "scale": scale, "traces": lambda: traces(options.trace)}
    figures = studies[options.study]()
    return publish(f"recycle, {options.study}", figures, claims_of(figures))


if __name__ == "__main__":
    sys.exit(main())
