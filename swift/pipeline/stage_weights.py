"""Weights of a stage as its loops over blocks read them: stacked, and divided by kind of block.

Attention is in blocks of both kinds, so its layers are divided among them; otherwise both would update one array of
gradients, which XLA would copy (docs/blocks.md).

B: blocks of the longest stage.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from swift.models.cuts.stacks import BlockStacks
from swift.models.gpt import BLOCK_GROUPS, GPT
from swift.pipeline.stacks import Index

Layers: TypeAlias = dict[bool, dict[str, Any]]
"""Weights of a stage's blocks, or their gradients: stacks ``[layers, ...]`` by group and, before that, by whether a
block is a mixture of experts."""


class EmbeddingWeights(NamedTuple):
    """The embedding of a rank, or its gradients."""

    own: Any  # leaves [1, ...]
    copies: Any = ()  # copies [H, D] of tokens' vectors that other ranks hold, if there are any


class StageWeights(NamedTuple):
    """Weights of a stage, or their gradients summed over micro-batches."""

    layers: Layers
    embedding: EmbeddingWeights  # used in the first stage
    head: dict[str, Any]  # what the head reads, by group; leaves [1, ...]; used in the last stage

    @classmethod
    def of(
        cls, gpt: GPT, cut: BlockStacks, slots: Mapping[str, jax.Array], stage: Index, copies: Any = ()
    ) -> "StageWeights":
        """Unpacks the slots of a rank that serves a stage, ``[layer, slot, size]`` by group; ``copies`` are as kept."""
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
        """Gradients of embedding and head; those of a table that both read are summed, those of copies left out."""
        embedding = self.embedding.own
        if "embedding" in self.head:
            embedding = jax.tree.map(jnp.add, embedding, self.head["embedding"])
        return {"embedding": embedding, "head": self.head["head"]}


def _by_kind(cut: BlockStacks, stacks: Mapping[str, Any], stage: Index) -> Layers:
    """Divides stacked layers by kind."""

    def of_kind(name: str, is_moe: bool) -> Any:
        if name != "attention" or len(cut.kinds) == 1:
            return stacks[name]
        blocks = jnp.asarray(cut.stage_index(is_moe))[stage]
        return jax.tree.map(lambda leaf: jnp.take(leaf, blocks, axis=0, mode="clip"), stacks[name])

    return {is_moe: {name: of_kind(name, is_moe) for name in BLOCK_GROUPS[is_moe]} for is_moe in cut.kinds}


def _by_group(cut: BlockStacks, layers: Layers, stage: Index) -> dict[str, Any]:
    """Joins layers divided by kind, with zeros in the layers of attention that are padding."""
    stacks = {name: stack for of_kind in layers.values() for name, stack in of_kind.items()}
    if len(cut.kinds) == 1:
        return stacks
    index_B, is_block_B = (jnp.asarray(table)[stage] for table in (cut.joined_index_PB, cut.is_block_PB))

    def joined(dense: jax.Array, moe: jax.Array) -> jax.Array:
        both = jnp.take(jnp.concatenate([dense, moe]), index_B, axis=0, mode="clip")
        return jnp.where(is_block_B[(..., *[None] * (both.ndim - 1))], both, jnp.zeros((), both.dtype))

    return stacks | {"attention": jax.tree.map(joined, layers[False]["attention"], layers[True]["attention"])}
