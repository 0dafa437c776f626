"""The loop over a stage's blocks, one program for each kind of block, and the stage's forward pass alone.

The weights, gradients and stashes of blocks of a kind are stacked. So a program holds every kind of block
once, whatever the number of blocks, and which kind comes next is data. Each kind has a ``lax.cond`` of its own, around
what only this kind updates: a buffer that two branches update is copied by XLA. The expert ranks of a worker take the
same branch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from swift.experts.layer import Load
from swift.pipeline import scopes
from swift.pipeline.runtime.metrics import no_load
from swift.pipeline.runtime.stage.block import Extras, block_function, block_of
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.stacks import Index, put
from swift.pipeline.stage_weights import Layers

Each = Callable[[bool, Index, Index, Any, Any], tuple[Any, Any]]
"""(kind, index in the worker's stack, in the stashes, common values, values of the kind) -> both after a block."""


@dataclass(frozen=True)
class ForwardStage:
    """The blocks of a stage without a backward pass, for use under ``jit`` and inside ``shard_map`` or ``vmap``.

    Attributes:
        spec: step spec.
        holding: which of the holdings is the worker's, an int or int32[].
    """

    spec: StepSpec
    holding: Index

    @property
    def stash_shapes(self) -> tuple[dict[bool, Any], ...]:
        """Shapes ``[layers, ...]`` by kind of what is kept from F to B, from F to W, and from B to W."""
        return {}, {}, {}

    def evaluate(
        self, layers: Layers, extras: Extras, x: Float[Array, "B T D"], chunk: Index
    ) -> tuple[jax.Array, jax.Array, Load]:
        """Runs a chunk forwards: (y_BTD, auxiliary loss, load[L, E])."""
        apply = block_function(self.spec)

        def block(is_moe: bool, layer: Index, _: Index, common: Any, load: Any) -> Any:
            x, aux = common
            (y, more), counts = apply(*block_of(layers, extras, is_moe, layer), x)
            return (y, aux + more), put(load, layer, counts) if is_moe else load

        start = x, jnp.zeros((), self.spec.accumulate_dtype)
        (y, aux), loads = self._each(chunk, block, start, self._no_load)
        return y, aux, loads.get(True, no_load(self.spec))

    @property
    def _no_load(self) -> dict[bool, Any]:
        return {is_moe: no_load(self.spec) if is_moe else () for is_moe in self.spec.chunks.kinds}

    @jax.named_scope(scopes.BLOCKS)
    def _each(
        self, chunk: Index, block: Each, common: Any, own: dict[bool, Any], *, reverse: bool = False
    ) -> tuple[Any, Any]:
        """Runs a function for every block of a chunk in turn, on values in common and values of the block's kind."""
        cut, (only, *others) = self.spec.chunks.ops, self.spec.chunks.kinds
        first = {is_moe: self._first_layer(is_moe, chunk) for is_moe in (only, *others)}

        def one(index: Index, common: Any, own: dict[bool, Any]) -> Any:
            if not others:
                common, mine = block(only, first[only] + index, index, common, own[only])
                return common, {only: mine}
            kept, is_moe = (jnp.asarray(table)[chunk, index] for table in (cut.stack_index_PB, cut.is_moe_PB))
            for kind in (only, *others):
                runs = is_moe if kind else ~is_moe
                same = lambda *same: same  # noqa: E731
                common, mine = lax.cond(runs, partial(block, kind, first[kind] + kept, kept), same, common, own[kind])
                own = own | {kind: mine}
            return common, own

        # Where all chunks have as many blocks, their number is known to the compiler.
        is_even = len(set(cut.sizes)) == 1
        count = cut.sizes[0] if is_even else jnp.asarray(cut.sizes, jnp.int32)[chunk]
        if is_even and count == 1 and not others:
            return one(0, common, own)

        def step(i: jax.Array, loop: Any) -> Any:
            index = i.astype(jnp.int32)
            return one(count - 1 - index if reverse else index, *loop)

        return lax.fori_loop(0, count, step, (common, own))

    def _first_layer(self, is_moe: bool, chunk: Index) -> Index:
        """Index of a chunk's first block of a kind in the worker's stack."""
        chunks = self.spec.chunks
        return 0 if chunks.are_single else jnp.asarray(chunks.first_layers(is_moe))[self.holding, chunk]
