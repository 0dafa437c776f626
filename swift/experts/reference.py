"""Reference expert layer without mesh, slots or rows: the test oracle.

The reference applies every expert to every token. With capacity by slot it shares only the router with the parallel
layer and restates the drop rule from its definition. With capacity by rank it also shares ``admit_tokens``, which
decides from the counts how many tokens of each source and expert are served.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from swift.experts.capacity.rank import admit_tokens
from swift.experts.config import ExactCapacity, ExpertConfig, RankCapacity
from swift.experts.layer import Load, auxiliary_loss
from swift.experts.routing import Routing, count_choices, first_choice_loss, renormalize_gates, route


def reference_moe(
    config: ExpertConfig,
    logits_TE: Float[Array, "T E"],
    x_TD: Float[Array, "T D"],
    valid_T: Bool[Array, " T"],
    placement_NS: Int[Array, "N S"],
    num_ranks: int,
    apply_classes: Callable[[jax.Array], jax.Array],
    bias_E: Float[Array, " E"] | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, ""], Load]:
    """Computes the result of ``expert_parallel_moe`` over all ranks on a single device.

    Args:
        config: settings of the experts.
        logits_TE: router output for the tokens of all ranks, in rank order.
        x_TD: input of the experts.
        valid_T: False for padding.
        placement_NS: int32, the expert in every slot; with capacity by slot only the replica counts matter.
        num_ranks: number of source ranks, over which the tokens are split evenly.
        apply_classes: function from ``[T, D]`` to the output of every expert on every token, ``[E, T, D]``.
        bias_E: see ``route``.

    Returns:
        (y_TD, auxiliary loss, load).
    """
    routing = route(logits_TE, config.gating, bias_E)
    choices_NTK = routing.choices_TK.reshape(num_ranks, -1, config.top_k)
    valid_NT = valid_T.reshape(num_ranks, -1)
    wanted_NTK = valid_NT[..., None] & jnp.ones_like(choices_NTK, bool)
    counts_NE = jax.vmap(count_choices, (0, 0, None))(choices_NTK, wanted_NTK, config.num_classes)
    room_NE, overflowed_E = _room(config, counts_NE, placement_NS, x_TD.shape[0] // num_ranks)

    def kept_by_rank(choices_TK: jax.Array, valid_T: jax.Array, room_E: jax.Array) -> jax.Array:
        class_A, valid_A = choices_TK.reshape(-1), jnp.repeat(valid_T, config.top_k)
        token_A, choice_A = jnp.divmod(jnp.arange(class_A.size), config.top_k)
        order_A = choice_A * valid_T.size + token_A if config.capacity.follows_deepspeed else jnp.arange(class_A.size)
        earlier_AA = (class_A[:, None] == class_A[None]) & (order_A[None] < order_A[:, None]) & valid_A[None, :]
        return (valid_A & (earlier_AA.sum(axis=1) < room_E[class_A])).reshape(choices_TK.shape)

    kept_TK = jax.vmap(kept_by_rank)(choices_NTK, valid_NT, room_NE).reshape(routing.choices_TK.shape)
    popularity_E = jnp.sum(counts_NE, axis=0, dtype=jnp.int32)
    kept_E = count_choices(routing.choices_TK, kept_TK, config.num_classes)
    if config.capacity.follows_deepspeed:
        routing = routing._replace(gates_TK=renormalize_gates(routing.gates_TK, kept_TK))
    y_TD = _weigh_classes(routing, kept_TK, apply_classes(x_TD))
    if config.capacity.follows_deepspeed:
        ranked = jax.tree.map(lambda leaf: leaf.reshape(num_ranks, -1, *leaf.shape[1:]), (routing, valid_T))
        aux = jnp.sum(jax.vmap(lambda routing, valid_T: first_choice_loss(routing, valid_T, num_ranks))(*ranked))
    else:
        aux = auxiliary_loss(config, routing, logits_TE, valid_T, popularity_E, valid_T.sum())
    return y_TD, aux, Load(popularity_E, popularity_E - kept_E, overflowed_E)


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
    logits_TE: Float[Array, "T E"],
    x_TD: Float[Array, "T D"],
    apply_classes: Callable[[jax.Array], jax.Array],
    bias_E: Float[Array, " E"] | None = None,
) -> Float[Array, "T D"]:
    """Computes the expert layer with no token dropped, as at inference."""
    routing = route(logits_TE, config.gating, bias_E)
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
