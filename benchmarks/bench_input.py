"""Input pipelines: CPU-seconds of plans over those of plain Grain, for the same batches of text, images and audio.

Both begin from nothing and make the samples of some epochs, Swift's survey and what it keeps included. Grain runs with
the threads that suit it best.
"""

import argparse
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from input_peers import grain_batches
from input_pipelines import BATCH, CASES, Case, case_of
from measure import publish

from swift.data.pipeline import InputPlan, plain_plan
from swift.data.sample_store import find_survey
from swift.data.samples import Samples
from swift.data.survey import in_order
from swift.input.optimizer import Resources, plan_input

EPOCHS = 3
LIMIT, LEAST = 1 / 1.5, 1 / 0.98
THREADS = (0, 1, 4)


def swift(plan: InputPlan, num_batches: int) -> None:
    """Reads batches with a plan of Swift's."""
    samples = Samples(plan, 0, find_survey(plan, None, print))
    for _ in itertools.islice(in_order(samples, plan), num_batches):
        pass


def plain(case: Case, num_threads: int, num_batches: int) -> None:
    """Reads batches with plain Grain."""
    batches = grain_batches(case, num_threads)
    for _ in itertools.islice(batches, num_batches):
        pass
    batches.close()


def num_batches_of(case: Case) -> int:
    """Computes the number of batches in all epochs from the number of samples."""
    unbatched = replace(case.pipeline, operators=case.pipeline.operators[:-1])
    per_epoch = Samples(plain_plan(unbatched), 0).num_per_epoch
    assert per_epoch is not None
    return EPOCHS * per_epoch // BATCH


def cost(call: Callable[[], None]) -> tuple[float, float]:
    """Measures (CPU-seconds, wall seconds) of a call."""
    cpu, begun = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - begun


def measure(case: Case) -> dict[str, Any]:
    """Measures one case: Grain with its best settings, and Swift's plan, including the profiling that it requires."""
    num_batches = num_batches_of(case)
    found: dict[str, Any] = {"batches": num_batches}
    grains = {num: cost(lambda num=num: plain(case, num, num_batches)) for num in THREADS}

    def whole() -> None:
        swift(plan_input(case.pipeline, Resources(EPOCHS)), num_batches)

    ours = min(cost(whole) for _ in range(2))
    best = min(grains.values())
    found |= {"grain_cpu_s": {str(num): one[0] for num, one in grains.items()}, "swift_cpu_s": ours[0]}
    found |= {"cpu_ratio": ours[0] / best[0], "wall_ratio": ours[1] / min(one[1] for one in grains.values())}
    return found | {"plan": plan_input(case.pipeline, Resources(EPOCHS)).reasons}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the records (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = {name: measure(case_of(name, options.scale, Path(directory))) for name in CASES}
    ratios = [one["cpu_ratio"] for one in figures.values()]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    claims = {"CPU-seconds over plain Grain's, geometric mean": (mean, LIMIT)}
    claims |= {f"CPU-seconds over plain Grain's, {name}": (one["cpu_ratio"], LEAST) for name, one in figures.items()}
    return publish("input", figures, claims)


if __name__ == "__main__":
    sys.exit(main())
