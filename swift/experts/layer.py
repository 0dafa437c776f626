"""The expert-parallel layer of one rank: route tokens, send them, compute in slots, send the results back.

Legend: T tokens of this rank, E experts, N ranks, S slots of a rank, C rows of a slot for one source, Q rows of a
buffer between two ranks, P rows of the grouped matmul, D model dim.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from swift.experts.config import ExpertConfig
from swift.experts.grouped_matmul import block_rows, grouped_matmul, padded_rows
from swift.experts.rank_capacity import Slots, gather_by_slot, rows_in_buffers, serve
from swift.experts.routing import Routing, balance_loss, route
from swift.experts.slot_capacity import Dispatch, Pairs, assign_rows, combine, inverse_rows, send, take_rows
from swift.mesh import EXPERT_AXIS

Matmul = Callable[[jax.Array, jax.Array], jax.Array]
"""(rows, weights of this rank's slots ``[S, X, Y]``) -> each row multiplied by the weights of its slot."""

ApplySlots = Callable[[jax.Array, Matmul], jax.Array]
"""(rows ``[..., D]``, matmul to use) -> the outputs of the slots' experts, same shape."""


class Load(NamedTuple):
    """Load of one layer in one micro-batch: (token, choice) pairs counted by expert."""

    popularity_E: jax.Array  # int32, before any drop
    dropped_E: jax.Array  # int32
    overflowed_E: jax.Array  # int32, dropped because a buffer was full, not the rank; zero with capacity by slot


def expert_parallel_moe(
    config: ExpertConfig,
    logits_TE: Float[Array, "T E"],
    x_TD: Float[Array, "T D"],
    valid_T: Bool[Array, " T"],
    placement_NS: Int[Array, "N S"],
    apply_slots: ApplySlots,
) -> tuple[Float[Array, "T D"], Float[Array, ""], Load]:
    """Runs this rank's tokens through the experts of all ranks.

    Args:
        config: settings of the experts.
        logits_TE: router output for this rank's tokens.
        x_TD: input of the experts.
        valid_T: False for padding, which is neither sent nor counted.
        placement_NS: int32, the expert in every slot, in any order.
        apply_slots: function that applies the experts in this rank's slots; it must map zero rows to zeros and treat
            rows independently.

    Returns:
        (y_TD, this rank's part of the auxiliary loss, this rank's load). Dropped tokens have y = 0.
    """
    routing = route(logits_TE, config.gating)
    pairs = Pairs.of(routing.choices_TK, valid_T, config.num_classes)
    if config.capacity == "rank":
        counts_NE = lax.all_gather(pairs.popularity_E, EXPERT_AXIS)
        popularity_E = jnp.sum(counts_NE, axis=0, dtype=jnp.int32)
        y_TD, load = _by_rank(config, routing, pairs, counts_NE, x_TD, placement_NS, apply_slots)
    else:
        y_TD, load = _by_slot(config, routing, pairs, x_TD, placement_NS, apply_slots)
        popularity_E = lax.psum(pairs.popularity_E, EXPERT_AXIS)
    tokens = popularity_E.sum() // config.top_k
    return y_TD, balance_loss(routing.probs_TE, valid_T, popularity_E, tokens, config.top_k), load


def _by_slot(
    config: ExpertConfig,
    routing: Routing,
    pairs: Pairs,
    x_TD: jax.Array,
    placement_NS: jax.Array,
    apply_slots: ApplySlots,
) -> tuple[jax.Array, Load]:
    """Runs the experts with capacity by slot: each slot has C rows for every source rank."""
    num_ranks, num_slots = placement_NS.shape
    rows_per_slot, dim = config.rows_per_slot(x_TD.shape[0], num_ranks), x_TD.shape[1]
    dispatch, dropped_E = assign_rows(pairs, placement_NS, rows_per_slot)

    sent_NSCD = send(x_TD, dispatch, config.top_k).reshape(num_ranks, num_slots, rows_per_slot, dim)
    received_NSCD = _exchange(sent_NSCD)
    rows_SRD = received_NSCD.swapaxes(0, 1).reshape(num_slots, num_ranks * rows_per_slot, dim)
    done_SRD = apply_slots(rows_SRD, jnp.matmul)
    done_NSCD = done_SRD.reshape(num_slots, num_ranks, rows_per_slot, dim).swapaxes(0, 1)
    y_TD = combine(_exchange(done_NSCD).reshape(-1, dim), dispatch, routing.gates_TK)
    return y_TD, Load(pairs.popularity_E, dropped_E, jnp.zeros_like(dropped_E))


def _by_rank(
    config: ExpertConfig,
    routing: Routing,
    pairs: Pairs,
    counts_NE: jax.Array,
    x_TD: jax.Array,
    placement_NS: jax.Array,
    apply_slots: ApplySlots,
) -> tuple[jax.Array, Load]:
    """Runs the experts with capacity by rank: a rank's slots share its rows, and a source has a buffer per rank."""
    num_ranks, num_slots = placement_NS.shape
    num_tokens, dim = x_TD.shape
    num_rows, buffer = (rows(num_tokens, num_ranks) for rows in (config.rows_per_rank, config.rows_per_buffer))
    own, served = lax.axis_index(EXPERT_AXIS), serve(config, counts_NE, placement_NS, num_tokens)
    slots = Slots.of(placement_NS, config.num_classes)

    row_of_pair = rows_in_buffers(pairs, served.kept_NDS[own], slots, buffer)
    dispatch = Dispatch(row_of_pair, inverse_rows(row_of_pair, num_ranks * buffer))
    received_NQD = _exchange(send(x_TD, dispatch, config.top_k).reshape(num_ranks, buffer, dim))

    block = block_rows(num_rows, num_slots)
    at = gather_by_slot(served.kept_NDS[:, own], buffer, padded_rows(num_rows, num_slots), block)
    rows_PD = take_rows(received_NQD.reshape(-1, dim), at.received_of_row_P, at.row_of_received_X)
    done_PD = apply_slots(rows_PD, partial(grouped_matmul, groups=at.groups, block=block))
    done_NQD = take_rows(done_PD, at.row_of_received_X, at.received_of_row_P).reshape(num_ranks, buffer, dim)
    y_TD = combine(_exchange(done_NQD).reshape(-1, dim), dispatch, routing.gates_TK)
    return y_TD, Load(pairs.popularity_E, served.dropped_NE[own], served.overflowed_NE[own])


def _exchange(rows: jax.Array) -> jax.Array:
    """Sends rows ``[N, ...]``, one part for every rank, and returns the parts received from every rank."""
    return lax.all_to_all(rows, EXPERT_AXIS, split_axis=0, concat_axis=0)
