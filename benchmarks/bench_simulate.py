"""The simulator: CPU time of large traces, and its figures next to those of the papers."""

import random
import sys
from typing import Any

from measure import cpu_seconds, publish

from swift.schedules.planners.baselines import one_f_one_b, zero_bubble
from swift.schedules.problem import Problem
from swift.schedules.schedule import period
from swift.simulate.engine import Outcome, simulate
from swift.simulate.job import Job
from swift.simulate.published import published
from swift.simulate.registry import STRATEGIES, CannotRun, strategies
from swift.simulate.traces import Event, Trace, evenly_spaced, poisson
from swift.topology import Topology

OF_JOB = STRATEGIES[:6]
HOSTS = Problem(Topology(4, 2, 8), 8)
"""64 GPUs: 8 workers of 8 expert ranks."""
AVERAGES = {  # samples/s of Bamboo, Varuna, Oobleck: Oobleck's artifact
    ("bert-large", "6h"): (77.0, 260.1, 287.1),
    ("bert-large", "30m"): (75.5, 232.8, 285.2),
    ("gpt3-medium", "6h"): (None, 29.5, 29.3),
    ("gpt3-medium", "30m"): (None, 27.9, 29.1),
    ("gpt3-6.7b", "6h"): (None, 4.15, 4.33),
    ("gpt3-6.7b", "30m"): (None, 1.06, 4.11),
}
REMOVALS = {  # seconds between removals, and which of 30 nodes goes: the artifact's traces
    "6h": (21600.0, (10, 14, 4, 16, 7, 28, 22, 17, 21, 26, 6, 24, 29, 25, 19)),
    "30m": (1800.0, (1, 13, 5, 23, 16, 21, 14, 20, 7, 4, 12, 3, 17, 25, 2)),
}


def run(job: Job, trace: Trace, names: tuple[str, ...], model: str | None = None) -> dict[str, Outcome]:
    """Simulates each strategy that can run."""
    found = strategies(job, trace, published(model) if model else None, names)
    return {one.name: simulate(one, trace) for one in found if not isinstance(one, CannotRun)}


def stated_case() -> dict[str, Any]:
    """Computes effective training time ratios of GPT-350M-16E on 64 GPUs by time between failures and repair time."""
    figures: dict[str, Any] = {}
    for minutes in (10, 30, 120):
        for repair_s in (0, 60, 300, 600):
            outcomes = run(Job(HOSTS), poisson(8, 60.0 * minutes, repair_s, 24 * 3600.0), OF_JOB)
            figures[f"{minutes} min, repair {repair_s} s"] = {name: round(o.ettr, 4) for name, o in outcomes.items()}
    trace = poisson(8, 600, 60, 24 * 3600.0)
    for k in (1, 16):
        job = Job(HOSTS, checkpoint_every=1, experts_per_checkpoint=k)
        figures[f"moc, 10 min, saving every iteration, K = {k}"] = round(run(job, trace, ("moc",))["moc"].ettr, 4)
    return figures


def removals(period_s: float, victims: tuple[int, ...]) -> Trace:
    """Builds a trace of the artifact, in which nodes are removed one at a time."""
    added = [Event(0.0, "add", f"node{number}") for number in range(1, 31)]
    removed = [Event(period_s * index, "remove", f"node{number}") for index, number in enumerate(victims, start=1)]
    return Trace((*added, *removed), period_s * len(victims))


def baselines() -> dict[str, dict[str, Any]]:
    """Compares simulated samples/s with those of the artifact."""
    figures = {}
    for (model, often), averages in AVERAGES.items():
        outcomes = run(Job(HOSTS), removals(*REMOVALS[often]), ("bamboo", "varuna", "oobleck"), model)
        for name, theirs in zip(("bamboo", "varuna", "oobleck"), averages, strict=True):
            if theirs is not None:
                ours = outcomes[name].samples_per_s or 0.0
                figures[f"{name}, {model}, {often}"] = {
                    "ours": round(ours, 3),
                    "published": theirs,
                    "off": round(ours / theirs - 1, 4),
                }
    return figures


def against_recycle() -> dict[str, dict[str, float]]:
    """Divides goodput by that of Oobleck and Bamboo, each relative to its fault-free throughput; 30 nodes.

    ``schedule`` is the gain of the planner's fault-free schedule over 1F1B, which is included in ReCycle's figures.
    """
    figures = {}
    for often, model, (D, P) in (
        ("6h", "gpt3-medium", (15, 2)),
        ("30m", "gpt3-medium", (15, 2)),
        ("6h", "gpt3-6.7b", (5, 6)),
        ("30m", "gpt3-6.7b", (5, 6)),
        ("6h", "bert-large", (5, 6)),
        ("30m", "bert-large", (5, 6)),
    ):
        problem = Problem(Topology(D, P), 2 * P)
        names = ("ideal", "adapt", "swift", "recycle", "oobleck", "bamboo")
        outcomes = run(Job(problem), removals(*REMOVALS[often]), names, model)
        row = {"schedule": period(one_f_one_b(problem)) / period(zero_bubble(problem))}
        row["adapt over the ideal"] = outcomes["adapt"].ettr / outcomes["ideal"].ettr
        for ours in ("swift", "recycle", "adapt"):
            for theirs in ("oobleck", "bamboo"):
                if theirs in outcomes:
                    row[f"{ours} over {theirs}"] = outcomes[ours].ettr / outcomes[theirs].ettr
        figures[f"{model}, {D} x {P}, {often}"] = {name: round(value, 3) for name, value in row.items()}
    return figures


def spot_trace(num_nodes: int, hours: float) -> Trace:
    """Builds a trace of spot instances: a few join or leave every ten minutes, and occasionally most leave at once."""
    source, time_s = random.Random(0), 0.0
    up, down = [f"node{index}" for index in range(num_nodes)], list[str]()
    events = [Event(0.0, "add", name) for name in up]
    while (time_s := time_s + source.expovariate(1 / 600)) < 3600 * hours:
        near = min(num_nodes, max(num_nodes // 2, len(up) + source.randint(-3, 3)))
        live = source.choice([num_nodes * 3 // 10] + 60 * [near])
        while len(up) > live:
            down.append(up.pop(source.randrange(len(up))))
            events.append(Event(time_s, "remove", down[-1]))
        while len(up) < live:
            up.append(down.pop())
            events.append(Event(time_s, "add", up[-1]))
    return Trace(tuple(events), 3600 * hours)


def seconds_of(job: Job, trace: Trace) -> dict[str, float]:
    """Measures CPU-seconds of every strategy, and of all strategies together."""
    figures = {}
    for name in OF_JOB:
        start = cpu_seconds()
        run(job, trace, (name,))
        figures[name] = round(cpu_seconds() - start, 2)
    return figures | {"all": round(sum(figures.values()), 2), "failures": trace.num_failures}


def main() -> int:
    case, compared = stated_case(), baselines()
    spot = seconds_of(Job(Problem(Topology(16, 4), 16)), spot_trace(64, 27))
    large = Job(Problem(Topology(64, 32, 8), 64), state_bytes=2.6e12, storage_bandwidth=2e11)
    many = seconds_of(large, poisson(2048, 1.8 * 3600, 3600, 1.8 * 3600 * 10_200))
    moc = case["moc, 10 min, saving every iteration, K = 16"]
    # docs/tools.md explains why that claim is missed.
    off = [abs(figure["off"]) for name, figure in compared.items() if name != "varuna, gpt3-6.7b, 30m"]
    return publish(
        "simulation",
        {
            "effective_training_time_ratio": case,
            "published_averages": compared,
            "over_oobleck_and_bamboo": against_recycle(),
            "removals_of_half_the_nodes": {
                name: round(outcome.ettr, 4)
                for name, outcome in run(Job(Problem(Topology(16, 2), 8)), evenly_spaced(32, 1800, 16), OF_JOB).items()
            },
            "seconds_27_hours_64_instances": spot,
            "seconds_10000_failures_16384_devices": many,
        },
        {
            "1 - Swift's ratio, 10 minutes between failures": (1 - case["10 min, repair 60 s"]["swift"], 0.06),
            "MoC's ratio beside the published 0.134": (abs(moc - 0.134), 0.05),
            "published averages, but for Varuna's of gpt3-6.7b at 30 m": (max(off), 0.05),
            "CPU-seconds for 27 hours of 64 instances": (spot["all"], 10.0),
            "CPU-seconds for 10,000 failures on 16,384 devices": (many["all"], 60.0),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
