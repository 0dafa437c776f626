"""The expert-parallel layer of one rank: route, send, compute in slots, send back.

Legend: T tokens of this rank, E classes, N ranks, S slots of a rank, C rows of a slot for one source, D model dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax

from swift.experts.config import ExpertConfig
from swift.experts.dispatch import assign_rows, combine, send
from swift.experts.routing import balance_loss, route
from swift.mesh import EXPERT_AXIS


class Load(NamedTuple):
    """The metadata of one layer and micro-batch: (token, choice) pairs by class."""

    popularity_E: jax.Array  # int32, before any drop
    dropped_E: jax.Array  # int32


def expert_parallel_moe(
    config: ExpertConfig,
    logits_TE: jax.Array,
    x_TD: jax.Array,
    valid_T: jax.Array,
    placement_NS: jax.Array,
    apply_slots: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, Load]:
    """Runs this rank's tokens through the experts of all ranks.

    Args:
        config: the experts.
        logits_TE: the router's output for this rank's tokens.
        x_TD: what the experts read.
        valid_T: False for padding, which goes nowhere and counts in nothing.
        placement_NS: the class in every slot.
        apply_slots: rows ``[S, N * C, D]`` of this rank's slots -> their experts' outputs, same shape.

    Returns:
        (y_TD, this rank's part of the auxiliary loss, this rank's load). Tokens that were dropped have y = 0.
    """
    num_ranks, num_slots = placement_NS.shape
    num_tokens, dim = x_TD.shape
    rows_per_slot = config.rows_per_slot(num_tokens, num_ranks)

    routing = route(logits_TE, config.top_k)
    dispatch = assign_rows(routing.choices_TK, valid_T, placement_NS, config.num_classes, rows_per_slot)

    sent_NSCD = send(x_TD, dispatch, config.top_k).reshape(num_ranks, num_slots, rows_per_slot, dim)
    received_NSCD = lax.all_to_all(sent_NSCD, EXPERT_AXIS, split_axis=0, concat_axis=0)
    rows_SRD = received_NSCD.swapaxes(0, 1).reshape(num_slots, num_ranks * rows_per_slot, dim)
    done_NSCD = apply_slots(rows_SRD).reshape(num_slots, num_ranks, rows_per_slot, dim).swapaxes(0, 1)
    returned_NSCD = lax.all_to_all(done_NSCD, EXPERT_AXIS, split_axis=0, concat_axis=0)
    y_TD = combine(returned_NSCD.reshape(-1, dim), dispatch, routing.gates_TK)

    popularity_E = lax.psum(dispatch.popularity_E, EXPERT_AXIS)
    tokens = popularity_E.sum() // config.top_k
    aux = balance_loss(routing.probs_TE, valid_T, popularity_E, tokens, config.top_k)
    return y_TD, aux, Load(dispatch.popularity_E, dispatch.dropped_E)
