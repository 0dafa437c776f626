"""Tokens dropped and iterations to the target loss, by placement policy: the demo's experiment, the same batches.

Runs ``experiments/symi/demo/*.gin`` to their end, 300 iterations each, and sets SYMI's own figures beside them.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import publish

from swift.config.gin_reader import load_experiment
from swift.config.stored import config_text
from swift.report.compare import comparison_rows
from swift.runlog.reading import Run, read_run, scalars
from swift.train.start import TrainOptions
from swift.train.trainer import train

COLUMNS = ("static", "flexmoe100", "flexmoe50", "flexmoe10", "symi")
PAPER_FEWER_DROPS = {"static": 0.69, "flexmoe100": 0.64, "flexmoe50": 0.62, "flexmoe10": 0.43}
PAPER_FEWER_ITERATIONS = {"static": 0.285, "flexmoe100": 0.156, "flexmoe50": 0.121, "flexmoe10": 0.0}


EVERY = 10
"""Number of iterations averaged for each point of a curve."""


def run(name: str, directory: Path, seed: int) -> Run:
    """Trains the run for one column of the table."""
    path = Path(__file__).parent.parent / "experiments" / "symi" / "demo" / f"{name}.gin"
    experiment = load_experiment(path, ["CheckpointConfig.every=0", f"Experiment.seed={seed}"])
    train(experiment, TrainOptions(directory / name, config_text(experiment)))
    return read_run(directory / name)


def curves(found: Run) -> dict[str, list[float]]:
    """Computes curves of the loss and the share of surviving tokens, averaged over some iterations per point."""
    values = {"loss": scalars(found, "loss"), "survival": 1 - scalars(found, "drop_fraction")}
    whole = len(found.metrics) // EVERY * EVERY
    return {name: [round(x, 4) for x in of[:whole].reshape(-1, EVERY).mean(axis=1)] for name, of in values.items()}


def largest_swing(found: Run) -> float:
    """Computes the largest growth factor of an expert's load within three iterations; loads of 0 count as 1."""
    popularity_TLE = np.array([record["popularity"] for record in found.metrics], dtype=float)
    return round(float((popularity_TLE[3:] / np.maximum(popularity_TLE[:-3], 1)).max()), 1)


def gains(rows: dict[str, dict[str, Any]], baseline: str) -> dict[str, Any]:
    """Compares the dropped tokens of ``symi``, and the iterations that it needs, with those of a baseline."""
    symi, other = rows["symi"], rows[baseline]
    reached = symi["steps_to_target"] and other["steps_to_target"]
    return {
        "dropped_over_baseline": round(symi["dropped_percent"] / other["dropped_percent"], 4),
        "fewer_drops": round(1 - symi["dropped_percent"] / other["dropped_percent"], 4),
        "fewer_drops_paper": PAPER_FEWER_DROPS[baseline],
        "fewer_iterations": round(1 - symi["steps_to_target"] / other["steps_to_target"], 4) if reached else None,
        "fewer_iterations_paper": PAPER_FEWER_ITERATIONS[baseline],
    }


def _iterations_over_static(against: dict[str, dict[str, Any]]) -> float:
    """Divides the iterations of ``symi`` to the target loss by those of ``static``; infinite if either missed it."""
    fewer = against["static"]["fewer_iterations"]
    return math.inf if fewer is None else round(1 - fewer, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory() as directory:
        runs = {name: run(name, Path(directory), seed) for name in COLUMNS}
    rows = {name: comparison_rows([found])[0] for name, found in runs.items()}
    against = {name: gains(rows, name) for name in PAPER_FEWER_DROPS}
    return publish(
        "dropped tokens and iterations to the target loss, demo model, 300 iterations",
        {
            "seed": seed,
            "runs": list(rows.values()),
            "symi_against": against,
            "curves": {"every": EVERY, **{name: curves(found) for name, found in runs.items()}},
            "largest_growth_of_a_load_in_3_iterations": largest_swing(runs["symi"]),
        },
        {
            "symi's drops over static's": (against["static"]["dropped_over_baseline"], 0.45),
            "symi's drops over flexmoe(10)'s": (against["flexmoe10"]["dropped_over_baseline"], 0.75),
            "symi's iterations to the target loss over static's": (_iterations_over_static(against), 0.8),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
