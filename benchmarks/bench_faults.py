"""Effect of lost updates on the loss: a small model loses its state five times, for several kinds of checkpoints.

Every run of a seed sees the same batches. A fault ends the training between two checkpoints; the run is resumed, as
with ``--resume``, from the newest. The proportion of lost tokens is counted twice: from events, and from the
metrics, iteration by iteration, for every expert.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measure import publish

from swift.checkpoint.config import CheckpointConfig
from swift.config.experiment import Experiment
from swift.config.failures import StageRank
from swift.experts.config import ExpertConfig
from swift.models.config import ModelConfig
from swift.runlog.reading import Run, read_run
from swift.topology import Topology, Worker
from swift.train.start import TrainOptions
from swift.train.trainer import train

CLASSES, BUDGET = 8, 0.0375
FAULTS = (52, 104, 156, 208, 260)
"""Iterations before which a fault destroys all progress since the newest checkpoint."""
SMALL = Experiment(
    model=ModelConfig(num_layers=2, model_dim=64, ffn_dim=256, moe_pattern=(True,)),
    experts=ExpertConfig(num_classes=CLASSES, slots_per_rank=8),
    topology=Topology(num_expert_ranks=2),
    sequences_per_microbatch=8,
    eval_every=300,
    num_eval_batches=64,
)
NONE, FULL, DYNAMIC = "no fault", "full", "K = 1, Dynamic-K"
SAVED: dict[str, dict[str, Any]] = {
    NONE: {},
    FULL: {},
    "K = 4": {"experts_per_layer": 4},
    "K = 2": {"experts_per_layer": 2},
    "K = 1": {"experts_per_layer": 1},
    DYNAMIC: {"experts_per_layer": 1, "plt_budget": BUDGET},
}


class Fault(Exception):
    """A simulated loss of the whole state."""


@dataclass
class Faults:
    """A ``FailureSource`` that raises ``Fault`` once before each given iteration, and has no other failures."""

    left: list[int]

    def failed(self, first_step: int, last_step: int) -> frozenset[Worker]:
        """Returns no failures, or raises if a fault is due."""
        if self.left and first_step <= self.left[0] <= last_step:
            raise Fault(f"iteration {self.left.pop(0)}")
        return frozenset()

    def lost_ranks(self, first_step: int, last_step: int) -> frozenset[StageRank]:
        """Returns no lost ranks."""
        del first_step, last_step
        return frozenset()


def trained(experiment: Experiment, run_dir: Path, faults: tuple[int, ...]) -> Run:
    """Trains to the end, resuming after every fault."""
    options, source = TrainOptions(run_dir, "", prepare="none"), Faults(list(faults))
    for _ in range(len(faults) + 1):
        try:
            train(experiment, options, source)
        except Fault:
            options = replace(options, resume=True)
    return read_run(run_dir)


def events(run: Run, *names: str) -> list[dict[str, Any]]:
    """Collects a run's events of the given kinds, in chronological order."""
    return [event for event in run.events if event["event"] in names]


def counted_plt(run: Run) -> float:
    """Computes the proportion of lost tokens by tracking the iterations in each expert's state and newest copy."""
    updates_TLE = np.array([np.subtract(record["popularity"], record["dropped"]) for record in run.metrics])
    routed_TL = np.array([record["popularity"] for record in run.metrics]).sum(axis=-1)
    num_layers = updates_TLE.shape[1]
    units = [(layer, class_) for layer in range(num_layers) for class_ in range(CLASSES)]
    state, copies, now, lost_L = {unit: set[int]() for unit in units}, dict[Any, set[int]](), 0, np.zeros(num_layers)
    for event in events(run, "checkpoint", "restore"):
        for iterations in state.values():
            iterations.update(range(now, event["step"]))
        now = event["step"]
        if event["event"] == "checkpoint":
            chosen = [range(CLASSES)] * num_layers if event["experts"] == "all" else event["experts"]
            copies |= {(i, e): set(state[i, e]) for i, classes in enumerate(chosen) for e in classes}
            continue
        for (layer, class_), iterations in state.items():
            gone = sorted(iterations - copies[layer, class_])
            lost_L[layer] += updates_TLE[gone, layer, class_].sum()
        state = {unit: set(copies[unit]) for unit in units}
    return float(np.mean(lost_L / routed_TL.sum(axis=0)))


def row(run: Run) -> dict[str, Any]:
    """Computes the figures of one run for the table."""
    saves, restores = events(run, "checkpoint"), events(run, "restore")
    assert run.summary is not None
    return {
        "validation_loss": run.summary["validation_loss"],
        "plt": saves[-1]["plt"],
        "plt_counted": counted_plt(run),
        "faults": len(restores),
        "plt_after_faults": [round(event["plt"], 4) for event in restores],
        "k_after_faults": [event["experts_per_layer"] for event in restores],
        "written_mb": round(sum(event["bytes"] for event in saves) / 1e6, 1),
    }


def idle(run: dict[str, Any]) -> int:
    """Counts the faults after which too much was lost but K did not grow, although it could."""
    after = run["k_after_faults"]
    steps = zip(run["plt_after_faults"], [1, *after], after, strict=False)
    return sum(plt > BUDGET and k == before < CLASSES for plt, before, k in steps)


def over_seeds(runs: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> dict[str, Any]:
    """Averages a variant over all seeds, and compares its loss with that of full checkpoints, seed by seed."""
    more = [mine["validation_loss"] - theirs["validation_loss"] for mine, theirs in zip(runs, baseline, strict=True)]
    return {
        "validation_loss": round(statistics.mean(run["validation_loss"] for run in runs), 4),
        "above_full": {"mean": round(statistics.mean(more), 4), "of_each_seed": [round(value, 4) for value in more]},
        "plt": round(statistics.mean(run["plt"] for run in runs), 4),
        "written_mb": round(statistics.mean(run["written_mb"] for run in runs), 1),
    }


def main() -> int:
    """Trains all variants and prints the figures; returns exit code 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=2, help="iterations between checkpoints")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SAVED}
    with tempfile.TemporaryDirectory() as directory:
        jax.config.update("jax_compilation_cache_dir", f"{directory}/programs")  # resumed runs reuse the programs
        for seed in range(options.seeds):
            for name, saved in SAVED.items():
                experiment = replace(SMALL, seed=seed, checkpoint=CheckpointConfig(every=options.every, **saved))
                faults = () if name == NONE else FAULTS
                found[name].append(row(trained(experiment, Path(directory) / f"{name}, seed {seed}", faults)))
    means = {name: over_seeds(runs, found[FULL]) for name, runs in found.items()}
    losses = [run["validation_loss"] for run in found[FULL]]
    runs = [run for of_variant in found.values() for run in of_variant]
    full, none = found[FULL], found[NONE]
    figures = {
        "every": options.every,
        "num_steps": SMALL.num_steps,
        "faults": FAULTS,
        "classes": CLASSES,
        "plt_budget": BUDGET,
        "variants": means,
        "spread_of_seeds": round(max(losses) - min(losses), 4),
        "runs": found,
    }
    claims = {
        "loss of full checkpoints from that without a fault": (
            max(abs(a["validation_loss"] - b["validation_loss"]) for a, b in zip(full, none, strict=True)),
            0.0,
        ),
        "validation loss of K = 1 from that of full checkpoints, any seed": (
            max(map(abs, means["K = 1"]["above_full"]["of_each_seed"])),
            0.03,
        ),
        "lost tokens from those counted": (max(abs(run["plt"] - run["plt_counted"]) for run in runs), 1e-12),
        "faults above the budget after which K stays, though it could grow": (sum(map(idle, found[DYNAMIC])), 0),
    }
    return publish("faults", figures, claims)


if __name__ == "__main__":
    sys.exit(main())
