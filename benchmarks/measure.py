"""What all benchmarks share: the machine's name, CPU-seconds, runs paired in one process, one JSON document.

CPU-seconds, not wall time: emulated devices share the host's cores, and other programs use them too.
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

from swift.experts.placement import PlacementPolicy
from swift.models import model_size
from swift.pipeline import StepSpec, TrainState, put_batch, single_worker_step
from swift.train import Experiment


def machine() -> dict[str, Any]:
    """The machine that a figure was measured on."""
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
        name: what was measured.
        figures: what came of it.
        claims: figures that may not be larger than a limit, as (figure, limit).

    Returns:
        The exit code: 1 where a claim does not hold on this machine.
    """
    assert claims, "a benchmark that claims nothing cannot fail"
    judged = {
        claim: {"figure": figure, "limit": limit, "holds": figure <= limit} for claim, (figure, limit) in claims.items()
    }
    print(json.dumps({"benchmark": name, "machine": machine(), **figures, "claims": judged}))
    return int(not all(claim["holds"] for claim in judged.values()))


def cpu_seconds() -> float:
    """CPU-seconds of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cost_of(call: Callable[[], Any]) -> float:
    """CPU-seconds of one call, waited for."""
    start = cpu_seconds()
    jax.block_until_ready(call())
    return cpu_seconds() - start


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """The names in every round, each of which starts with another one."""
    for turn in range(rounds):
        first = turn % len(names)
        yield from (*names[first:], *names[:first])


def paired_costs(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of every call in every round; the calls take turns, and each round starts with another one."""
    costs: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for name in turns(list(calls), rounds):
        costs[name].append(cost_of(calls[name]))
    return costs


def ratio(costs: dict[str, list[float]], over: str, under: str) -> dict[str, float]:
    """The median of the rounds' ratios, and the quartiles."""
    ratios = [a / b for a, b in zip(costs[over], costs[under], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}


def demo(policy: PlacementPolicy, layout: str, num_sequences: int = 16) -> Experiment:
    """The demo's experiment with a policy and an optimizer layout, and perhaps more sequences in a batch."""
    experiment = Experiment(model=model_size("demo"), placement=policy, sequences_per_microbatch=num_sequences)
    return replace(experiment, optimizer=replace(experiment.optimizer, layout=layout))


class Trainee:
    """An experiment under way, stepped by hand."""

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self.spec: StepSpec = experiment.step_spec()
        self.state: TrainState = self.spec.init(jax.random.key(experiment.seed))
        self.step = single_worker_step(self.spec)
        loader = experiment.loader("train")
        self.batches = [put_batch(loader.batch(i), self.spec.live) for i in range(16)]
        self.count = 0

    def __call__(self) -> Any:
        """One iteration; returns its metrics."""
        self.state, metrics = self.step(self.state, self.batches[self.count % len(self.batches)])
        self.count += 1
        return jax.block_until_ready(metrics)


def median(values: Sequence[float]) -> float:
    """The median, in seconds, rounded to microseconds."""
    return round(statistics.median(values), 6)
