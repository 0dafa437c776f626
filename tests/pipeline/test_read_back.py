"""A pipeline's program that one process has serialized, run by another: its collectives still come in order.

Run as a script, this file is such a process: ``save FILE`` or ``load FILE``; it prints the losses of its runs.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import serialize_executable

from swift.config.experiment import Experiment
from swift.data.windows import Batch
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement.policy import Static
from swift.mesh.per_rank import REPLICATED, SHARED
from swift.models.config import ModelConfig
from swift.pipeline.reconfigure.engine import Engine
from swift.pipeline.step.tick_arrays import table_arrays
from swift.pipeline.step.train_step import barrier_step
from swift.topology import Topology
from swift.train.build import make_engine

NUM_ITERATIONS, FEW, MANY = 20, 2, 30
TIMEOUT_S = 300


def start() -> Engine:
    """Twelve devices, which two threads or so have to share, and a collective wherever there can be one."""
    experiment = Experiment(
        model=ModelConfig(2, 8, 2, 256, sequence_length=16, moe_pattern=(True,)),
        experts=ExpertConfig(num_classes=4, slots_per_rank=3),
        placement=Static(),
        topology=Topology(3, 2, 2),
        optimizer=OptimizerConfig(warmup_steps=2),
        num_steps=NUM_ITERATIONS,
        num_microbatches=6,
        sequences_per_microbatch=4,
    )
    return make_engine(experiment, frozenset(), "none")


def draw(engine: Engine) -> Batch:
    tokens = np.random.default_rng(0).integers(0, 256, (engine.spec.num_microbatches, 4, 17), np.int32)
    return Batch(tokens[..., :-1], tokens[..., 1:], np.ones(tokens[..., 1:].shape, bool))


def main(task: str, path: Path) -> None:
    engine = start()
    spec, live, table = engine.spec, engine.spec.live, engine.configuration.plans[1].table
    common, columns = table_arrays(table)
    inputs = live.put(common, REPLICATED), live.put(columns, SHARED), *engine.put([draw(engine)])
    first = jax.device_get(spec.init(jax.random.key(0)))
    lowered = barrier_step(spec, table).lower(live.put(first, spec.specs), *inputs)
    if task == "save":
        step = lowered.compile()
        path.write_bytes(serialize_executable.serialize(step)[0])
    else:
        trees = lowered.in_tree, lowered.out_tree
        devices = list(live.mesh.devices.flat)
        step = serialize_executable.deserialize_and_load(path.read_bytes(), *trees, execution_devices=devices)

    def losses() -> list[float]:
        state, found = live.put(first, spec.specs), []
        for _ in range(NUM_ITERATIONS):
            state, metrics = step(state, *inputs)
            found.append(float(jax.device_get(metrics["loss"])[0, 0]))
        return found

    print(json.dumps([losses() for _ in range(FEW if task == "save" else MANY)]))


def in_a_process(task: str, path: Path) -> list[list[float]]:
    """The losses of a process; it has to end by itself, and in time."""
    command = [sys.executable, __file__, task, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_program_that_was_read_back_computes_what_the_fresh_one_does(tmp_path):
    expected, *again = in_a_process("save", tmp_path / "program")
    assert len(set(expected)) == NUM_ITERATIONS
    assert expected[-1] < expected[0]
    assert again == [expected] * (FEW - 1)
    assert in_a_process("load", tmp_path / "program") == [expected] * MANY


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
