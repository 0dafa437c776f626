"""Helpers for benchmarks: machine facts, CPU-seconds, paired runs in one process, and the JSON document to print.

Benchmarks measure CPU-seconds rather than wall time, since emulated devices and other programs share the host's cores.
"""

import json
import os
import platform
import resource
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from swift.config.experiment import Experiment
from swift.experts.placement.policy import PlacementPolicy
from swift.models.config import model_size
from swift.pipeline.state import TrainState
from swift.pipeline.step.single_worker import put_batch, single_worker_step
from swift.pipeline.step.spec import StepSpec
from swift.train.build import make_loader, make_step_spec


def machine() -> dict[str, Any]:
    """Describes the machine that a benchmark runs on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def publish(name: str, figures: dict[str, Any], claims: dict[str, tuple[float, float]]) -> int:
    """Prints the benchmark's one JSON document.

    Args:
        name: name of the benchmark.
        figures: results by name.
        claims: (figure, limit) pairs by name; a claim holds if the figure does not exceed the limit.

    Returns:
        The exit code: 1 if a claim does not hold on this machine.
    """
    assert claims, "a benchmark that claims nothing cannot fail"
    judged = {
        claim: {"figure": figure, "limit": limit, "holds": figure <= limit} for claim, (figure, limit) in claims.items()
    }
    print(json.dumps({"benchmark": name, "machine": machine(), **figures, "claims": judged}))
    return int(not all(claim["holds"] for claim in judged.values()))


def cpu_seconds() -> float:
    """Returns the CPU-seconds of all threads of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cost_of(call: Callable[[], Any]) -> float:
    """Measures CPU-seconds of one call, including its asynchronous work."""
    start = cpu_seconds()
    jax.block_until_ready(call())
    return cpu_seconds() - start


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Yields the names for every round, rotated by one each time."""
    for turn in range(rounds):
        first = turn % len(names)
        yield from (*names[first:], *names[:first])


def paired_costs(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Measures CPU-seconds of every call in every round; the calls take turns, in rotated order."""
    costs: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for name in turns(list(calls), rounds):
        costs[name].append(cost_of(calls[name]))
    return costs


def ratio(costs: dict[str, list[float]], over: str, under: str) -> dict[str, float]:
    """Computes the median and the quartiles of the rounds' cost ratios ``over`` / ``under``."""
    ratios = [a / b for a, b in zip(costs[over], costs[under], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}


def demo(policy: PlacementPolicy, layout: str, num_sequences: int = 16) -> Experiment:
    """Builds the demo's experiment with a policy, an optimizer layout and a batch size."""
    experiment = Experiment(model=model_size("demo"), placement=policy, sequences_per_microbatch=num_sequences)
    return replace(experiment, optimizer=replace(experiment.optimizer, layout=layout))


class Trainee:
    """An experiment that is stepped explicitly."""

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self.spec: StepSpec = make_step_spec(experiment)
        self.state: TrainState = self.spec.init(jax.random.key(experiment.seed))
        self.step = single_worker_step(self.spec)
        loader = make_loader(experiment, "train")
        self.batches = [put_batch(loader.batch(i), self.spec.live) for i in range(16)]
        self.count = 0

    def __call__(self) -> Any:
        """Runs one iteration and returns its metrics."""
        self.state, metrics = self.step(self.state, self.batches[self.count % len(self.batches)])
        self.count += 1
        return jax.block_until_ready(metrics)


def median(values: Sequence[float]) -> float:
    """Returns the median of durations in seconds, rounded to microseconds."""
    return round(statistics.median(values), 6)
