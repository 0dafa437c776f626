"""Expert layer without a capacity limit: rows are sorted by expert, and experts without tokens cost nothing.

Legend: T tokens, E experts, S experts of a rank, K choices, A = T * K pairs, P rows of the grouped matmul, D model dim.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from swift.experts.capacity.slot import Dispatch, Pairs, combine, inverse_rows, send
from swift.experts.config import ExpertConfig
from swift.experts.grouped_matmul import Groups, block_rows, grouped_matmul, padded_rows
from swift.experts.layer import ApplySlots
from swift.experts.routing import RouterTokens, renormalize_gates
from swift.mesh.per_rank import EXPERT_AXIS


def sorted_moe(
    config: ExpertConfig,
    logits_TX: Float[Array, "T X"],
    x_TD: Float[Array, "T D"],
    valid_T: Bool[Array, " T"],
    apply_slots: ApplySlots,
    router_state: Mapping[str, jax.Array] = MappingProxyType({}),
    num_ranks: int = 1,
) -> Float[Array, "T D"]:
    """Runs tokens through their experts, of which there is one replica each, without dropping any token.

    Args:
        config: settings of the experts.
        logits_TX: output of the router's matrix.
        x_TD: input of the experts.
        valid_T: False for padding, whose output is zero.
        apply_slots: function that applies this rank's experts in their order; it must map zero rows to zeros and treat
            rows independently.
        router_state: state of the layer's router.
        num_ranks: number of expert ranks. If there are several, every rank has the same tokens and an equal share of
            the experts, in expert order; it computes its own experts' contribution, and a sum over the axis ``expert``
            completes the result.

    Returns:
        y_TD, equal to the result of ``dropless_moe``.
    """
    routing = config.route(RouterTokens(logits_TX, x_TD, valid_T, router_state), alone=True)
    pairs = Pairs.of(routing.choices_TK, valid_T, config.num_classes, routing.is_choice_TK)
    num_own = config.num_classes // num_ranks
    first = lax.axis_index(EXPERT_AXIS) * num_own if num_ranks > 1 else 0
    slot_A = pairs.class_A - first
    is_own_A = pairs.valid_A & (slot_A >= 0) & (slot_A < num_own)
    popularity_S = lax.dynamic_slice_in_dim(pairs.popularity_E, first, num_own)

    num_pairs = x_TD.shape[0] * config.most_choices
    block, num_rows = block_rows(num_pairs, num_own), padded_rows(num_pairs, num_own)
    size_S = -(-popularity_S // block) * block
    groups = Groups(jnp.cumsum(size_S, dtype=jnp.int32) - size_S, size_S)
    row_of_pair_A = jnp.where(is_own_A, groups.start_S[slot_A] + pairs.position_A, num_rows)
    dispatch = Dispatch(row_of_pair_A, inverse_rows(row_of_pair_A, num_rows))
    done_PD = apply_slots(
        send(x_TD, dispatch, config.most_choices), partial(grouped_matmul, groups=groups, block=block)
    )
    gates_TK = routing.gates_TK
    if config.capacity.follows_deepspeed:
        gates_TK = renormalize_gates(gates_TK, jnp.ones(gates_TK.shape, bool))
    y_TD = combine(done_PD, dispatch, gates_TK)
    return lax.psum(y_TD, EXPERT_AXIS) if num_ranks > 1 else y_TD
