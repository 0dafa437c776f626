"""Single-device reference model: the oracle for parallel runs, and the computation of exported models.

Legend: B sequences, T positions, D model dim, V vocabulary, E experts, N ranks, S slots.
"""

from typing import Any

import jax
import jax.numpy as jnp

from swift.experts.config import ExpertConfig
from swift.experts.layer import Load
from swift.experts.reference import dropless_moe, reference_moe
from swift.experts.routing import TokenNoise
from swift.models.gpt import GPT, MoeFunction, Weights


def plain_sums(
    gpt: GPT,
    experts: ExpertConfig,
    weights: Weights,
    placement_LNS: jax.Array,
    inputs_BT: jax.Array,
    labels_BT: jax.Array,
    valid_BT: jax.Array,
    keys_B: jax.Array | None = None,
    loss_weight_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, list[Load]]:
    """Computes loss and loads of a whole micro-batch on one device, dropping the same tokens as the ranks would.

    Args:
        gpt: architecture of the model.
        experts: settings of the experts.
        weights: weights of whole experts: ``gpt.unpack`` of ``[layers, experts, size]``.
        placement_LNS: int32, the expert in every slot of every rank.
        inputs_BT: int32, input tokens of all ranks, in rank order.
        labels_BT: int32, tokens to predict.
        valid_BT: False for padding.
        keys_B: uint32[B, 2], random key of each sequence, for a router that draws noise.
        loss_weight_BT: weight of each token's loss; None if all are 1.

    Returns:
        (weighted sum of the tokens' losses, auxiliary loss, load of each MoE layer).
    """
    num_ranks = placement_LNS.shape[1]

    def moe(layer: int, logits_TX: Any, x_TD: Any, valid_T: Any, state: Any, router_state: Any) -> Any:
        outputs = _all_classes(gpt, state)
        noise = None if keys_B is None else TokenNoise.of(keys_B, layer, inputs_BT.shape[1])
        tokens = logits_TX, x_TD, valid_T
        return reference_moe(experts, *tokens, placement_LNS[layer], num_ranks, outputs, router_state, noise)

    x_BTD, documents_BT = gpt.embed(weights, inputs_BT), gpt.documents(inputs_BT)
    x_BTD, aux, loads = gpt.stage(weights, gpt.config.moe_layers, x_BTD, valid_BT, moe, documents_BT)
    return gpt.head_loss(weights, x_BTD, labels_BT, valid_BT, loss_weight_BT), aux, loads


def plain_logits(gpt: GPT, experts: ExpertConfig, weights: Weights, tokens_BT: jax.Array) -> jax.Array:
    """Computes logits_BTV as at inference, where every token is served by all experts that it is routed to."""
    moe, valid_BT = dropless(gpt, experts), jnp.ones(tokens_BT.shape, bool)
    x_BTD, documents_BT = gpt.embed(weights, tokens_BT), gpt.documents(tokens_BT)
    x_BTD, _, _ = gpt.stage(weights, gpt.config.moe_layers, x_BTD, valid_BT, moe, documents_BT)
    return gpt.logits(weights, x_BTD)


def dropless(gpt: GPT, experts: ExpertConfig) -> MoeFunction:
    """Returns the function that computes a mixture of experts without dropping tokens; its loads are zeros."""
    none = jnp.zeros(experts.num_classes, jnp.int32)

    def moe(layer: int, logits_TX: Any, x_TD: Any, valid_T: Any, state: Any, router_state: Any) -> Any:
        del layer, valid_T
        y_TD = dropless_moe(experts, logits_TX, x_TD, _all_classes(gpt, state), router_state)
        return y_TD, jnp.zeros((), logits_TX.dtype), Load(none, none, none)

    return moe


def _all_classes(gpt: GPT, state: Any) -> Any:
    def apply(x_TD: jax.Array) -> jax.Array:
        return gpt.groups["expert"].module(state)(jnp.broadcast_to(x_TD, (gpt.num_classes, *x_TD.shape)))

    return apply
