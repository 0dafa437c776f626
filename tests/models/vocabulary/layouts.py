"""The layouts of a sharded vocabulary, on all ranks."""

import jax
import jax.numpy as jnp
import numpy as np

from swift.mesh.live import live_mesh
from swift.mesh.per_rank import RANKED
from swift.topology import Topology


def run(function, layout, kind, array):
    """A per-rank function of ``[layer, ...]`` on an array ``[layer, rank, ...]``; placements have no effect."""
    live = live_mesh(Topology(num_expert_ranks=layout.num_ranks), kind)
    nowhere = jnp.zeros((1, layout.num_ranks, 1), jnp.int32)
    per_rank = live.per_rank(lambda own: function(own, nowhere), (RANKED,), RANKED)
    return np.asarray(jax.jit(per_rank)(array[None]))[0]
