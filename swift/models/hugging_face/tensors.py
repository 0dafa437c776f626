"""The tensors of a Hugging Face checkpoint, and the part of our parameters that each of them is.

A matrix of theirs is ``[out, in]``, ours is ``[in, out]``; queries, keys and values are three of theirs and one of
ours.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from swift.models.gpt import GPT
from swift.models.hugging_face.families import Family


class TensorPlace(NamedTuple):
    """A tensor, and the place of its values."""

    name: str
    """Name of the tensor."""
    shape: tuple[int, ...]
    """Its shape."""
    group: str
    """Group of the parameter, such as ``attention``."""
    row: int
    """Row of the parameter in its group."""
    leaf: str
    """The parameter, such as ``qkv.kernel``."""
    expert: int | None = None
    """Index of the expert, for parameters with a leading dim of experts."""
    first: int = 0
    """First column of a matrix of ours that the tensor fills."""

    @property
    def parameter(self) -> str:
        """Name of the parameter in a model directory, such as ``attention.0.qkv.kernel``."""
        return f"{self.group}.{self.row}.{self.leaf}"

    @property
    def is_matrix(self) -> bool:
        """Whether it is transposed in ours."""
        return len(self.shape) == 2 and self.leaf != "token_VD"

    def part_of(self, parameter: np.ndarray) -> np.ndarray:
        """A view of the part of the parameter that the tensor is, in the tensor's shape."""
        own = parameter if self.expert is None else parameter[self.expert]
        if not self.is_matrix:
            return own
        return own[:, self.first : self.first + self.shape[0]].T


def tensor_places(family: Family, gpt: GPT) -> Iterator[TensorPlace]:
    """Lists the tensors of a model, in the order of its layers."""
    config = gpt.config
    vocabulary = (gpt.vocab_size, config.model_dim)
    yield TensorPlace("model.embed_tokens.weight", vocabulary, "embedding", 0, "token_VD")
    counts = {True: 0, False: 0}
    for layer, is_moe in enumerate(config.moe_layers):
        yield from _attention(gpt, layer)
        row = counts[is_moe]
        yield from _moe(family, gpt, layer, row) if is_moe else _dense(gpt, layer, row)
        counts[is_moe] += 1
    yield TensorPlace("model.norm.weight", (config.model_dim,), "head", 0, "norm.scale")
    if not config.tied_embeddings:
        yield TensorPlace("lm_head.weight", vocabulary, "head", 0, "out.kernel")


def _attention(gpt: GPT, layer: int) -> Iterator[TensorPlace]:
    config, at = gpt.config, f"model.layers.{layer}"
    dim, width, kv_width = config.model_dim, config.num_heads * config.channels, config.kv_heads * config.channels
    yield TensorPlace(f"{at}.input_layernorm.weight", (dim,), "attention", layer, "norm.scale")
    first = 0
    for part, size in (("q", width), ("k", kv_width), ("v", kv_width)):
        name = f"{at}.self_attn.{part}_proj.weight"
        yield TensorPlace(name, (size, dim), "attention", layer, "qkv.kernel", first=first)
        first += size
    yield TensorPlace(f"{at}.self_attn.o_proj.weight", (dim, width), "attention", layer, "out.kernel")
    if config.qk_norm != "none":
        by_head = config.qk_norm == "head"
        for part, leaf, size in (("q", "query_norm", width), ("k", "key_norm", kv_width)):
            shape = (config.channels if by_head else size,)
            yield TensorPlace(f"{at}.self_attn.{part}_norm.weight", shape, "attention", layer, f"{leaf}.scale")


def _dense(gpt: GPT, layer: int, row: int) -> Iterator[TensorPlace]:
    at, dim = f"model.layers.{layer}", gpt.config.model_dim
    yield TensorPlace(f"{at}.post_attention_layernorm.weight", (dim,), "mlp", row, "norm.scale")
    yield from _ffn(f"{at}.mlp", ("gate_proj", "up_proj", "down_proj"), dim, gpt.config.ffn_dim, "mlp", row, "ffn.")


def _moe(family: Family, gpt: GPT, layer: int, row: int) -> Iterator[TensorPlace]:
    config, at = gpt.config, f"model.layers.{layer}"
    dim, width, moe = config.model_dim, config.expert_width, f"{at}.{family.moe}"
    yield TensorPlace(f"{at}.post_attention_layernorm.weight", (dim,), "router", row, "norm.scale")
    yield TensorPlace(f"{moe}.gate.weight", (gpt.num_classes, dim), "router", row, "score.kernel")
    if config.num_shared_experts:
        shared = config.num_shared_experts * width
        yield from _ffn(f"{moe}.shared_experts", family.ffn, dim, shared, "router", row, "shared.")
    for expert in range(gpt.num_classes):
        yield from _ffn(f"{moe}.experts.{expert}", family.ffn, dim, width, "expert", row, "", expert)


def _ffn(
    at: str,
    names: tuple[str, str, str],
    dim: int,
    width: int,
    group: str,
    row: int,
    prefix: str,
    expert: int | None = None,
) -> Iterator[TensorPlace]:
    shapes = {"gate": (width, dim), "up": (width, dim), "down": (dim, width)}
    for name, (ours, shape) in zip(names, shapes.items(), strict=True):
        yield TensorPlace(f"{at}.{name}.weight", shape, group, row, f"{prefix}{ours}.kernel", expert)
