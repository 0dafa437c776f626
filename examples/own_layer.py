"""Trains one layer of experts in a custom training step, on a mesh with a custom axis.

    python examples/own_layer.py

Each rank holds 1/N of the weights and moments of every expert. In every step ``materialize`` brings each slot the
weights of its expert, ``expert_parallel_moe`` runs the tokens, and the placement follows their popularity.
E: experts, N: ranks, S: slots of a rank, T: tokens of a rank, D: model dim, F: hidden dim of an expert.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from swift.experts import ExpertConfig, RankCapacity, expert_parallel_moe, materialize, to_slices
from swift.experts.placement import Symi

N, E, S, T, D, F = 4, 8, 3, 256, 16, 32
CONFIG = ExpertConfig(num_classes=E, slots_per_rank=S, top_k=2, capacity=RankCapacity(), aux_loss_coefficient=1e-2)


def loss_of_rank(router_DE, slices_1Ew, x_TD, wanted_TD, placement_NS):
    """One rank's term of the loss, and the popularity of the experts on all ranks."""
    slots_SW = materialize(slices_1Ew, placement_NS[None], axis="mine")[0]
    ups, downs = slots_SW[:, : D * F].reshape(S, D, F), slots_SW[:, D * F : 2 * D * F].reshape(S, F, D)

    def experts(rows, matmul):
        return matmul(jax.nn.gelu(matmul(rows, ups)), downs)

    valid_T = jnp.ones(len(x_TD), bool)
    y_TD, aux, load = expert_parallel_moe(CONFIG, x_TD @ router_DE, x_TD, valid_T, placement_NS, experts, axis="mine")
    error = jnp.mean((y_TD - wanted_TD) ** 2) / N + CONFIG.auxiliary_weight * aux
    counts_2E = jax.lax.psum(jnp.stack([load.popularity_E, load.dropped_E]), "mine")
    return jax.lax.psum(error, "mine"), counts_2E


def main() -> None:
    """Prints the loss and the share of dropped pairs every ten steps."""
    mesh = Mesh(jax.devices()[:N], ("mine",))
    specs = P(), P(None, "mine"), P("mine"), P("mine"), P()
    of_ranks = jax.shard_map(loss_of_rank, mesh=mesh, in_specs=specs, out_specs=(P(), P()))
    optimizer, policy = optax.adam(1e-2), Symi()

    @jax.jit
    def step(weights, state, placement_LNS, x, wanted):
        (loss, counts_2E), gradients = jax.value_and_grad(
            lambda weights: of_ranks(*weights, x, wanted, placement_LNS[0]), has_aux=True
        )(weights)
        updates, state = optimizer.update(gradients, state)
        placement_LNS, _ = policy(counts_2E[:1], placement_LNS, ())
        return optax.apply_updates(weights, updates), state, placement_LNS, loss, counts_2E

    keys = jax.random.split(jax.random.key(0), 4)
    experts_1EW = 0.2 * jax.random.normal(keys[0], (1, E, 2 * D * F))
    slices_1NEw = to_slices(experts_1EW, N)
    weights = 0.1 * jax.random.normal(keys[1], (D, E)), slices_1NEw.reshape(1, N * E, -1)
    placement_LNS, _ = policy.init(1, E, N, S)
    state = optimizer.init(weights)
    x = jax.random.normal(keys[2], (N * T, D))
    wanted = jnp.sin(x @ jax.random.normal(keys[3], (D, D)))
    for number in range(51):
        weights, state, placement_LNS, loss, counts_2E = step(weights, state, placement_LNS, x, wanted)
        if number % 10 == 0:
            print(f"step {number}: loss {loss:.4f}, {counts_2E[1].sum() / counts_2E[0].sum():.1%} dropped")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", N)
    main()
