"""Trains a small mixture of experts from Python, and prints what was recorded.

    python examples/train_from_python.py [RUN_DIR]

The same experiment in gin would be a file of a dozen lines; here it is an object, which a sweep can change with
``dataclasses.replace``.
"""

import sys
from pathlib import Path

from swift.experts import ExpertConfig, SlotCapacity
from swift.mesh.devices import emulate_devices
from swift.models import ModelConfig
from swift.runlog import read_run, scalars
from swift.topology import Topology
from swift.train import Experiment, train

EXPERIMENT = Experiment(
    model=ModelConfig(num_layers=1, model_dim=32, num_heads=2, ffn_dim=64, sequence_length=64, moe_pattern=(True,)),
    experts=ExpertConfig(num_classes=8, slots_per_rank=4, capacity=SlotCapacity(1.0), aux_loss_coefficient=1e-2),
    topology=Topology(num_expert_ranks=4),
    num_steps=60,
    eval_every=0,
)
"""A layer of 8 experts in 16 slots on 4 ranks, placed again in every iteration: SYMI is the default."""


def run(experiment: Experiment, run_dir: Path) -> None:
    """Trains on as many CPU devices as the experiment has ranks."""
    emulate_devices(experiment.topology.num_devices)  # must precede JAX's first use of devices
    train(experiment, run_dir)


def main() -> None:
    run_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/symi")
    run(EXPERIMENT, run_dir)
    record = read_run(run_dir)
    loss_T, dropped_T = scalars(record, "loss"), scalars(record, "drop_fraction")
    print(f"{record.metrics.last_step} iterations, loss {loss_T[0]:.2f} to {loss_T[-10:].mean():.2f}")
    print(f"tokens dropped: {dropped_T[0]:.1%} in the first iteration, {dropped_T[-10:].mean():.1%} in the last ten")


if __name__ == "__main__":
    main()
