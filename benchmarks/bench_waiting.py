"""Waiting for input: milliseconds to read a batch over those of a step, in the demo and with the tokens of 64 ranks.

The batch is read by one of the cores that also compute, while the step before is computed: a step waits at most for
what reading takes longer. All of it counts here as if nothing overlapped, so the figure bounds waiting and, divided by
the cores, the share of their time that the input takes. A step is taken to have waited where reading took longer than
the median step. For 64 ranks, the demo's eight have eight times the tokens
each: as much is read, from an index in files as in any run of the command. The first iterations, of which one compiles,
count in nothing.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from children import ROOT
from measure import publish

from swift.config.gin_reader import load_experiment
from swift.config.stored import config_text
from swift.runlog.reading import read_run, scalars
from swift.train.start import TrainOptions
from swift.train.trainer import train

LIMIT = 0.01
RANKS, STEPS = {"the demo's 8 ranks": 8, "the tokens of 64 ranks": 64}, {8: 62, 64: 22}
WARM_UP = 2
USUAL = 16
"""Number of sequences in a micro-batch of the demo."""


def measure(num_ranks: int, directory: Path) -> dict[str, Any]:
    """Trains the demo for a few iterations with as many tokens as ``num_ranks`` ranks have; builds the index first."""
    sequences = USUAL * num_ranks // 8
    settings = [
        f"Experiment.sequences_per_microbatch={sequences}",
        f"Experiment.num_steps={STEPS[num_ranks]}",
        "Experiment.eval_every=0",
        "CheckpointConfig.every=0",
        "OptimizerConfig.warmup_steps=2",
    ]
    experiment = load_experiment(ROOT / "experiments" / "demo.gin", settings)
    train(experiment, TrainOptions(directory, config_text(experiment), corpora=directory.parent / "corpora"))
    found = read_run(directory)
    input_ms, step_ms = (np.asarray(scalars(found, name))[WARM_UP:] for name in ("input_ms", "step_ms"))
    return {
        "sequences": sequences,
        "iterations": len(step_ms),
        "input_ms": round(float(np.median(input_ms)), 3),
        "input_ms_max": round(float(input_ms.max()), 3),
        "step_ms": round(float(np.median(step_ms)), 1),
        "share": round(float(input_ms.sum() / step_ms.sum()), 5),
        "share_of_cores": round(float(input_ms.sum() / step_ms.sum()) / (os.cpu_count() or 1), 5),
        "waited": round(float((input_ms - np.median(step_ms)).clip(0).sum() / step_ms.sum()), 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = {name: measure(num, Path(directory) / str(num)) for name, num in RANKS.items()}
    claims = {f"reading over computing, {name}": (one["share"], LIMIT) for name, one in found.items()}
    return publish("waiting for input", {"by_tokens": found}, claims)


if __name__ == "__main__":
    sys.exit(main())
