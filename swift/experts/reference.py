"""Reference expert layer without mesh, slots or rows: the test oracle.

The reference applies every expert to every token. With capacity by slot it shares only the router with the parallel
layer and restates the drop rule from its definition. With capacity by rank it also shares ``admit_tokens``, which
decides from the counts how many tokens of each source and expert are served.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from swift.experts.capacity.rank import admit_tokens
from swift.experts.config import ExactCapacity, ExpertConfig, RankCapacity
from swift.experts.layer import Load, auxiliary_loss
from swift.experts.routing import (
    RouterTokens,
    Routing,
    TokenNoise,
    count_choices,
    first_choice_loss,
    renormalize_gates,
)


def reference_moe(
    config: ExpertConfig,
    logits_TX: Float[Array, "T X"],
    x_TD: Float[Array, "T D"],
    valid_T: Bool[Array, " T"],
    placement_NS: Int[Array, "N S"],
    num_ranks: int,
    apply_classes: Callable[[jax.Array], jax.Array],
    router_state: Mapping[str, jax.Array] = MappingProxyType({}),
    noise: TokenNoise | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, ""], Load]:
    """Computes the result of ``expert_parallel_moe`` over all ranks on a single device.

    Args:
        config: settings of the experts.
        logits_TX: output of the router's matrix for the tokens of all ranks, in rank order.
        x_TD: input of the experts.
        valid_T: False for padding.
        placement_NS: int32, the expert in every slot; with capacity by slot only the replica counts matter.
        num_ranks: number of source ranks, over which the tokens are split evenly.
        apply_classes: function from ``[T, D]`` to the output of every expert on every token, ``[E, T, D]``.
        router_state: state of the layer's router.
        noise: random numbers for the router.

    Returns:
        (y_TD, auxiliary loss, load).
    """
    by_rank = _by_rank(RouterTokens(logits_TX, x_TD, valid_T, router_state, noise), num_ranks)
    routings = [config.route(tokens) for tokens in by_rank]  # a router may compare the tokens of a rank
    numbers = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *(one.numbers for one in routings))
    routing = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(one._replace(numbers=()) for one in routings))
    choices_NTK = jnp.stack([one.choices_TK for one in routings])
    valid_NT = valid_T.reshape(num_ranks, -1)
    wanted_NTK = valid_NT[..., None] & jnp.ones_like(choices_NTK, bool)
    if routing.is_choice_TK is not None:
        wanted_NTK = wanted_NTK & routing.is_choice_TK.reshape(choices_NTK.shape)
    counts_NE = jax.vmap(count_choices, (0, 0, None))(choices_NTK, wanted_NTK, config.num_classes)
    room_NE, overflowed_E = _room(config, counts_NE, placement_NS, x_TD.shape[0] // num_ranks)

    def kept_by_rank(choices_TK: jax.Array, wanted_TK: jax.Array, room_E: jax.Array) -> jax.Array:
        class_A, valid_A = choices_TK.reshape(-1), wanted_TK.reshape(-1)
        token_A, choice_A = jnp.divmod(jnp.arange(class_A.size), choices_TK.shape[1])
        order_A = (
            choice_A * len(choices_TK) + token_A if config.capacity.follows_deepspeed else jnp.arange(class_A.size)
        )
        earlier_AA = (class_A[:, None] == class_A[None]) & (order_A[None] < order_A[:, None]) & valid_A[None, :]
        return (valid_A & (earlier_AA.sum(axis=1) < room_E[class_A])).reshape(choices_TK.shape)

    kept_TK = jax.vmap(kept_by_rank)(choices_NTK, wanted_NTK, room_NE).reshape(routing.choices_TK.shape)
    popularity_E = jnp.sum(counts_NE, axis=0, dtype=jnp.int32)
    kept_E = count_choices(routing.choices_TK, kept_TK, config.num_classes)
    if config.capacity.follows_deepspeed:
        routing = routing._replace(gates_TK=renormalize_gates(routing.gates_TK, kept_TK))
    y_TD = _weigh_classes(routing, kept_TK, apply_classes(x_TD))
    if config.capacity.follows_deepspeed:
        losses = [first_choice_loss(one, valid_T, num_ranks) for one, valid_T in zip(routings, valid_NT, strict=True)]
    else:
        pairs = zip(routings, by_rank, strict=True)
        losses = [auxiliary_loss(config, *pair, popularity_E, valid_T.sum()) for pair in pairs]
    aux = sum(losses[1:], losses[0])
    return y_TD, aux, Load(popularity_E, popularity_E - kept_E, overflowed_E, numbers)


def _by_rank(tokens: RouterTokens, num_ranks: int) -> list[RouterTokens]:
    """Divides the tokens of all ranks, and their random keys, among the ranks."""

    def parts(leaf: jax.Array) -> list[jax.Array]:
        return jnp.split(leaf, num_ranks)

    noise = tokens.noise
    keys = [None] * num_ranks if noise is None else parts(noise.keys_B)
    return [
        RouterTokens(logits_TX, x_TD, valid_T, tokens.state, None if noise is None else replace(noise, keys_B=keys_B))
        for logits_TX, x_TD, valid_T, keys_B in zip(*map(parts, tokens[:3]), keys, strict=True)
    ]


def _room(
    config: ExpertConfig, counts_NE: jax.Array, placement_NS: jax.Array, local_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Computes (pairs that each source may send to each expert, pairs of each expert dropped by a full buffer)."""
    capacity, num_ranks = config.capacity, len(placement_NS)
    if isinstance(capacity, ExactCapacity):
        return counts_NE, jnp.zeros(config.num_classes, jnp.int32)
    if isinstance(capacity, RankCapacity):
        served = admit_tokens(config, counts_NE, placement_NS, local_tokens)
        return counts_NE - served.dropped_NE, jnp.sum(served.overflowed_NE, axis=0, dtype=jnp.int32)
    replicas_E = jnp.sum(jnp.arange(config.num_classes)[:, None] == placement_NS.reshape(1, -1), axis=1)
    room_E = replicas_E * capacity.rows_per_slot(config, local_tokens, num_ranks)
    class_rows = capacity.rows_per_class(config, local_tokens)
    room_E = room_E if class_rows is None else jnp.full_like(room_E, class_rows)
    return jnp.broadcast_to(room_E, counts_NE.shape), jnp.zeros(config.num_classes, jnp.int32)


def dropless_moe(
    config: ExpertConfig,
    logits_TX: Float[Array, "T X"],
    x_TD: Float[Array, "T D"],
    apply_classes: Callable[[jax.Array], jax.Array],
    router_state: Mapping[str, jax.Array] = MappingProxyType({}),
) -> Float[Array, "T D"]:
    """Computes the expert layer with no token dropped, as at inference."""
    valid_T = jnp.ones(len(x_TD), bool)
    routing = config.route(RouterTokens(logits_TX, x_TD, valid_T, router_state), alone=True)
    kept_TK = jnp.ones(routing.choices_TK.shape, bool)
    if config.capacity.follows_deepspeed:
        routing = routing._replace(gates_TK=renormalize_gates(routing.gates_TK, kept_TK))
    return _weigh_classes(routing, kept_TK, apply_classes(x_TD))


def _weigh_classes(
    routing: Routing, kept_TK: Bool[Array, "T K"], outputs_ETD: Float[Array, "E T D"]
) -> Float[Array, "T D"]:
    """Sums the expert outputs of a token's kept choices, weighted by their gates."""
    is_class_TKE = jax.nn.one_hot(routing.choices_TK, outputs_ETD.shape[0], dtype=routing.gates_TK.dtype)
    weights_TK = jnp.where(kept_TK, routing.gates_TK, jnp.zeros_like(routing.gates_TK))
    weights_TE = jnp.einsum("tk,tke->te", weights_TK, is_class_TKE)
    return jnp.einsum("te,etd->td", weights_TE.astype(outputs_ETD.dtype), outputs_ETD)
