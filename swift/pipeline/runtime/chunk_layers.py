"""A chunk's layers of a worker's stacks, taken out and put back.

A worker that holds several chunks updates each by itself, since its peers differ from chunk to chunk. An update works
on a state of the chunk alone, which is the same on all workers that hold it, wherever in their stacks it is. The
only chunk of a worker has its whole state.

C chunks, H holdings, R mesh rows, n layers of a chunk, K iterations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from swift.pipeline.runtime.metrics import UpdateRecord
from swift.pipeline.runtime.step_spec import StepSpec
from swift.pipeline.runtime.update import EmbeddingAndHead
from swift.pipeline.stacks import Index
from swift.pipeline.stage_weights import StageWeights
from swift.pipeline.train_state import EMBEDDING_AND_HEAD, KINDS, TrainState

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class ChunkLayers:
    """Takes a chunk's layers out of a worker's stacks, and puts them back; without effect where a worker has one chunk.

    Attributes:
        spec: step spec.
        holding: which of the holdings is the worker's, int32[].
    """

    spec: StepSpec
    holding: Index

    def totals(self, totals: StageWeights, chunk: Index) -> StageWeights:
        """The gradients of a chunk's weights; zeros in layers that are padding."""
        if self.spec.chunks.are_single:
            return totals
        return totals._replace(
            layers={is_moe: _taken(stack, self._index(is_moe, chunk)) for is_moe, stack in totals.layers.items()}
        )

    def cleared(self, totals: StageWeights, chunk: Index) -> StageWeights:
        """The gradients of all weights with those of a chunk set to zero."""
        if self.spec.chunks.are_single:
            return jax.tree.map(jnp.zeros_like, totals)

        def layers_cleared(is_moe: bool, stack: Any) -> Any:
            index = self._index(is_moe, chunk)
            return jax.tree.map(lambda leaf: leaf.at[index].set(0, mode="drop"), stack)

        ends = EmbeddingAndHead.of(self.spec, chunk)
        return StageWeights(
            {is_moe: layers_cleared(is_moe, stack) for is_moe, stack in totals.layers.items()},
            _selected(ends.is_first, jax.tree.map(jnp.zeros_like, totals.embedding), totals.embedding),
            _selected(ends.is_last, jax.tree.map(jnp.zeros_like, totals.head), totals.head),
        )

    def of_stack(self, stack: Tree, chunk: Index) -> Tree:
        """A chunk's layers of arrays ``[MoE layer, ...]``; zeros in layers that are padding."""
        return stack if self.spec.chunks.are_single else _taken(stack, self._index(True, chunk))

    def state(self, state: TrainState, chunk: Index) -> TrainState:
        """The state of a chunk: counters, the policy's own state, embedding and head are the worker's."""
        if self.spec.chunks.are_single:
            return state

        def of_chunk(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            name = group_of(path)
            if name is None or name in EMBEDDING_AND_HEAD:
                return leaf
            return _taken(leaf, self._index(KINDS[name], chunk), padding=None)

        master, moments, slots = jax.tree_util.tree_map_with_path(of_chunk, (state.master, state.moments, state.slots))
        placement = _taken(state.placement, self._index(True, chunk), padding=None)
        return replace(state, master=master, moments=moments, slots=slots, placement=placement)

    def put_state(self, state: TrainState, of_chunk: TrainState, chunk: Index, *, ends_iteration: Any) -> TrainState:
        """The worker's state with that of a chunk.

        Args:
            state: state of the worker.
            of_chunk: state of the chunk.
            chunk: the chunk; with ``NONE`` only counters count.
            ends_iteration: whether counters and the policy's own state become those of the chunk: after an iteration's
                last update.
        """
        if self.spec.chunks.are_single:
            return of_chunk
        ends = EmbeddingAndHead.of(self.spec, chunk)
        embeds = ends_iteration if self.spec.ties_stages else ends.is_first
        is_used = {"embedding": embeds, "head": ends.is_last, None: ends_iteration}

        def joined(path: tuple[Any, ...], old: jax.Array, new: jax.Array) -> jax.Array:
            name = group_of(path)
            if name is None or name in is_used:
                return jnp.where(is_used[name], new, old)
            return old.at[self._index(KINDS[name], chunk)].set(new, mode="drop")

        def arrays(of: TrainState) -> tuple[Any, ...]:
            return of.step, of.master, of.moments, of.slots

        step, master, moments, slots = jax.tree_util.tree_map_with_path(joined, arrays(state), arrays(of_chunk))
        policy = _selected(ends_iteration, of_chunk.policy, state.policy)
        placement = state.placement.at[self._index(True, chunk)].set(of_chunk.placement, mode="drop")
        return TrainState(step, master, moments, slots, placement, policy)

    def put_record(self, records_K: UpdateRecord, record: UpdateRecord, chunk: Index, iteration: Index) -> UpdateRecord:
        """A window's records with that of a chunk; its norm counts on the lowest of the workers that hold it."""
        one, index = self.spec.chunks.are_single, self._index(True, chunk)

        def put(all_K: jax.Array, values: jax.Array) -> jax.Array:
            at = all_K.at[iteration] if one else all_K.at[iteration, index]
            return at.set(values, mode="drop")

        counts = self._counts(chunk)
        square = jnp.where(counts, record.square_norm, jnp.zeros_like(record.square_norm))
        names = ("load", "replicas_LE", "imbalance_L")
        by_layer = {name: jax.tree.map(put, getattr(records_K, name), getattr(record, name)) for name in names}
        return UpdateRecord(
            square_norm=records_K.square_norm.at[iteration].add(square),
            learning_rate=records_K.learning_rate.at[iteration].set(record.learning_rate),
            **by_layer,
        )

    def put_gradients(
        self, all_K: dict[str, Any], of_chunk: dict[str, Any], chunk: Index, iteration: Index
    ) -> dict[str, Any]:
        """Gradients ``[K, layer, ...]`` of the master weights by group, with those of a chunk."""
        ends = EmbeddingAndHead.of(self.spec, chunk)
        is_used = {"embedding": ends.is_first, "head": ends.is_last}

        def put(name: str) -> jax.Array:
            if self.spec.chunks.are_single:
                return all_K[name].at[iteration].set(of_chunk[name])
            if name in is_used:
                return jnp.where(is_used[name], all_K[name].at[iteration].set(of_chunk[name]), all_K[name])
            return all_K[name].at[iteration, self._index(KINDS[name], chunk)].set(of_chunk[name], mode="drop")

        return {name: put(name) for name in all_K}

    def _counts(self, chunk: Index) -> Any:
        lowest_CR = np.zeros((len(self.spec.peers_C) + 1, self.spec.live.num_live), bool)  # the last row is NONE's
        for number, rows in enumerate(self.spec.peers_C):
            lowest_CR[number, rows[0]] = True
        return jnp.asarray(lowest_CR)[chunk, self.spec.live.row_index()]

    def _index(self, is_moe: bool | None, chunk: Index) -> jax.Array:
        """Index in the stack of a chunk's layers of a kind, int32[n]; beyond the end for padding, and with ``NONE``."""
        chunks = self.spec.chunks
        number_n = jnp.arange(chunks.ops.stack_size(is_moe), dtype=jnp.int32)
        counts = jnp.asarray([*chunks.ops.counts(is_moe), 0], jnp.int32)  # the last one is NONE's
        first = jnp.asarray(chunks.first_layers(is_moe))[self.holding, chunk]
        return jnp.where(number_n < counts[chunk], first + number_n, chunks.stack_size(is_moe))


def group_of(path: Sequence[Any]) -> str | None:
    """The group of parameters of a leaf of a state; None for counters."""
    return next((entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)), None)


def _taken(tree: Tree, index_n: jax.Array, *, padding: Any = 0) -> Tree:
    """Layers of stacks; where an index is beyond them, the padding, or with None the last layer."""
    options: dict[str, Any] = {"mode": "clip"} if padding is None else {"mode": "fill", "fill_value": padding}
    return jax.tree.map(lambda leaf: jnp.take(leaf, index_n, axis=0, **options), tree)


def _selected(is_so: Any, one: Tree, other: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(is_so, a, b), one, other)
