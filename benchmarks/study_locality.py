"""Tokens dropped, loss and input time by locality of the data, under a static and under SYMI's placement.

Runs ``experiments/locality/*.gin`` with several seeds. Batches of one domain skew the load of experts; a placement that
follows the load drops fewer tokens then, and has the more to gain the purer the batches are. The iterations are whole
stretches of 64 batches, so that a domain has come in full. A seed has another model and another order of the data: the
effect of locality is that within a seed.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import publish

from swift.config.gin_reader import load_experiment
from swift.config.stored import config_text
from swift.data.windows import STRETCH_BATCHES
from swift.report.compare import comparison_rows
from swift.runlog.reading import read_run, scalars
from swift.train.start import TrainOptions
from swift.train.trainer import train

EXPERIMENTS = Path(__file__).parent.parent / "experiments" / "locality"
POLICIES, LOCALITIES = ("static", "symi"), (0, 50, 100)


def run(name: str, directory: Path, settings: list[str]) -> dict[str, float]:
    """Trains one file unless its run is there: share of dropped tokens, final loss, milliseconds to read a batch.

    Arranging a stretch falls on one iteration of 64: the median does not show it, the mean and the maximum do.
    """
    if not (directory / name / "summary.json").exists():
        experiment = load_experiment(EXPERIMENTS / f"{name}.gin", ["CheckpointConfig.every=0", *settings])
        train(experiment, TrainOptions(directory / name, config_text(experiment)))
    found = read_run(directory / name)
    row, input_ms = comparison_rows([found])[0], scalars(found, "input_ms")
    return {
        "dropped_percent": row["dropped_percent"],
        "final_loss": row["final_loss"],
        "input_ms": round(float(np.median(input_ms)), 3),
        "input_ms_mean": round(float(np.mean(input_ms)), 3),
        "input_ms_max": round(float(np.max(input_ms)), 3),
    }


def spread(runs: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Returns each figure's mean over the seeds, least and most, and all of them."""
    figures = {name: [one[name] for one in runs.values()] for name in next(iter(runs.values()))}
    told = {
        name: {"mean": round(float(np.mean(found)), 4), "range": [round(min(found), 4), round(max(found), 4)]}
        for name, found in figures.items()
    }
    return told | {"by_seed": runs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3 * STRETCH_BATCHES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--localities", type=int, nargs="+", choices=LOCALITIES, default=LOCALITIES, metavar="PERCENT")
    parser.add_argument("--runs", type=Path, help="directory where runs are kept, and found again if they are whole")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.runs or Path(temporary)

        def of_seeds(name: str) -> dict[str, Any]:
            settings = [f"Experiment.num_steps={options.steps}"]
            return spread(
                {
                    str(seed): run(name, directory / f"seed_{seed}", [*settings, f"Experiment.seed={seed}"])
                    for seed in options.seeds
                }
            )

        by_locality = {
            f"{locality / 100:g}": {name: of_seeds(f"{name}_{locality}") for name in POLICIES}
            for locality in options.localities
        }
    purest = by_locality[f"{max(options.localities) / 100:g}"]
    ratio = purest["symi"]["dropped_percent"]["mean"] / purest["static"]["dropped_percent"]["mean"]
    return publish(
        "drops, loss and input time by locality",
        {"steps": options.steps, "seeds": options.seeds, "by_locality": by_locality},
        {"symi's drops over static's at the highest locality": (round(ratio, 4), 1.0)},
    )


if __name__ == "__main__":
    sys.exit(main())
