"""A stage with its backward pass: F, B and W of a chunk as loops over its blocks, with stashes between them.

A block is a layer: attention, then a dense network or a mixture of experts. It is a function of its weights, of inputs
without a gradient, and of the residual stream. ``ForwardStage`` runs the blocks of a chunk forward only; ``Stage``
splits a block of each kind and runs its three parts.

The weights, gradients and stashes of all blocks of a kind are stacked. So a program contains every kind of block once,
whatever the number of blocks, and selects the kind of the next block at run time. Each kind has its own ``lax.cond``,
around the buffers that only this kind updates, since XLA copies a buffer that two branches update. The expert ranks of
a worker take the same branch.

Legend: B sequences of this rank, T positions, D model dim, L MoE layers of the stage, N ranks, S slots, E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from swift.experts.layer import Load, expert_parallel_moe
from swift.experts.routing import TokenNoise
from swift.experts.state_layouts import FetchedPerMicrobatch
from swift.models.parameters import Group
from swift.pipeline import scopes
from swift.pipeline.split_backward.partition import Stashes
from swift.pipeline.split_backward.split import SplitStage, split
from swift.pipeline.state import DeviceBatch, Index, Layers, add_to_layer, layer_of, put, put_layer, take_layer
from swift.pipeline.step.metrics import no_load
from swift.pipeline.step.spec import StepSpec

_BlockFunction = Callable[[Mapping[str, Any], "Extras", jax.Array], tuple[tuple[jax.Array, jax.Array], Load | None]]
"""Function (a block's weights, its extras, x_BTD) -> ((y_BTD, auxiliary loss), load[E] or None for a dense block)."""

_Each = Callable[[bool, Index, Index, Any, Any], tuple[Any, Any]]
"""Function (kind, index in the worker's stack, index in the stashes, common values, the kind's values) -> both values
after the block."""


class Extras(NamedTuple):
    """Inputs of a block without a gradient; B and W receive them again, so they are never stashed."""

    placement: Any  # int32[L, N, S] of a stage, [N, S] of a block; None for a dense block
    valid_BT: jax.Array
    document_BT: Any = None  # int32[B, T], see ``GPT.documents``, or None
    keys_B2: Any = None  # uint32, random key of each sequence; None if the router draws no noise
    layer: Any = None  # int32[L] of a stage, [] of a block: the layer's number among all that have experts, with keys

    @classmethod
    def of(cls, spec: StepSpec, placement_LNS: jax.Array, data: DeviceBatch, holding: Index) -> "Extras":
        """Returns the extras of a stage for a micro-batch; ``holding`` as in ``ForwardStage``."""
        layer = None if data.keys is None else jnp.asarray(spec.model_index["router"], jnp.int32)[holding]
        return cls(placement_LNS, data.valid, spec.gpt.documents(data.inputs), data.keys, layer)

    @property
    def noise(self) -> TokenNoise | None:
        """Random numbers for the router of a block."""
        return None if self.keys_B2 is None else TokenNoise.of(self.keys_B2, self.layer, self.valid_BT.shape[1])


def block_function(spec: StepSpec) -> _BlockFunction:
    """Returns the function that applies a block; the groups in the weights determine the kind of block."""
    gpt, experts, layout = spec.gpt, spec.gpt.groups.get("expert"), spec.layouts.get("expert")

    def block(weights: Mapping[str, Any], extras: Extras, x_BTD: jax.Array) -> Any:
        def moe(logits_TX: Any, x_TD: Any, valid_T: Any, state: Any, router_state: Any) -> Any:
            assert experts is not None
            if isinstance(layout, FetchedPerMicrobatch):
                apply = partial(_fetched, experts, layout, state)
            else:
                apply = experts.module(state)
            return expert_parallel_moe(
                spec.experts, logits_TX, x_TD, valid_T, extras.placement, apply, router_state, extras.noise
            )

        wrap = jax.checkpoint if spec.remat == "attention" else None
        y_BTD, aux, load = gpt.block(weights, x_BTD, extras.valid_BT, moe, extras.document_BT, wrap)
        return (y_BTD, aux), load

    return jax.checkpoint(block) if spec.remat == "block" else block


def _fetched(experts: Group, layout: FetchedPerMicrobatch, slices_Ew: jax.Array, placement_NS: jax.Array) -> Any:
    """Returns the experts of this rank's slots, with weights fetched for a placement."""
    return experts.module(experts.unpack(layout.fetch(slices_Ew, placement_NS)))


def block_shapes(layers: Layers, extras: Extras, is_moe: bool) -> tuple[Any, Extras]:
    """Returns the shapes of a block's weights and extras, from the stage's arrays or their shapes."""
    return jax.eval_shape(lambda layers, extras: _block_of(layers, extras, is_moe, 0), layers, extras)


def _block_of(layers: Layers, extras: Extras, is_moe: bool, layer: Index) -> tuple[Any, Extras]:
    """Returns a block's weights and extras, given its index in the stack of its kind."""
    if is_moe:
        placement, number = layer_of((extras.placement, extras.layer), layer)
        of_block = extras._replace(placement=placement, layer=number)
    else:
        of_block = extras._replace(placement=None, keys_B2=None, layer=None)
    return layer_of(layers[is_moe], layer), of_block


@dataclass(frozen=True)
class ForwardStage:
    """Blocks of a stage without a backward pass, for use under ``jit`` and inside ``shard_map`` or ``vmap``.

    Attributes:
        spec: step spec.
        holding: number of the worker's holding, an int or int32[].
    """

    spec: StepSpec
    holding: Index

    @property
    def stash_shapes(self) -> Stashes:
        """Shapes ``[layers, ...]`` of the arrays in each stash: a tuple for each block kind."""
        return Stashes({}, {}, {})

    def evaluate(
        self, layers: Layers, extras: Extras, x: Float[Array, "B T D"], chunk: Index
    ) -> tuple[jax.Array, jax.Array, Load]:
        """Runs a chunk forward: returns (y_BTD, auxiliary loss, load[L, E])."""
        apply = block_function(self.spec)

        def block(is_moe: bool, layer: Index, _: Index, common: Any, load: Any) -> Any:
            x, aux = common
            (y, more), counts = apply(*_block_of(layers, extras, is_moe, layer), x)
            return (y, aux + more), put(load, layer, counts) if is_moe else load

        start = x, jnp.zeros((), self.spec.accumulate_dtype)
        (y, aux), loads = self._each(chunk, block, start, self._no_load)
        return y, aux, loads.get(True, no_load(self.spec))

    @property
    def _no_load(self) -> dict[bool, Any]:
        return {is_moe: no_load(self.spec) if is_moe else () for is_moe in self.spec.chunks.kinds}

    @jax.named_scope(scopes.BLOCKS)
    def _each(
        self, chunk: Index, block: _Each, common: Any, by_kind: dict[bool, Any], *, reverse: bool = False
    ) -> tuple[Any, Any]:
        """Applies a function to a chunk's blocks in turn, on the common values and those of each block's kind."""
        cut, (only, *other_kinds) = self.spec.chunks.ops, self.spec.chunks.kinds
        first = {is_moe: self._first_layer(is_moe, chunk) for is_moe in (only, *other_kinds)}

        def run_block(index: Index, common: Any, by_kind: dict[bool, Any]) -> Any:
            if not other_kinds:
                common, kind_values = block(only, first[only] + index, index, common, by_kind[only])
                return common, {only: kind_values}
            index_in_kind, is_moe = (jnp.asarray(table)[chunk, index] for table in (cut.stack_index_PB, cut.is_moe_PB))
            for kind in (only, *other_kinds):
                runs = is_moe if kind else ~is_moe
                same = lambda *same: same  # noqa: E731
                common, kind_values = lax.cond(
                    runs, partial(block, kind, first[kind] + index_in_kind, index_in_kind), same, common, by_kind[kind]
                )
                by_kind = by_kind | {kind: kind_values}
            return common, by_kind

        # If all chunks have equally many blocks, the trip count is static.
        is_even = len(set(cut.sizes)) == 1
        count = cut.sizes[0] if is_even else jnp.asarray(cut.sizes, jnp.int32)[chunk]
        if is_even and count == 1 and not other_kinds:
            return run_block(0, common, by_kind)

        def step(i: jax.Array, loop: Any) -> Any:
            index = i.astype(jnp.int32)
            return run_block(count - 1 - index if reverse else index, *loop)

        return lax.fori_loop(0, count, step, (common, by_kind))

    def _first_layer(self, is_moe: bool, chunk: Index) -> Index:
        """Returns the index at which a chunk's first block of a kind lies in the worker's stack."""
        chunks = self.spec.chunks
        return 0 if chunks.is_one_chunk_per_worker else jnp.asarray(chunks.first_layers(is_moe))[self.holding, chunk]


@dataclass(frozen=True)
class Stage(ForwardStage):
    """Blocks of a stage, split into F, B and W.

    Attributes:
        kinds: split block for each kind in the model, by whether the kind is a mixture of experts.
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
            holding: see ``ForwardStage``.
            axis_env: see ``split``.
        """
        kinds = {
            is_moe: split(block_function(spec), *block_shapes(layers, extras, is_moe), x, axis_env) for is_moe in layers
        }
        return cls(spec, holding, kinds)

    def stack_size(self, is_moe: bool) -> int:
        """Returns how many layers a stash has for blocks of a kind: the largest number in any chunk."""
        return self.spec.chunks.ops.stack_size(is_moe)

    @property
    def stash_shapes(self) -> Stashes:
        """See ``ForwardStage``."""

        def by_kind(index: int) -> dict[bool, Any]:
            return {is_moe: self._stacked(is_moe, split.stash_shapes[index]) for is_moe, split in self.kinds.items()}

        return Stashes(*map(by_kind, range(3)))

    def _stacked(self, is_moe: bool, shapes: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(jax.ShapeDtypeStruct((self.stack_size(is_moe), *leaf.shape), leaf.dtype) for leaf in shapes)

    def forward(
        self,
        layers: Layers,
        extras: Extras,
        x: Float[Array, "B T D"],
        stashes: Stashes,
        slots: Stashes,
        chunk: Index,
    ) -> tuple[jax.Array, jax.Array, Load, Stashes]:
        """Runs F: returns (y_BTD, auxiliary loss, load[L, E], stashes with F's values in the given slots).

        Stashed arrays are ``[slots, layers, ...]``.
        """

        def block(is_moe: bool, layer: Index, stash_index: Index, common: Any, kind_values: Any) -> Any:
            (x, aux), (load, *stashed) = common, kind_values
            (y, more), counts, *values = self.kinds[is_moe].forward(*_block_of(layers, extras, is_moe, layer), x)
            load, common = put(load, layer, counts) if is_moe else load, (y, aux + more)
            written = zip(stashed, slots[:2], values, strict=True)
            return common, (load, *(put_layer(stash, slot, stash_index, new) for stash, slot, new in written))

        by_kind = {
            is_moe: (load, stashes.for_b[is_moe], stashes.for_b_and_w[is_moe]) for is_moe, load in self._no_load.items()
        }
        start = x, jnp.zeros((), self.spec.accumulate_dtype)
        (y, aux), by_kind = self._each(chunk, block, start, by_kind)
        for_b, for_b_and_w = (
            {is_moe: kind_values[index] for is_moe, kind_values in by_kind.items()} for index in (1, 2)
        )
        load = by_kind[True][0] if True in by_kind else no_load(self.spec)
        return y, aux, load, Stashes(for_b, for_b_and_w, stashes.for_w)

    def backward_input(
        self,
        layers: Layers,
        extras: Extras,
        stashes: Stashes,
        slots: Stashes,
        d_out: tuple[jax.Array, jax.Array],
        chunk: Index,
    ) -> tuple[jax.Array, Any]:
        """Runs B: returns (cotangent of x, W's stash with B's values in its slot)."""

        def block(is_moe: bool, layer: Index, stash_index: Index, dy: jax.Array, for_w: Any) -> Any:
            for_b, for_b_and_w = _taken(stashes[:2], slots, is_moe, stash_index)
            weights_and_extras = _block_of(layers, extras, is_moe, layer)
            dx, values = self.kinds[is_moe].backward_input(*weights_and_extras, for_b, for_b_and_w, (dy, d_out[1]))
            return dx, put_layer(for_w, slots.for_w, stash_index, values)

        return self._each(chunk, block, d_out[0], stashes.for_w, reverse=True)

    def backward_weight(
        self,
        layers: Layers,
        extras: Extras,
        stashes: Stashes,
        slots: Stashes,
        totals: Layers,
        chunk: Index,
    ) -> Layers:
        """Runs W: returns ``totals`` plus the gradients of the weights."""

        def block(is_moe: bool, layer: Index, stash_index: Index, common: Any, totals: Any) -> Any:
            stashed = _taken(stashes[1:], slots[1:], is_moe, stash_index)
            gradients = self.kinds[is_moe].backward_weight(*_block_of(layers, extras, is_moe, layer), *stashed)
            return common, add_to_layer(totals, layer, gradients)

        return self._each(chunk, block, (), totals)[1]

    def backward(
        self,
        layers: Layers,
        extras: Extras,
        stashes: Stashes,
        d_out: tuple[jax.Array, jax.Array],
        totals: Layers,
        chunk: Index,
    ) -> tuple[jax.Array, Layers]:
        """Runs every block's B and W together, from stash slot 0: returns (cotangent of x, updated totals)."""

        def block(is_moe: bool, layer: Index, stash_index: Index, dy: jax.Array, totals: Any) -> Any:
            for_b, for_b_and_w = _taken(stashes[:2], (0, 0), is_moe, stash_index)
            weights_and_extras, split = _block_of(layers, extras, is_moe, layer), self.kinds[is_moe]
            dx, for_w = split.backward_input(*weights_and_extras, for_b, for_b_and_w, (dy, d_out[1]))
            return dx, add_to_layer(totals, layer, split.backward_weight(*weights_and_extras, for_b_and_w, for_w))

        return self._each(chunk, block, d_out[0], totals, reverse=True)


def _taken(stashes: Sequence[Any], slots: Sequence[Index], is_moe: bool, layer: Index) -> list[tuple]:
    """Returns one layer's values from each stash, for a block of a kind."""
    return [take_layer(stash[is_moe], slot, layer) for stash, slot in zip(stashes, slots[: len(stashes)], strict=True)]
