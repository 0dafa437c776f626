"""Shapes by name: SYMI's GPTs, open mixtures of experts of the hub, and small ones of the same architectures."""

from dataclasses import replace
from typing import Any

from swift.errors import SettingError
from swift.models.config import ModelConfig


def _gpt(num_layers: int, model_dim: int, num_heads: int) -> ModelConfig:
    return ModelConfig(num_layers, model_dim, num_heads, ffn_dim=4 * model_dim, sequence_length=512)


def _decoder(
    num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, length: int, **others: Any
) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        model_dim=others.pop("model_dim", 2048),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        sequence_length=length,
        moe_pattern=(True,),
        norm="rmsnorm",
        positions="rope",
        activation="swiglu",
        **others,
    )


_HUB = {
    "olmoe-1b-7b": _decoder(
        16, 16, 16, 128, 4096, ffn_dim=1024, qk_norm="projection", norm_epsilon=1e-5, vocab_size=50_304
    ),
    "mixtral-8x7b": _decoder(
        32,
        32,
        8,
        128,
        32_768,
        model_dim=4096,
        ffn_dim=14_336,
        norm_epsilon=1e-5,
        rope_theta=1e6,
        vocab_size=32_000,
    ),
    "qwen3-30b-a3b": _decoder(
        48, 32, 4, 128, 40_960, ffn_dim=6144, expert_dim=768, qk_norm="head", rope_theta=1e6, vocab_size=151_936
    ),
    "deepseek-moe-16b": _decoder(
        28,
        16,
        16,
        128,
        4096,
        ffn_dim=10_944,
        expert_dim=1408,
        num_dense_layers=1,
        num_shared_experts=2,
        vocab_size=102_400,
    ),
}


def _tiny(model: ModelConfig) -> ModelConfig:
    """A shape of the same architecture for tests and laptops, with the vocabulary of the tokenizer."""
    return replace(
        model,
        num_layers=4,
        model_dim=64,
        num_heads=4,
        num_kv_heads=4 if model.kv_heads == model.num_heads else 2,
        head_dim=16,
        ffn_dim=128,
        expert_dim=None if model.expert_dim is None else 64,
        sequence_length=128,
        vocab_size=None,
    )


MODEL_SIZES: dict[str, ModelConfig] = {
    "demo": ModelConfig(moe_pattern=(True,)),
    "gpt-small": _gpt(12, 768, 12),
    "gpt-medium": _gpt(24, 1024, 16),
    "gpt-large": _gpt(24, 1536, 16),
    **_HUB,
    **{f"{name}-tiny": _tiny(model) for name, model in _HUB.items()},
}
"""The dense sizes 125M, 350M and 760M of SYMI's evaluation, with sequences of 512 tokens, and the size of the demo. In
the former every second layer is a mixture of experts, as in DeepSpeed-MoE (the paper does not specify it); in the demo
every layer is. The others are those of the hub; how their routers gate is in experiments/models."""


def model_size(name: str) -> ModelConfig:
    """Looks up a model size by name.

    Args:
        name: such as 'demo', 'gpt-small' or 'olmoe-1b-7b'; a wrong one is answered with all of them.

    >>> model_size("gpt-small").model_dim
    768
    """
    if name not in MODEL_SIZES:
        raise SettingError("model_size.name", name, f"choose one of {', '.join(MODEL_SIZES)}")
    return MODEL_SIZES[name]
