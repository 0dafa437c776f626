"""A process for tests/elastic/test_compile_only_group.py: rehearses groups one after another, or is in a real one."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swift.elastic import jax_group
from swift.elastic.jax_group import CompileOnlyGroup, JaxGroup
from swift.errors import RunError
from swift.pipeline.reconfigure.executables import ExecutableCache

AXES = ("worker", "expert")
SPEC = PartitionSpec(*AXES)


def rehearse(sockets, programs, counts):
    """Compiles for groups one after another; a number that comes again gets a program of its own."""
    for number, count in enumerate(counts):
        with CompileOnlyGroup(count, sockets) as group:
            grid = group.grid(jax.local_device_count())
            program(Path(programs) / str(number), grid, lambda function, rows: function.lower(rows).compile())


def join(programs, address, index, count):
    """Runs what was compiled for a group like this one."""
    link = JaxGroup(address, index, count)
    link.join()
    grid = link.grid(jax.local_device_count())

    def refuse(*_):
        raise AssertionError("nothing is to be compiled")

    run = program(Path(programs), grid, refuse)
    mine = [
        jax.device_put(np.full((1, 1, 3), 10.0 * index + rank, np.float32), device)
        for rank, device in enumerate(jax.local_devices())
    ]
    sharding = NamedSharding(Mesh(grid, AXES), SPEC)
    after = run(jax.make_array_from_single_device_arrays((*grid.shape, 3), sharding, mine))
    print([float(shard.data[0, 0, 0]) for shard in after.addressable_shards], flush=True)
    del run, mine, after
    link.leave()


def program(programs, grid, compiled):
    """Loads from the store: a worker's sum over its ranks, and 1000 times that of the worker before it."""
    count, num_ranks = grid.shape
    mesh = Mesh(grid, AXES)

    def body(block):
        total = jax.lax.psum(block, "expert")
        total = total + 1000 * jax.lax.ppermute(total, "worker", [(i, (i + 1) % count) for i in range(count)])
        return total + 0.5 * jax.lax.psum(jnp.ones_like(total), AXES)

    function = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False))
    rows = jax.ShapeDtypeStruct((count, num_ranks, 3), jnp.float32, sharding=NamedSharding(mesh, SPEC))
    return ExecutableCache(programs).get("sum", lambda: compiled(function, rows), list(grid.flat))


def tell(sockets, name, value):
    """Rehearses in a JAX in which something has another name, and in the one that is there."""
    usual = getattr(jax_group, name)
    setattr(jax_group, name, value)
    try:
        CompileOnlyGroup(3, sockets)
    except RunError as error:
        print(error, flush=True)
    setattr(jax_group, name, usual)
    with CompileOnlyGroup(3, sockets) as group:
        print(group.grid(1).shape, flush=True)


if __name__ == "__main__":
    mode, local, *rest = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(local))
    jax.config.update("jax_enable_compilation_cache", False)
    if mode == "rehearse":
        rehearse(Path(rest[0]), rest[1], map(int, rest[2:]))
    elif mode == "join":
        join(rest[0], rest[1], int(rest[2]), int(rest[3]))
    else:
        tell(Path(rest[0]), *rest[1:])
