"""A stage with its backward pass: F, B and W of a chunk as loops over its blocks, with stashes between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from swift.experts.layer import Load
from swift.pipeline.runtime.metrics import no_load
from swift.pipeline.runtime.stage.block import Extras, block_function, block_of, block_shapes
from swift.pipeline.runtime.stage.forward_stage import ForwardStage
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.split_backward.split import SplitStage, split
from swift.pipeline.stacks import Index, add_to_layer, put, put_layer, take_layer
from swift.pipeline.stage_weights import Layers

Stash: TypeAlias = dict[bool, tuple[jax.Array, ...]]
"""Values kept between two ops, ``[slots, layers, ...]`` each, by whether a block is a mixture of experts."""


@dataclass(frozen=True)
class Stage(ForwardStage):
    """The blocks of a stage as F, B and W.

    Attributes:
        kinds: a split block of each kind that the model has, by whether it is a mixture of experts.
    """

    kinds: Mapping[bool, SplitStage]

    @classmethod
    def of(
        cls,
        spec: StepSpec,
        layers: Layers,
        extras: Extras,
        x: Any,
        holding: Index,
        axis_env: Sequence[tuple[str, int]] | None = None,
    ) -> "Stage":
        """Splits a block of each kind.

        Args:
            spec: step spec.
            layers: weights of the stage's blocks, or their shapes.
            extras: extras of the stage, or their shapes.
            x: the stage's input ``[B, T, D]``, or its shape.
            holding: see the class; it is data.
            axis_env: see ``split``.
        """
        kinds = {
            is_moe: split(block_function(spec), *block_shapes(layers, extras, is_moe), x, axis_env) for is_moe in layers
        }
        return cls(spec, holding, kinds)

    def stack_size(self, is_moe: bool) -> int:
        """Layers of a stash for blocks of a kind: as many as a chunk has."""
        return self.spec.chunks.ops.stack_size(is_moe)

    @property
    def stash_shapes(self) -> tuple[dict[bool, Any], ...]:
        """See ``ForwardStage``."""
        return self.b_shapes, self.h_shapes, self.w_shapes

    @property
    def b_shapes(self) -> dict[bool, Any]:
        """Shapes ``[layers, ...]`` of the arrays that F keeps for B alone, by kind."""
        return {is_moe: self._stacked(is_moe, one.b_shapes) for is_moe, one in self.kinds.items()}

    @property
    def h_shapes(self) -> dict[bool, Any]:
        """Shapes ``[layers, ...]`` of the arrays that F keeps for W; B may read them, too."""
        return {is_moe: self._stacked(is_moe, one.h_shapes) for is_moe, one in self.kinds.items()}

    @property
    def w_shapes(self) -> dict[bool, Any]:
        """Shapes ``[layers, ...]`` of the arrays that B keeps for W."""
        return {is_moe: self._stacked(is_moe, one.w_shapes) for is_moe, one in self.kinds.items()}

    def _stacked(self, is_moe: bool, shapes: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(jax.ShapeDtypeStruct((self.stack_size(is_moe), *leaf.shape), leaf.dtype) for leaf in shapes)

    def forward(
        self,
        layers: Layers,
        extras: Extras,
        x: Float[Array, "B T D"],
        b_stash: Stash,
        held: Stash,
        slots: tuple[Index, Index],
        chunk: Index,
    ) -> tuple[jax.Array, jax.Array, Load, Stash, Stash]:
        """F: (y_BTD, auxiliary loss, load[L, E], and the stashes with what it keeps in the slots given for each)."""

        def block(is_moe: bool, layer: Index, kept: Index, common: Any, own: Any) -> Any:
            (x, aux), (load, b_stash, held) = common, own
            (y, more), counts, for_b, for_w = self.kinds[is_moe].forward(*block_of(layers, extras, is_moe, layer), x)
            load, common = put(load, layer, counts) if is_moe else load, (y, aux + more)
            return common, (load, put_layer(b_stash, slots[0], kept, for_b), put_layer(held, slots[1], kept, for_w))

        own = {is_moe: (load, b_stash[is_moe], held[is_moe]) for is_moe, load in self._no_load.items()}
        start = x, jnp.zeros((), self.spec.accumulate_dtype)
        (y, aux), own = self._each(chunk, block, start, own)
        b_stash, held = ({is_moe: of_kind[index] for is_moe, of_kind in own.items()} for index in (1, 2))
        return y, aux, own[True][0] if True in own else no_load(self.spec), b_stash, held

    def backward_input(
        self,
        layers: Layers,
        extras: Extras,
        b_stash: Stash,
        held: Stash,
        w_stash: Stash,
        slots: tuple[Index, Index, Index],
        d_out: tuple[jax.Array, jax.Array],
        chunk: Index,
    ) -> tuple[jax.Array, Stash]:
        """B: the cotangent of x, and W's stash with what it keeps; ``slots`` of the three stashes."""

        def block(is_moe: bool, layer: Index, kept: Index, dy: jax.Array, w_stash: Any) -> Any:
            stashed = take_layer(b_stash[is_moe], slots[0], kept), take_layer(held[is_moe], slots[1], kept)
            given = block_of(layers, extras, is_moe, layer)
            dx, for_w = self.kinds[is_moe].backward_input(*given, *stashed, (dy, d_out[1]))
            return dx, put_layer(w_stash, slots[2], kept, for_w)

        return self._each(chunk, block, d_out[0], w_stash, reverse=True)

    def backward_weight(
        self,
        layers: Layers,
        extras: Extras,
        held: Stash,
        w_stash: Stash,
        slots: tuple[Index, Index],
        totals: Layers,
        chunk: Index,
    ) -> Layers:
        """W: the totals with the gradients of the weights added; ``slots`` of the two stashes."""

        def block(is_moe: bool, layer: Index, kept: Index, common: Any, totals: Any) -> Any:
            stashed = take_layer(held[is_moe], slots[0], kept), take_layer(w_stash[is_moe], slots[1], kept)
            gradients = self.kinds[is_moe].backward_weight(*block_of(layers, extras, is_moe, layer), *stashed)
            return common, add_to_layer(totals, layer, gradients)

        return self._each(chunk, block, (), totals)[1]

    def backward(
        self,
        layers: Layers,
        extras: Extras,
        b_stash: Stash,
        held: Stash,
        d_out: tuple[jax.Array, jax.Array],
        totals: Layers,
        chunk: Index,
    ) -> tuple[jax.Array, Layers]:
        """B and W of every block at once, from slot 0 of the stashes: the cotangent of x, and the totals."""

        def block(is_moe: bool, layer: Index, kept: Index, dy: jax.Array, totals: Any) -> Any:
            for_b, for_w = take_layer(b_stash[is_moe], 0, kept), take_layer(held[is_moe], 0, kept)
            given, one = block_of(layers, extras, is_moe, layer), self.kinds[is_moe]
            dx, more_for_w = one.backward_input(*given, for_b, for_w, (dy, d_out[1]))
            return dx, add_to_layer(totals, layer, one.backward_weight(*given, for_w, more_for_w))

        return self._each(chunk, block, d_out[0], totals, reverse=True)
