"""Model shape, and named shapes: SYMI's GPTs, and open mixtures of experts in full and tiny versions."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, TypeAlias

from flax import nnx

from swift.errors import SettingError, check_choices, check_count, check_number
from swift.models.rope import RopeScaling

Norm: TypeAlias = Literal["layernorm", "rmsnorm"]
Positions: TypeAlias = Literal["learned", "rope"]
Activation: TypeAlias = Literal["gelu", "swiglu"]
QueryKeyNorm: TypeAlias = Literal["none", "head", "projection"]
AttentionKernel: TypeAlias = Literal["plain", "blockwise", "tiled", "splash", "triton", "cudnn"]
Remat: TypeAlias = Literal["none", "attention", "block"]
"""Part of a block that the backward pass recomputes."""

_MOST_SIZE, _MOST_LAYERS = 2**20, 2**12
"""Upper limits: the first for widths, tokens, heads and experts, the second for layers, each of which is traced."""


class CustomBlock(Protocol):
    """Interface of a user's block: a frozen dataclass, so that a configuration can name it.

    Both methods return Flax NNX modules whose parameters should be created by ``linear`` and ``make_norm`` of
    ``swift.models``, so that one program can draw the initial values of all modules.
    """

    def attention(self, config: "ModelConfig", rngs: nnx.Rngs) -> nnx.Module:
        """Creates the module that mixes positions: (x_BTD[, document_BT]) -> update of the residual stream."""

    def network(self, config: "ModelConfig", width: int, rngs: nnx.Rngs) -> nnx.Module:
        """Creates an expert or dense network, called as (x ``[..., D]``, matmul) -> y ``[..., D]``.

        The module must treat rows independently and map zeros to zeros. It must multiply by its weights only with
        ``matmul(x, weight)``, because the rows of a rank belong to several experts.
        """


@dataclass(frozen=True)
class ModelConfig:
    """Decoder shape: GPT-2's by default, or an open mixture-of-experts model's.

    Attributes:
        num_layers: number of transformer layers.
        model_dim: width of the residual stream, D.
        num_heads: number of attention heads, H.
        ffn_dim: hidden width of a dense feed-forward network.
        sequence_length: number of positions of a sequence, T.
        moe_pattern: True for each layer that is a mixture of experts; the pattern is repeated over all layers after the
            leading dense layers.
        num_dense_layers: number of leading dense layers.
        expert_dim: hidden width of an expert; None for ``ffn_dim``.
        num_shared_experts: number of experts that every token is sent to; they are computed as one network of their
            total width.
        num_kv_heads: number of key and value heads, each shared by equally many query heads; None for ``num_heads``.
        head_dim: channels of a head, C; None for ``model_dim / num_heads``.
        norm: kind of norm: ``layernorm`` or ``rmsnorm``.
        norm_epsilon: epsilon that norms add to the variance.
        qk_norm: RMSNorm of queries and keys: ``none``; ``head``, over each head's channels; or ``projection``, over all
            heads' channels.
        positions: position embeddings: ``learned``, or ``rope`` for rotations of queries and keys.
        rope_theta: base of the rotations' wavelengths.
        rope_scaling: stretching of wavelengths for sequences longer than in the original training: ``none``;
            ``linear``; or ``yarn`` (arXiv 2309.00071), which stretches only the long wavelengths.
        rope_factor: factor by which wavelengths are stretched.
        rope_length: sequence length of the original training, for ``yarn``.
        activation: ``gelu``, or ``swiglu`` with a third matrix.
        vocab_size: number of rows of the embedding, V, at least the number of tokens of the tokenizer; None for exactly
            as many.
        tied_embeddings: whether the head scores tokens by their embeddings, instead of by a matrix of its own.
        block: your own attention and networks, instead of the built-in ones; None to use these.
    """

    num_layers: int = 4
    model_dim: int = 128
    num_heads: int = 4
    ffn_dim: int = 512
    sequence_length: int = 128
    moe_pattern: tuple[bool, ...] = (False, True)
    num_dense_layers: int = 0
    expert_dim: int | None = None
    num_shared_experts: int = 0
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm: Norm = "layernorm"
    norm_epsilon: float = 1e-6
    qk_norm: QueryKeyNorm = "none"
    positions: Positions = "learned"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = "none"
    rope_factor: float = 1.0
    rope_length: int = 4096
    activation: Activation = "gelu"
    vocab_size: int | None = None
    tied_embeddings: bool = False
    block: CustomBlock | None = None

    def __post_init__(self) -> None:
        for name in ("sequence_length", "rope_length"):
            check_count(f"ModelConfig.{name}", getattr(self, name), least=1)
        check_count("ModelConfig.num_layers", self.num_layers, least=1, most=_MOST_LAYERS)
        for name in ("model_dim", "num_heads", "ffn_dim"):
            check_count(f"ModelConfig.{name}", getattr(self, name), least=1, most=_MOST_SIZE)
        for name in ("num_dense_layers", "num_shared_experts"):
            check_count(f"ModelConfig.{name}", getattr(self, name), least=0, most=_MOST_SIZE)
        for name in ("expert_dim", "num_kv_heads", "head_dim", "vocab_size"):
            if getattr(self, name) is not None:
                check_count(f"ModelConfig.{name}", getattr(self, name), least=1, most=_MOST_SIZE)
        check_number("ModelConfig.norm_epsilon", self.norm_epsilon, above=0)
        check_number("ModelConfig.rope_theta", self.rope_theta, above=1)
        check_number("ModelConfig.rope_factor", self.rope_factor, least=1)
        check_choices(self)
        self._check_heads()
        self._check_pattern()

    def _check_heads(self) -> None:
        if self.head_dim is None and self.model_dim % self.num_heads:
            allowed = f"must be a multiple of ModelConfig.num_heads = {self.num_heads}"
            raise SettingError("ModelConfig.model_dim", self.model_dim, allowed)
        if self.num_heads % self.kv_heads:
            allowed = f"must divide ModelConfig.num_heads = {self.num_heads}"
            raise SettingError("ModelConfig.num_kv_heads", self.num_kv_heads, allowed)
        if self.positions == "rope" and self.channels % 2:
            raise SettingError(
                "ModelConfig.head_dim", self.channels, "must be even: rotations are of pairs of channels"
            )

    def _check_pattern(self) -> None:
        pattern = tuple(bool(layer) for layer in self.moe_pattern)
        object.__setattr__(self, "moe_pattern", pattern)  # gin may pass a list
        if self.num_dense_layers > self.num_layers:
            allowed = f"must be at most ModelConfig.num_layers = {self.num_layers}"
            raise SettingError("ModelConfig.num_dense_layers", self.num_dense_layers, allowed)
        num_pattern_layers = self.num_layers - self.num_dense_layers
        if not pattern or num_pattern_layers % len(pattern):
            allowed = f"its length must divide ModelConfig.num_layers = {self.num_layers}"
            if self.num_dense_layers:
                allowed += f" less ModelConfig.num_dense_layers = {self.num_dense_layers}"
            raise SettingError("ModelConfig.moe_pattern", pattern, allowed)

    def __repr__(self) -> str:
        """Text by which checkpoints identify the shape; newer settings appear only if they differ from the default."""
        oldest = ("num_layers", "model_dim", "num_heads", "ffn_dim", "sequence_length", "moe_pattern")
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        young = {f.name: values[f.name] for f in fields(self) if f.name not in oldest and values[f.name] != f.default}
        texts = [f"{name}={values[name]!r}" for name in (*oldest, *young)]
        return f"ModelConfig({', '.join(texts)})"

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """True for each layer that is a mixture of experts."""
        num_pattern_layers = self.num_layers - self.num_dense_layers
        return (False,) * self.num_dense_layers + self.moe_pattern * (num_pattern_layers // len(self.moe_pattern))

    @property
    def explicit(self) -> "ModelConfig":
        """Same shape, with the default of settings that are None filled in from other settings."""
        return replace(self, num_kv_heads=self.kv_heads, head_dim=self.channels, expert_dim=self.expert_width)

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def channels(self) -> int:
        """Channels of a head, C."""
        return self.model_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def expert_width(self) -> int:
        """Hidden width of an expert."""
        return self.ffn_dim if self.expert_dim is None else self.expert_dim


def _gpt(num_layers: int, model_dim: int, num_heads: int) -> ModelConfig:
    return ModelConfig(num_layers, model_dim, num_heads, ffn_dim=4 * model_dim, sequence_length=512)


def _decoder(
    num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, length: int, **settings: Any
) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        model_dim=settings.pop("model_dim", 2048),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        sequence_length=length,
        moe_pattern=(True,),
        norm="rmsnorm",
        positions="rope",
        activation="swiglu",
        **settings,
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
    """Returns a tiny shape of the same architecture, with the tokenizer's vocabulary, for tests and laptops."""
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
"""Shapes by name: those of SYMI's dense sizes 125M, 350M and 760M with sequences of 512 tokens, of the demo, and of
models on the hub. In SYMI's sizes every second layer is a mixture of experts, as in DeepSpeed-MoE (the paper does not
specify it); in the demo every layer is. The gating of the hub's models is in experiments/models."""


def model_size(name: str) -> ModelConfig:
    """Looks up a model size by name.

    Args:
        name: name of a size, such as 'demo', 'gpt-small' or 'olmoe-1b-7b'; the error for an unknown name lists all.

    >>> model_size("gpt-small").model_dim
    768
    """
    if name not in MODEL_SIZES:
        raise SettingError("model_size.name", name, f"choose one of {', '.join(MODEL_SIZES)}")
    return MODEL_SIZES[name]
