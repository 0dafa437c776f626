"""The layer and its exchange in a step of somebody else's: an axis of theirs, and shard_map's default checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from swift.experts.config import ExactCapacity, ExpertConfig, RankCapacity
from swift.experts.layer import expert_parallel_moe
from swift.experts.reference import reference_moe
from swift.experts.weight_exchange import fetch, materialize, to_slices

pytestmark = pytest.mark.usefixtures("strict_types")

N, E, S, T, D = 4, 6, 3, 8, 4
AXIS = PartitionSpec("theirs")


@pytest.mark.parametrize(
    "more",
    [
        {"capacity": RankCapacity()},
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({}, {"capacity": RankCapacity(spare_rounds=None)})),
        pytest.param({"capacity": ExactCapacity()}, marks=pytest.mark.slow),
        pytest.param({"capacity": ExactCapacity(), "top_k": 6}, marks=pytest.mark.slow),  # a token goes to a rank once
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_oracle(more):
    """Checks those of the input, the router's logits, and the experts' weights, of which each rank holds a slice."""
    config = ExpertConfig(E, S, **{"top_k": 2, "aux_loss_coefficient": 0.1} | more)
    random = np.random.default_rng(0)
    draw = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    logits, x, weights, goal = draw(N * T, E), draw(N * T, D), draw(1, E, D * D), draw(N * T, D)
    logits[:, 1] += 2
    placement = random.permutation(np.concatenate([np.arange(E), random.integers(0, E, N * S - E)])).astype(np.int32)
    placement, valid = placement.reshape(N, S), np.ones(N * T, bool)

    def of_rank(slices_1Ew, logits_TE, x_TD, goal_TD):
        def experts_of(slots_SW):
            return lambda rows, matmul: matmul(rows, slots_SW[:, : D * D].reshape(S, D, D))

        if config.capacity.fetches_weights:
            apply = lambda placement: experts_of(fetch(slices_1Ew[0], placement, "float32", axis="theirs"))  # noqa: E731
        else:
            apply = experts_of(materialize(slices_1Ew, placement[None], axis="theirs")[0])
        y, aux, load = expert_parallel_moe(config, logits_TE, x_TD, valid[:T], placement, apply, axis="theirs")
        loss = jnp.sum((y - goal_TD) ** 2) + config.auxiliary_weight * aux
        return jax.lax.psum(loss, "theirs"), jax.lax.psum(load.dropped_E, "theirs")

    mesh = Mesh(jax.devices()[:N], ("theirs",))
    specs = PartitionSpec(None, "theirs"), AXIS, AXIS, AXIS
    of_ranks = jax.shard_map(of_rank, mesh=mesh, in_specs=specs, out_specs=(PartitionSpec(), PartitionSpec()))

    def parallel(weights, logits, x):
        slices = to_slices(weights, N)
        return of_ranks(slices.reshape(1, N * E, -1), logits, x, goal)

    def plain(weights, logits, x):
        apply = lambda x: jnp.einsum("td,edf->etf", x, weights.reshape(E, D, D))  # noqa: E731
        y, aux, load = reference_moe(config, logits, x, valid, jnp.asarray(placement), N, apply)
        return jnp.sum((y - goal) ** 2) + config.auxiliary_weight * aux, load.dropped_E

    found, expected = (
        jax.jit(jax.value_and_grad(function, (0, 1, 2), has_aux=True))(weights, logits, x)
        for function in (parallel, plain)
    )
    (loss, dropped), gradients = found
    (expected_loss, expected_dropped), expected_gradients = expected
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_array_equal(dropped, expected_dropped)
    for one, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=2e-4, atol=2e-4)
