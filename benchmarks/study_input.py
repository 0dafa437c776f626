"""Input pipelines beside plain Grain, Ray Data, tf.data and PyTorch's DataLoader: the same work on two cores.

All make the samples of some epochs: Swift from nothing, its profile, its survey and what it keeps included; the others
after their first batch, when their processes have started. They take turns, each in a process of its own; of a peer's
settings the best one counts. The figures are wall time and the CPU-seconds of all processes. Needs the extra
``input-peers``.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_input import EPOCHS, num_batches_of, swift
from children import ROOT, tell
from input_peers import CORES, SYSTEMS
from input_pipelines import CASES, case_of
from measure import publish, turns

from swift.input.optimizer import Resources, plan_input

LIMITS = {"grain": 1.5, "ray": 1.87, "tf": 2.49, "torch": 2.74}
"""Throughput of Swift over that of each peer that is asked for, in geometric mean of the pipelines."""
LEAST = 0.98
US = "swift"


def measured(case_name: str, system: str, scale: float) -> dict[str, float]:
    """Makes the samples of one pipeline in this process: seconds, and CPU-seconds with all processes below it."""
    with tempfile.TemporaryDirectory() as directory:
        case = case_of(case_name, scale, Path(directory))
        num_batches = num_batches_of(case)
        if system == US:
            cpu, begun = _tree_cpu_s(), time.perf_counter()
            swift(plan_input(case.pipeline, Resources(EPOCHS, CORES)), num_batches)
        else:
            _start(system)
            batches = SYSTEMS[system][1](case)
            next(batches)
            cpu, begun = _tree_cpu_s(), time.perf_counter()
            for _ in itertools.islice(batches, num_batches):
                pass
        seconds = time.perf_counter() - begun
        return {"seconds": round(seconds, 3), "cpu_s": round(_tree_cpu_s() - cpu, 2), "batches": num_batches}


def _start(system: str) -> None:
    """Imports a library, and starts its background processes."""
    if system == "ray":
        import ray
        import ray.data

        ray.init(num_cpus=CORES, include_dashboard=False, log_to_driver=False, logging_level="error")
        ray.data.range(64).map(lambda one: one).materialize()  # so that its processes run
    elif system.startswith("tf"):
        import tensorflow  # noqa: F401
    elif system.startswith("torch"):
        import torch.utils.data  # noqa: F401


def _tree_cpu_s() -> float:
    """Returns the CPU-seconds of this process and all its descendants, including those that have ended."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
        parents[int(path.parent.name)], ticks[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    total, found = 0, [os.getpid()]
    while found:
        one = found.pop()
        total += ticks.get(one, 0)
        found += [child for child, parent in parents.items() if parent == one]
    return total / os.sysconf("SC_CLK_TCK")


def child(case: str, system: str, scale: float) -> dict[str, float] | None:
    """Measures one system in a new process; returns its figures, or None if it fails."""
    command = [sys.executable, __file__, "--one", case, system, "--scale", str(scale)]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    figures = json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else None
    tell(f"{case} {system}: {figures or 'fails'}")
    return figures


def compared(found: dict[str, list[dict[str, float]]], figure: str) -> dict[str, float]:
    """Returns the peers' figure over Swift's: medians of the rounds, the best of each peer's settings."""
    medians = {name: statistics.median(one[figure] for one in runs) for name, runs in found.items()}
    best = dict[str, float]()
    for name, (peer, _) in SYSTEMS.items():
        if name in medians:
            best[peer] = min(medians[name], best.get(peer, math.inf))
    return {peer: round(value / medians[US], 3) for peer, value in best.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the records (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default: %(default)s)")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "SYSTEM"), help="measure one of them, and only print it")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(*options.one, options.scale)))
        return 0
    found: dict[str, dict[str, list[dict[str, float]]]] = {case: {} for case in CASES}
    names = [US, *options.systems]
    for case in CASES:
        for name in turns(names, options.rounds):
            figures = child(case, name, options.scale)
            if figures is not None:
                found[case].setdefault(name, []).append(figures)
    ratios: dict[str, Any] = {
        figure: {case: compared(runs, figure) for case, runs in found.items()} for figure in ("seconds", "cpu_s")
    }
    claims = dict[str, tuple[float, float]]()
    for peer, least in LIMITS.items():
        each = [ratios["seconds"][case][peer] for case in CASES if peer in ratios["seconds"][case]]
        if each:
            mean = math.exp(statistics.fmean(map(math.log, each)))
            what = f"geometric mean of {len(each)} of {len(CASES)} pipelines"  # a peer may fail on one
            claims[f"seconds over {peer}'s, {what}"] = (1 / mean, 1 / least)
    for case in CASES:
        if "grain" in ratios["seconds"][case]:
            claims[f"seconds over grain's, {case}"] = (1 / ratios["seconds"][case]["grain"], 1 / LEAST)
    return publish("input beside peers", {"runs": found, "peer_over_swift": ratios}, claims)


if __name__ == "__main__":
    sys.exit(main())
