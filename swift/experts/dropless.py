"""The experts of one device without a limit: rows sorted by expert, no work for experts that nobody asks for.

Legend: T tokens, E experts, K choices, P rows of the grouped matmul, D model dim.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from swift.experts.config import ExpertConfig
from swift.experts.grouped_matmul import Groups, block_rows, grouped_matmul, padded_rows
from swift.experts.layer import ApplySlots
from swift.experts.routing import normalize_kept, route
from swift.experts.slot_capacity import Dispatch, Pairs, combine, inverse_rows, send


def sorted_moe(
    config: ExpertConfig,
    logits_TE: Float[Array, "T E"],
    x_TD: Float[Array, "T D"],
    valid_T: Bool[Array, " T"],
    apply_slots: ApplySlots,
    bias_E: Float[Array, " E"] | None = None,
) -> Float[Array, "T D"]:
    """Runs tokens through the experts of one device, all of which are there, each once; none is dropped.

    Args:
        config: settings of the experts.
        logits_TE: router output.
        x_TD: input of the experts.
        valid_T: False for padding, whose output is zero.
        apply_slots: function that applies the experts in their order; it must map zero rows to zeros and treat rows
            independently.
        bias_E: see ``route``.

    Returns:
        y_TD, as ``dropless_moe`` computes it.
    """
    routing = route(logits_TE, config.gating, bias_E)
    pairs = Pairs.of(routing.choices_TK, valid_T, config.num_classes)
    num_pairs = x_TD.shape[0] * config.top_k
    block, num_rows = block_rows(num_pairs, config.num_classes), padded_rows(num_pairs, config.num_classes)
    size_E = -(-pairs.popularity_E // block) * block
    groups = Groups(jnp.cumsum(size_E, dtype=jnp.int32) - size_E, size_E)
    row_of_pair_A = jnp.where(pairs.valid_A, groups.start_S[pairs.class_A] + pairs.position_A, num_rows)
    dispatch = Dispatch(row_of_pair_A, inverse_rows(row_of_pair_A, num_rows))
    done_PD = apply_slots(send(x_TD, dispatch, config.top_k), partial(grouped_matmul, groups=groups, block=block))
    gates_TK = routing.gates_TK
    if config.is_deepspeed:
        gates_TK = normalize_kept(gates_TK, jnp.ones(gates_TK.shape, bool))
    return combine(done_PD, dispatch, gates_TK)
