"""A process for tests/elastic/services/test_compile_service.py: an iteration in a real group, all in the store.

The first worker has nothing and gets the state of a peer, with parameters of zero: then all next tokens are equally
likely.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from swift.config.gin_reader import load_experiment
from swift.elastic.jax_group import JaxGroup
from swift.mesh.live import LiveMesh, local_row, storage_mesh
from swift.mesh.per_rank import AXES
from swift.mesh.state_rows import put_shards, shard_shapes
from swift.pipeline.reconfigure.compiled_steps import Steps
from swift.pipeline.reconfigure.configuration import Configurator
from swift.pipeline.reconfigure.executables import ExecutableCache
from swift.pipeline.reconfigure.transfer import compiled_transfer
from swift.train.build import make_loader, make_plan_settings, make_step_spec

ITERATIONS_DONE = 7


def main(config, programs, num_local, address, index, count):
    experiment = load_experiment(Path(config))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(num_local))
    jax.config.update("jax_enable_compilation_cache", False)
    topology, store = experiment.topology, ExecutableCache(Path(programs))
    configurator = Configurator(make_plan_settings(experiment, make_step_spec(experiment, storage_mesh(topology))))
    jax.extend.backend.clear_backends()
    link = JaxGroup(address, int(index), int(count))
    link.join()
    configuration = configurator.configure(frozenset())
    live = LiveMesh(topology, configuration.rows, Mesh(link.grid(topology.num_expert_ranks), AXES))
    spec = make_step_spec(experiment, live)
    steps = Steps(spec, configuration, experiment.sequences_per_microbatch, store, keep_state=True)
    shapes = spec.abstract(with_slots=True)
    mine = {device.id for device in jax.local_devices()}
    is_first = bool(mine & {device.id for device in live.mesh.devices[0]})
    parts = jax.tree.map(lambda part: np.zeros(part.shape, part.dtype), shard_shapes(spec.specs, shapes, len(mine)))
    for part in parts.step:
        part[:] = 0 if is_first else ITERATIONS_DONE
    state = put_shards(parts, live, spec.specs, shapes)
    has_R = [row > 0 for row in range(live.num_live)]
    state, is_whole = compiled_transfer(spec, spec, store, has_R, configuration.device_rows)(state)
    assert local_row(is_whole)
    batch = make_loader(experiment, "train").batch(0)
    state, metrics = steps.run_single(state, steps.on_devices([batch]))
    print(int(local_row(state.step)), float(local_row(metrics["loss"])[0]), flush=True)
    steps.compiled("evaluate")


if __name__ == "__main__":
    # Nothing that a compile service makes is to be made here.
    Steps._function = None
    main(*sys.argv[1:])
