"""SYMI's sweeps (arXiv 2504.19925) on the demo's model: tokens that survive by aux-loss coefficient and by capacity.

Every run of a study sees the same batches; its share of dropped tokens is that of all its iterations.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import publish

from swift.experts import ExpertConfig
from swift.experts.placement import Static, Symi
from swift.models import model_size
from swift.record import read_run, scalars
from swift.topology import Topology
from swift.train import Experiment, TrainOptions, train

STEPS = 150
COEFFICIENTS = (1e-5, 1e-3, 1e-2, 1e-1)
CAPACITY_FACTORS = (1.0, 2.0, 4.0)
PAPER_SURVIVAL = {1.0: 0.449, 2.0: 0.656, 4.0: 0.749}
"""With 32 classes under a static placement."""
DEMO = Experiment(
    model=model_size("demo"),
    experts=ExpertConfig(num_classes=8, slots_per_rank=4),
    topology=Topology(num_expert_ranks=8),
    num_steps=STEPS,
)


def trained(experiment: Experiment) -> dict[str, float]:
    """The share of dropped tokens and the last ten iterations' loss of a run to its end."""
    with tempfile.TemporaryDirectory() as directory:
        train(experiment, TrainOptions(Path(directory) / "run", ""))
        run = read_run(Path(directory) / "run")
    dropped, routed = (
        np.array([np.sum(record[name]) for record in run.metrics]).sum() for name in ("dropped", "popularity")
    )
    return {
        "dropped": round(float(dropped / routed), 4),
        "loss": round(float(np.mean(scalars(run, "loss")[-10:])), 4),
    }


def aux_loss() -> dict[str, Any]:
    """Dropped tokens under a static and under SYMI's placement, by the coefficient of the auxiliary loss."""
    figures: dict[str, Any] = {}
    for coefficient in COEFFICIENTS:
        experts = replace(DEMO.experts, aux_loss_coefficient=coefficient)
        figures[f"{coefficient:g}"] = {
            policy.name: trained(replace(DEMO, experts=experts, placement=policy)) for policy in (Static(), Symi())
        }
    return {"by_coefficient": figures}


def capacity() -> dict[str, Any]:
    """Tokens that survive with 32 classes in 32 slots that never move, by the capacity factor."""
    figures: dict[str, Any] = {}
    for factor in CAPACITY_FACTORS:
        experts = replace(DEMO.experts, num_classes=32, capacity_factor=factor)
        found = trained(replace(DEMO, experts=experts, placement=Static()))
        figures[f"{factor:g}"] = {
            "survive": round(1 - found["dropped"], 4),
            "paper": PAPER_SURVIVAL[factor],
            "loss": found["loss"],
        }
    return {"by_capacity_factor": figures}


STUDIES = {"aux-loss": aux_loss, "capacity": capacity}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=list(STUDIES))
    study = parser.parse_args().study
    return publish(f"symi, {study}", {"steps": STEPS} | STUDIES[study](), {})


if __name__ == "__main__":
    sys.exit(main())
