"""A block as a function of its weights, of inputs without a gradient, and of the residual stream.

A block is a layer: attention, then a dense network or a mixture of experts.

Legend: B sequences of this rank, T positions, D model dim, L MoE layers of the stage, N ranks, S slots, E experts.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax

from swift.experts.layer import Load, expert_parallel_moe
from swift.experts.state_layouts import Fetched, Layout
from swift.models.parameter_groups import Group
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.stacks import Index, layer_of
from swift.pipeline.stage_weights import Layers
from swift.pipeline.train_state import DeviceBatch

BlockFunction = Callable[[Mapping[str, Any], "Extras", jax.Array], tuple[tuple[jax.Array, jax.Array], Load | None]]
"""A block: (its weights, its extras, x_BTD) -> ((y_BTD, auxiliary loss), load[E] or None)."""


class Extras(NamedTuple):
    """Inputs without a gradient; B and W get them again, so they are never stashed."""

    placement: Any  # int32[L, N, S] of a stage, [N, S] of a block, or None of a dense block
    valid_BT: jax.Array
    document_BT: Any = None  # int32[B, T], see ``GPT.documents``, or None

    @classmethod
    def of(cls, spec: StepSpec, placement_LNS: jax.Array, data: DeviceBatch) -> "Extras":
        """The extras of a stage for a micro-batch."""
        return cls(placement_LNS, data.valid, spec.gpt.documents(data.inputs))


def block_function(spec: StepSpec) -> BlockFunction:
    """A block, of the kind that its weights are of."""
    gpt, experts, layout = spec.gpt, spec.gpt.groups.get("expert"), spec.layouts.get("expert")

    def block(weights: Mapping[str, Any], extras: Extras, x_BTD: jax.Array) -> Any:
        def moe(logits_TE: Any, x_TD: Any, valid_T: Any, state: Any, bias_E: Any = None) -> Any:
            assert experts is not None
            apply = partial(_fetched, experts, layout, state) if spec.experts.is_exact else experts.module(state)
            return expert_parallel_moe(spec.experts, logits_TE, x_TD, valid_T, extras.placement, apply, bias_E)

        wrap = jax.checkpoint if spec.remat == "attention" else None
        y_BTD, aux, load = gpt.block(weights, x_BTD, extras.valid_BT, moe, extras.document_BT, wrap)
        return (y_BTD, aux), load

    return jax.checkpoint(block) if spec.remat == "block" else block


def _fetched(experts: Group, layout: Layout | None, slices_Ew: jax.Array, placement_NS: jax.Array) -> Any:
    """The experts of this rank's slots, with the weights that a placement puts there."""
    assert isinstance(layout, Fetched)
    return experts.module(experts.unpack(layout.fetch(slices_Ew, placement_NS)))


def block_shapes(layers: Layers, extras: Extras, is_moe: bool) -> tuple[Any, Extras]:
    """Shapes of the weights and extras of a block, from those of a stage or their shapes."""
    return jax.eval_shape(lambda layers, extras: block_of(layers, extras, is_moe, 0), layers, extras)


def block_of(layers: Layers, extras: Extras, is_moe: bool, layer: Index) -> tuple[Any, Extras]:
    """Weights and extras of a block, by its index in the stack of its kind."""
    placement = layer_of(extras.placement, layer) if is_moe else None
    return layer_of(layers[is_moe], layer), extras._replace(placement=placement)
