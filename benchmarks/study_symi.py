"""SYMI's sweeps and breakdown (arXiv 2504.19925) on the demo's model.

``aux-loss`` and ``capacity``: tokens that survive by the coefficient of the auxiliary loss, and by the capacity factor.
Every run sees the same batches; its share of dropped tokens is over all iterations. ``breakdown``: CPU-seconds
of the parts of an iteration, each a separate program, with the paper's tokens per rank.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax
from measure import Trainee, demo, median, paired_costs, publish

from swift.checkpoint.config import CheckpointConfig
from swift.config.experiment import Experiment
from swift.experts.config import SlotCapacity
from swift.experts.placement.policy import Static
from swift.experts.placement.symi import Symi
from swift.mesh.per_rank import EXPERT_AXIS, SHARED
from swift.pipeline.state import TrainState
from swift.pipeline.step.single_worker import single_worker_evaluation
from swift.pipeline.step.spec import StepSpec
from swift.runlog.reading import measure, read_run
from swift.train.start import TrainOptions
from swift.train.trainer import train

STEPS = 150
COEFFICIENTS = (1e-5, 1e-3, 1e-2, 1e-1)
CAPACITY_FACTORS = (1.0, 2.0, 4.0)
PAPER_SURVIVAL = {1.0: 0.449, 2.0: 0.656, 4.0: 0.749}
"""Capacity factors, for 32 experts under a static placement."""
DEMO = replace(demo(Symi(), "decoupled"), checkpoint=CheckpointConfig(every=0), num_steps=STEPS, eval_every=0)


def trained(experiment: Experiment) -> dict[str, float]:
    """Runs to the end; returns the share of dropped tokens and the loss of the last ten iterations."""
    with tempfile.TemporaryDirectory() as directory:
        train(experiment, TrainOptions(Path(directory) / "run", ""))
        found = measure(read_run(Path(directory) / "run"), None)
    return {"dropped": round(found["dropped_percent"] / 100, 4), "loss": round(found["final_loss"], 4)}


def aux_loss() -> dict[str, Any]:
    """Dropped tokens under a static and under SYMI's placement, by the coefficient of the auxiliary loss."""
    figures: dict[str, Any] = {}
    for coefficient in COEFFICIENTS:
        experts = replace(DEMO.experts, aux_loss_coefficient=coefficient)
        figures[f"{coefficient:g}"] = {
            policy.name: trained(replace(DEMO, experts=experts, placement=policy)) for policy in (Static(), Symi())
        }
    return {"steps": STEPS, "by_coefficient": figures}


def capacity() -> dict[str, Any]:
    """Surviving tokens with 32 experts in 32 fixed slots, by the capacity factor."""
    figures: dict[str, Any] = {}
    for factor in CAPACITY_FACTORS:
        experts = replace(DEMO.experts, num_classes=32, capacity=SlotCapacity(factor))
        found = trained(replace(DEMO, experts=experts, placement=Static()))
        figures[f"{factor:g}"] = {
            "survive": round(1 - found["dropped"], 4),
            "paper": PAPER_SURVIVAL[factor],
            "loss": found["loss"],
        }
    return {"steps": STEPS, "by_capacity_factor": figures}


def parts_of(spec: StepSpec) -> dict[str, Any]:
    """Makes the parts of an update as jitted functions of a state, as ``swift.pipeline.step.update`` combines them.

    Slots stand for their gradients, which have their shapes, and master weights for theirs.
    """
    specs = spec.specs

    def jitted(part: Any, out_specs: Any) -> Any:
        return jax.jit(spec.live.per_rank(part, (specs,), out_specs))

    def collect(state: TrainState) -> Any:
        placements = spec.placements(state.placement)
        return {name: spec.layouts[name].collect(of, placements[name]) for name, of in state.slots.items()}

    def materialize(state: TrainState) -> Any:
        placements = spec.placements(state.placement)
        return {name: spec.layouts[name].materialize(of, placements[name]) for name, of in state.master.items()}

    def optimize(state: TrainState) -> Any:
        updates, moments = spec.optimizer.update(state.master, state.moments, state.master)
        return optax.apply_updates(state.master, updates), moments

    def place(state: TrainState) -> Any:
        counts_LE = jax.numpy.arange(spec.experts.num_classes) + state.placement[:, :1, 0]
        popularity_LE = jax.lax.psum(counts_LE, EXPERT_AXIS)
        return spec.policy(popularity_LE, state.placement, state.policy)[0]

    return {
        "collect gradients": jitted(collect, specs.master),
        "optimizer": jitted(optimize, (specs.master, specs.moments)),
        "sum counts and place": jitted(place, SHARED),
        "materialize weights": jitted(materialize, specs.slots),
    }


def breakdown() -> dict[str, Any]:
    """Computes shares of an iteration; forward and backward are the remainder."""
    trainee = Trainee(demo(Symi(), "decoupled", num_sequences=128))
    trainee()
    forward, state = single_worker_evaluation(trainee.spec), jax.tree.map(jax.numpy.copy, trainee.state)
    calls = {name: (lambda part=part: part(state)) for name, part in parts_of(trainee.spec).items()}
    calls |= {"forward": lambda: forward(state, trainee.batches[0]), "iteration": trainee}
    cpu_s = {name: median(values) for name, values in paired_costs(calls, rounds=11).items()}
    whole = cpu_s.pop("iteration")
    cpu_s["backward, and the rest"] = whole - sum(cpu_s.values())
    return {
        "tokens_per_rank": trainee.experiment.tokens_per_step // trainee.spec.live.num_ranks,
        "iteration_cpu_s": whole,
        "shares": {name: round(value / whole, 5) for name, value in cpu_s.items()},
    }


STUDIES = {"aux-loss": aux_loss, "capacity": capacity, "breakdown": breakdown}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=list(STUDIES))
    study = parser.parse_args().study
    return publish(f"symi, {study}", STUDIES[study](), {})


if __name__ == "__main__":
    sys.exit(main())
