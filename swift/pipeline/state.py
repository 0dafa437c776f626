"""The training state, a stage's weights, and reads and writes at traced indices.

Every leaf of a state has a leading ``worker`` dim: each mesh row holds the state of its worker's chunks. Master
weights, moments and slots are RANKED ``[worker, layer, rank, ...]``; the iteration, the placement and the policy's own
state are SHARED ``[worker, ...]``. All workers have arrays of the same shapes. So every worker has an embedding and a
head, although only the workers of the first and of the last chunk use them, and a worker with fewer blocks than another
has layers of zeros as padding: their gradients are zero, and nothing reads them.

The loops over a stage's blocks read stacked weights, separated by kind of block. Blocks of both kinds contain
attention, so its layers are separated, too; otherwise both kinds would update the same array of gradients, and XLA
would copy it (docs/blocks.md). Layers of stacks and slots of buffers are updated in place.

B: blocks of the longest stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from swift.models.cuts import BlockStacks
from swift.models.gpt import BLOCK_GROUPS, GPT

EMBEDDING_AND_HEAD = ("embedding", "head")
"""Groups that only the first and the last chunk use."""

KINDS: Mapping[str, bool | None] = {"attention": None, "mlp": False, "router": True, "expert": True}
"""Kind of block that contains each group: True for blocks with experts, False for dense blocks, None for both."""

DeviceBatch: TypeAlias = Any
"""``Batch`` of ``jax.Array``."""

Index: TypeAlias = Any
"""Index of a slot or a layer: an int or int32[]."""

Layers: TypeAlias = dict[bool, dict[str, Any]]
"""Weights of a stage's blocks, or their gradients: stacks ``[layers, ...]``, by whether a block is a mixture of
experts, then by group."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State that an iteration reads and writes, or a tree of specs with the same structure."""

    step: Any  # int32[worker], completed iterations
    master: Any  # {group: master weights, at least float32 [worker, layer, rank, ...]}
    moments: Any  # the optimizer's state over master; its counters are [worker]
    slots: Any  # {group: compute dtype [worker, layer, rank, slot, size]}, filled from master and placement
    placement: Any  # int32[worker, MoE layer of the worker, rank, slot], the expert in every slot
    policy: Any  # the placement policy's state


class EmbeddingWeights(NamedTuple):
    """Embedding of a rank, or its gradients."""

    shard: Any  # leaves [1, ...]
    copies: Any = ()  # copies [H, D] of rows that other ranks hold; () without copies


class StageWeights(NamedTuple):
    """Weights of a stage, or their gradients summed over micro-batches."""

    layers: Layers
    embedding: EmbeddingWeights  # used by the first chunk
    head: dict[str, Any]  # arrays that the head reads, by group; leaves [1, ...]; used by the last chunk

    @classmethod
    def of(
        cls, gpt: GPT, cut: BlockStacks, slots: Mapping[str, jax.Array], stage: Index, copies: Any = ()
    ) -> "StageWeights":
        """Unpacks a rank's slots ``[layer, slot, size]`` by group into a stage's weights; keeps ``copies`` as given."""
        stacks = gpt.unpack_stacks(slots)
        head = {name: stacks[name] for name in gpt.head_groups}
        return cls(_by_kind(cut, stacks, stage), EmbeddingWeights(stacks["embedding"], copies), head)

    def packed(self, gpt: GPT, cut: BlockStacks, stage: Index) -> dict[str, jax.Array]:
        """Packs gradients into an array ``[layer, slot, size]`` for each group, in the layout of the slots."""
        return gpt.pack_stacks(_by_group(cut, self.layers, stage) | self._ends)

    def packed_embedding(self, gpt: GPT) -> jax.Array:
        """Packs the gradients of the embedding alone, ``[layer, slot, size]``."""
        return gpt.slot_groups["embedding"].pack_stack(self._ends["embedding"])[:, None]

    @property
    def _ends(self) -> dict[str, Any]:
        """Gradients of embedding and head, without copies; a tied table's two gradients are summed."""
        embedding = self.embedding.shard
        if "embedding" in self.head:
            embedding = jax.tree.map(jnp.add, embedding, self.head["embedding"])
        return {"embedding": embedding, "head": self.head["head"]}


def _by_kind(cut: BlockStacks, stacks: Mapping[str, Any], stage: Index) -> Layers:
    """Separates stacked layers by kind of block."""

    def stack_of_kind(name: str, is_moe: bool) -> Any:
        if name != "attention" or len(cut.kinds) == 1:
            return stacks[name]
        blocks = jnp.asarray(cut.stage_index(is_moe))[stage]
        return jax.tree.map(lambda leaf: jnp.take(leaf, blocks, axis=0, mode="clip"), stacks[name])

    return {is_moe: {name: stack_of_kind(name, is_moe) for name in BLOCK_GROUPS[is_moe]} for is_moe in cut.kinds}


def _by_group(cut: BlockStacks, layers: Layers, stage: Index) -> dict[str, Any]:
    """Joins layers that are separated by kind of block; attention's padding layers become zeros."""
    stacks = {name: stack for kind_stacks in layers.values() for name, stack in kind_stacks.items()}
    if len(cut.kinds) == 1:
        return stacks
    index_B, is_block_B = (jnp.asarray(table)[stage] for table in (cut.joined_index_PB, cut.is_block_PB))

    def joined(dense: jax.Array, moe: jax.Array) -> jax.Array:
        both = jnp.take(jnp.concatenate([dense, moe]), index_B, axis=0, mode="clip")
        return jnp.where(is_block_B[(..., *[None] * (both.ndim - 1))], both, jnp.zeros((), both.dtype))

    return stacks | {"attention": jax.tree.map(joined, layers[False]["attention"], layers[True]["attention"])}


def layer_of(stack: Any, layer: Index) -> Any:
    """Returns one layer from a tree of arrays ``[layers, ...]``."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer, keepdims=False), stack)


def add_to_layer(totals: Any, layer: Index, values: Any) -> Any:
    """Adds values to one layer in a tree of arrays ``[layers, ...]``, in the totals' dtype."""

    def added(total: jax.Array, value: jax.Array) -> jax.Array:
        before = lax.dynamic_index_in_dim(total, layer, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, before + value.astype(total.dtype), layer, 0)

    return jax.tree.map(added, totals, values)


def put(buffers: Any, slot: Index, values: Any) -> Any:
    """Writes values to one slot in a tree of buffers ``[slots, ...]``."""
    return jax.tree.map(lambda buffer, value: lax.dynamic_update_index_in_dim(buffer, value, slot, 0), buffers, values)


def put_layer(buffers: Sequence[jax.Array], slot: Index, layer: Index, values: Sequence[jax.Array]) -> tuple:
    """Writes values to one layer in one slot of buffers ``[slots, layers, ...]``."""
    return tuple(
        lax.dynamic_update_slice(buffer, value[None, None], _start(slot, layer, buffer))
        for buffer, value in zip(buffers, values, strict=True)
    )


def take_layer(buffers: Sequence[jax.Array], slot: Index, layer: Index) -> tuple:
    """Returns one layer from one slot of buffers ``[slots, layers, ...]``."""
    return tuple(
        lax.dynamic_slice(buffer, _start(slot, layer, buffer), (1, 1, *buffer.shape[2:]))[0, 0] for buffer in buffers
    )


def _start(slot: Index, layer: Index, buffer: jax.Array) -> list[jax.Array]:
    return [jnp.asarray(index, jnp.int32) for index in (slot, layer, *(0,) * (buffer.ndim - 2))]
