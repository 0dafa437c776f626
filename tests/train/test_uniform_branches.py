"""No rank branches on what is its own: then shard_map does not deadlock and vmap makes no select of a branch.

The jaxpr of an iteration is walked with what differs between the ranks of a worker: no branch or loop may depend on it.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from swift.config.experiment import Experiment
from swift.data.windows import Batch
from swift.experts.config import ExpertConfig, RankCapacity
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.packed import MinMax, Packed
from swift.experts.placement.policy import Static
from swift.experts.placement.symi import Symi
from swift.mesh.live import live_mesh
from swift.mesh.per_rank import RANKED, SHARED
from swift.models.config import ModelConfig
from swift.pipeline.step.single_worker import single_worker_evaluation, single_worker_step
from swift.topology import Topology
from swift.train.build import make_step_spec


@pytest.mark.parametrize(
    ("policy", "layout"),
    [(Symi(), "decoupled"), (MinMax(), "decoupled"), (Static(), "coupled"), (FlexMoE(2), "coupled")],
    ids=str,
)
def test_no_branch_of_an_iteration_differs_between_ranks(varying_branches, policy, layout):
    for jaxpr in traced(policy, ExpertConfig(4, 2), layout):
        assert varying_branches(jaxpr, "expert") == []


def test_all_ranks_look_up_in_equally_many_rounds(varying_branches):
    """The number of rounds is data, and the same on all ranks: in each there are collectives."""
    jaxprs = traced(Symi(), ExpertConfig(4, 2), "decoupled", embedding="sharded")
    for jaxpr in jaxprs:
        assert varying_branches(jaxpr, "expert") == []
    assert all("while" in str(jaxpr) for jaxpr in jaxprs)


def traced(policy, experts, layout, **settings):
    """The jaxprs of an iteration and of an evaluation."""
    experiment = Experiment(
        model=ModelConfig(1, 16, 2, 16, 8, (True,)),
        experts=experts,
        placement=policy,
        topology=Topology(num_expert_ranks=4),
        optimizer=OptimizerConfig(layout=layout),
        sequences_per_microbatch=4,
        **settings,
    )
    spec = make_step_spec(experiment)
    state = jax.eval_shape(lambda: spec.fill_slots(spec.init(jax.random.key(0))))
    types = (jnp.int32, jnp.int32, jnp.bool_)
    batch = Batch(*(jax.ShapeDtypeStruct((1, 2, 4, 1, 8), dtype) for dtype in types))
    return [jax.make_jaxpr(step)(state, batch) for step in (single_worker_step(spec), single_worker_evaluation(spec))]


def test_with_capacity_by_rank_only_the_grouped_matmul_counts_its_own_rows(varying_branches):
    """Its loops hold no collective, so no device waits; under vmap they run as long as the longest."""
    found = varying_branches(traced(Packed(), ExpertConfig(4, 2, capacity=RankCapacity()), "decoupled")[0], "expert")
    assert found
    for sentence in found:
        assert sentence.startswith("while where")


@pytest.mark.parametrize("source", ["own index", "own data"])
def test_the_walk_finds_a_branch_that_differs(varying_branches, source):
    live = live_mesh(Topology(num_expert_ranks=4), "emulated")

    def per_rank(ranked, shared):
        chosen = lax.axis_index("expert") if source == "own index" else ranked[0].astype(jnp.int32)
        uniform = lax.cond(shared[0] > 0, lambda x: x + 1, lambda x: x, ranked)
        return lax.cond(chosen > 1, lambda x: x + 1, lambda x: x, uniform)

    arguments = (jnp.ones((1, 3, 4)), jnp.ones((1, 2)))
    jaxpr = jax.make_jaxpr(live.per_rank(per_rank, (RANKED, SHARED), RANKED))(*arguments)
    assert len(varying_branches(jaxpr, "expert")) == 1
