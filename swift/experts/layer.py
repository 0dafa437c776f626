"""Expert-parallel layer on one rank: routes tokens, sends them, computes in slots, sends the results back.

Legend: T tokens of this rank, E experts, N ranks, S slots of a rank, C rows of a slot for one source rank, P rows of
the grouped matmul, D model dim.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from swift.experts.capacity.balanced_flow import ReplicaMap
from swift.experts.capacity.exact import assign_slots
from swift.experts.capacity.rank import admit_tokens, received_pairs, sent_pairs, slot_groups, slots_of_pairs
from swift.experts.capacity.slot import Pairs, apply_gates, assign_rows, combine, send
from swift.experts.capacity.token_exchange import exchange_rows
from swift.experts.capacity.token_rows import TokenRows, copy_to_slots, repeat_tokens, sum_over_slots, sum_tokens
from swift.experts.capacity.token_split import Slots, by_source
from swift.experts.config import ExactCapacity, ExpertConfig, RankCapacity, SlotCapacity
from swift.experts.grouped_matmul import block_rows, grouped_matmul, padded_rows
from swift.experts.routing import RouterTokens, Routing, TokenNoise, first_choice_loss, renormalize_gates, z_loss
from swift.mesh.per_rank import EXPERT_AXIS

Matmul = Callable[[jax.Array, jax.Array], jax.Array]
"""Function (rows, weights of this rank's slots ``[S, X, Y]``) -> rows, each multiplied by its slot's weights."""

ApplySlots = Callable[[jax.Array, Matmul], jax.Array]
"""Function (rows ``[..., D]``, matmul to use) -> the experts' outputs, of the same shape."""

FetchSlots = Callable[[jax.Array], ApplySlots]
"""Function (the expert in every slot, int32 ``[N, S]``) -> function that applies the experts in this rank's slots."""


class Load(NamedTuple):
    """Load of one layer in one micro-batch, in (token, choice) pairs by expert."""

    popularity_E: jax.Array  # int32, before any drop
    dropped_E: jax.Array  # int32
    overflowed_E: jax.Array  # int32, dropped because a buffer, not the rank, was full; zero with capacity by slot
    numbers: Any = ()  # the router's own numbers by name; an empty tuple for none


def expert_parallel_moe(
    config: ExpertConfig,
    logits_TX: Float[Array, "T X"],
    x_TD: Float[Array, "T D"],
    valid_T: Bool[Array, " T"],
    placement_NS: Int[Array, "N S"],
    apply_slots: ApplySlots | FetchSlots,
    router_state: Mapping[str, jax.Array] = MappingProxyType({}),
    noise: TokenNoise | None = None,
    *,
    axis: str = EXPERT_AXIS,
) -> tuple[Float[Array, "T D"], Float[Array, ""], Load]:
    """Runs this rank's tokens through the experts of all ranks.

    Args:
        config: settings of the experts.
        logits_TX: output of the router's matrix for this rank's tokens.
        x_TD: input of the experts.
        valid_T: False for padding, which is neither sent nor counted.
        placement_NS: int32, the expert in every slot, in any order; with exact capacity only its shape matters.
        apply_slots: function that applies the experts in this rank's slots; it must map zero rows to zeros and treat
            rows independently. With exact capacity, a function that fetches the weights for a given placement and
            returns such a function.
        router_state: state of the layer's router, see ``Router.init_state``.
        noise: random numbers for the router, if it draws any in this pass.
        axis: name of the mesh axis of the ranks.

    Returns:
        (y_TD, this rank's term of the auxiliary loss, this rank's load). Dropped tokens have y = 0. The training loss
        is the loss of all tokens plus ``config.auxiliary_weight`` times the sum of all ranks' terms.
    """
    placement_NS = jnp.asarray(placement_NS)  # a NumPy placement becomes a constant of the program
    routed, capacity = RouterTokens(logits_TX, x_TD, valid_T, router_state, noise), config.capacity
    routing = config.route(routed)
    pairs = Pairs.of(
        routing.choices_TK,
        valid_T,
        config.num_classes,
        routing.is_choice_TK,
        first_choices_first=capacity.follows_deepspeed,
    )
    tokens = _Tokens(config, routing, pairs, x_TD, placement_NS, axis)
    if isinstance(capacity, SlotCapacity):
        y_TD, load = _dispatch_by_slot(capacity, tokens, cast(ApplySlots, apply_slots))
        popularity_E = lax.psum(pairs.popularity_E, axis)
    else:
        # Rank and exact capacity decide from all ranks' counts. With capacity by slot the decision is local, and only
        # the sum over ranks is needed.
        counts_NE = lax.all_gather(pairs.popularity_E, axis)
        popularity_E = jnp.sum(counts_NE, axis=0, dtype=jnp.int32)
        if isinstance(capacity, ExactCapacity):
            y_TD, load = _dispatch_exact(capacity, tokens, counts_NE, cast(FetchSlots, apply_slots))
        else:
            y_TD, load = _dispatch_by_rank(capacity, tokens, counts_NE, cast(ApplySlots, apply_slots))
    load = load._replace(numbers=routing.numbers)
    if capacity.follows_deepspeed:
        return y_TD, first_choice_loss(routing, valid_T, placement_NS.shape[0]), load
    if routing.is_choice_TK is None:  # counted from the choices, which spares a collective
        num_tokens = popularity_E.sum() // config.most_choices
    else:
        num_tokens = lax.psum(jnp.sum(valid_T, dtype=jnp.int32), axis)
    return y_TD, auxiliary_loss(config, routing, routed, popularity_E, num_tokens), load


def auxiliary_loss(
    config: ExpertConfig,
    routing: Routing,
    tokens: RouterTokens,
    popularity_E: Int[Array, " E"],
    num_tokens: jax.Array,
) -> Float[Array, ""]:
    """Computes this rank's term of the auxiliary loss: the router's loss, plus the z-loss if it has a weight."""
    router_share, z_share = config.auxiliary_shares
    loss = config.router.auxiliary_loss(routing, tokens, popularity_E, num_tokens, config.top_k)
    if not z_share:
        return loss
    logits_TE = tokens.logits_TX[:, : config.num_classes]  # a router may have more outputs
    return router_share * loss + z_share * z_loss(logits_TE, tokens.valid_T, num_tokens)


class _Tokens(NamedTuple):
    """A rank's tokens, their routing and the placement: the input of every dispatch function."""

    config: ExpertConfig
    routing: Routing
    pairs: Pairs
    x_TD: jax.Array
    placement_NS: jax.Array
    axis: str


def _dispatch_by_slot(capacity: SlotCapacity, tokens: _Tokens, apply_slots: ApplySlots) -> tuple[jax.Array, Load]:
    """Runs the experts with capacity by slot: each slot has C rows for every source rank."""
    config, routing, pairs, x_TD, placement_NS, axis = tokens
    (num_ranks, num_slots), (num_tokens, dim) = placement_NS.shape, x_TD.shape
    rows_per_slot = capacity.rows_per_slot(config, num_tokens, num_ranks)
    dispatch, dropped_E = assign_rows(pairs, placement_NS, rows_per_slot, capacity.rows_per_class(config, num_tokens))
    gates_TK = routing.gates_TK
    if capacity.follows_deepspeed:
        kept_A = dispatch.row_of_pair_A < dispatch.pair_of_row_R.size
        gates_TK = renormalize_gates(gates_TK, kept_A.reshape(gates_TK.shape))

    sent_NSCD = send(x_TD, dispatch, config.most_choices).reshape(num_ranks, num_slots, rows_per_slot, dim)
    received_NSCD = _exchange(sent_NSCD, axis)
    rows_SRD = received_NSCD.swapaxes(0, 1).reshape(num_slots, num_ranks * rows_per_slot, dim)
    done_SRD = apply_slots(rows_SRD, jnp.matmul)
    done_NSCD = done_SRD.reshape(num_slots, num_ranks, rows_per_slot, dim).swapaxes(0, 1)
    y_TD = combine(_exchange(done_NSCD, axis).reshape(-1, dim), dispatch, gates_TK)
    return y_TD, Load(pairs.popularity_E, dropped_E, jnp.zeros_like(dropped_E))


def _dispatch_by_rank(
    capacity: RankCapacity, tokens: _Tokens, counts_NE: jax.Array, apply_slots: ApplySlots
) -> tuple[jax.Array, Load]:
    """Runs the experts with capacity by rank: a rank's slots share its rows, and each source has a buffer per rank."""
    rank = lax.axis_index(tokens.axis)
    served = admit_tokens(tokens.config, counts_NE, tokens.placement_NS, len(tokens.x_TD))
    y_TD = _in_shared_rows(capacity, tokens, served.kept_NDS, apply_slots)
    return y_TD, Load(tokens.pairs.popularity_E, served.dropped_NE[rank], served.overflowed_NE[rank])


def _dispatch_exact(
    capacity: ExactCapacity, tokens: _Tokens, counts_NE: jax.Array, fetch: FetchSlots
) -> tuple[jax.Array, Load]:
    """Runs the experts with exact capacity: slots and their weights follow the routing of the micro-batch."""
    num_ranks, num_slots = tokens.placement_NS.shape
    slots = assign_slots(jnp.sum(counts_NE, axis=0, dtype=jnp.int32), num_ranks, num_slots)
    holders = ReplicaMap.of(slots.placement_NS)
    split_NM = by_source(counts_NE, slots.tokens_NS, holders, num_ranks * tokens.config.most_pairs(len(tokens.x_TD)))
    kept_NDS = split_NM.reshape(num_ranks, num_ranks, num_slots)

    def apply_slots(rows_PD: jax.Array, matmul: Matmul) -> jax.Array:
        # Only the products of the experts' matmuls are saved; the backward pass fetches the weights again. Saved
        # weights would take the memory of all slots for every micro-batch.
        def run(rows_PD: jax.Array, placement_NS: jax.Array) -> jax.Array:
            return fetch(placement_NS)(rows_PD, matmul)

        return jax.checkpoint(run, policy=_is_product)(rows_PD, slots.placement_NS)

    y_TD = _in_shared_rows(capacity, tokens._replace(placement_NS=slots.placement_NS), kept_NDS, apply_slots)
    none_E = jnp.zeros_like(tokens.pairs.popularity_E)
    return y_TD, Load(tokens.pairs.popularity_E, none_E, none_E)


def _is_product(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether remat saves a value: a product of the grouped matmul, which is a ``cond`` over platforms."""
    return primitive.name in ("cond", "while", "ragged_dot_general")


def _in_shared_rows(
    capacity: RankCapacity | ExactCapacity, tokens: _Tokens, kept_NDS: jax.Array, apply_slots: ApplySlots
) -> jax.Array:
    """Runs the experts when a rank's slots share one array of rows, given the pairs from each source to each slot."""
    config, routing, pairs, x_TD, placement_NS, axis = tokens
    (num_ranks, num_slots), num_tokens = placement_NS.shape, x_TD.shape[0]
    rank, slots = lax.axis_index(axis), Slots.of(placement_NS, config.num_classes)
    num_served = capacity.rows_per_rank(config, num_tokens, num_ranks)
    buffers = capacity.buffers(config, num_tokens, num_ranks)
    num_rows, block = padded_rows(num_served, num_slots), block_rows(num_served, num_slots)
    kept_NS = kept_NDS[rank]
    groups = slot_groups(kept_NDS[:, rank], block)
    matmul = partial(grouped_matmul, groups=groups, block=block)

    if capacity.deduplicates_tokens(config, num_ranks):
        slot_TK = slots_of_pairs(pairs, kept_NS, slots).reshape(routing.gates_TK.shape)
        rows = TokenRows.of(
            slot_TK,
            routing.gates_TK,
            groups,
            num_ranks=num_ranks,
            num_received=min(num_ranks * num_tokens, num_served),
            num_rows=num_rows,
            axis=axis,
        )
        rows_YD = exchange_rows(repeat_tokens(x_TD, num_ranks), rows.sent, rows.received, rows.counts_NN, buffers, axis)
        done_PD = apply_slots(copy_to_slots(rows_YD, rows.slot_rows), matmul)
        done_YD = sum_over_slots(done_PD, rows.gates_YK, rows.slot_rows)
        done_XD = exchange_rows(done_YD, rows.received, rows.sent, rows.counts_NN.T, buffers, axis)
        return sum_tokens(done_XD, num_ranks)

    counts_NN = jnp.sum(kept_NDS, axis=2, dtype=jnp.int32)
    sent, received = sent_pairs(pairs, kept_NS, slots), received_pairs(kept_NDS[:, rank], groups, num_rows)
    rows_AD = jnp.repeat(x_TD, config.most_choices, axis=0)
    rows_PD = exchange_rows(rows_AD, sent, received, counts_NN, buffers, axis)
    done_AD = exchange_rows(apply_slots(rows_PD, matmul), received, sent, counts_NN.T, buffers, axis)
    return apply_gates(done_AD, routing.gates_TK)


def _exchange(rows: jax.Array, axis: str) -> jax.Array:
    """Sends one chunk of ``[N, ...]`` to every rank, and returns the chunks received from every rank."""
    return lax.all_to_all(rows, axis, split_axis=0, concat_axis=0)
