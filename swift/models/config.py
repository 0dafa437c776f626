"""Sizes of the GPT: the three of SYMI, and one for a laptop."""

from dataclasses import dataclass

from swift.errors import SettingError, check_count


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT.

    Attributes:
        num_layers: number of transformer layers.
        model_dim: width of the residual stream, D.
        num_heads: number of attention heads.
        ffn_dim: hidden width of a feed-forward network, dense or expert.
        sequence_length: positions of a sequence, T.
        moe_pattern: True for each layer that is a mixture of experts; repeated over all layers.
    """

    num_layers: int = 4
    model_dim: int = 128
    num_heads: int = 4
    ffn_dim: int = 512
    sequence_length: int = 128
    moe_pattern: tuple[bool, ...] = (False, True)

    def __post_init__(self) -> None:
        for name in ("num_layers", "model_dim", "num_heads", "ffn_dim", "sequence_length"):
            check_count(f"ModelConfig.{name}", getattr(self, name), least=1)
        if self.model_dim % self.num_heads:
            allowed = f"must be a multiple of ModelConfig.num_heads = {self.num_heads}"
            raise SettingError("ModelConfig.model_dim", self.model_dim, allowed)
        pattern = tuple(bool(layer) for layer in self.moe_pattern)
        object.__setattr__(self, "moe_pattern", pattern)  # gin may pass a list
        if not pattern or self.num_layers % len(pattern):
            allowed = f"its length must divide ModelConfig.num_layers = {self.num_layers}"
            raise SettingError("ModelConfig.moe_pattern", pattern, allowed)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """True for each layer that is a mixture of experts."""
        return self.moe_pattern * (self.num_layers // len(self.moe_pattern))


def _gpt(num_layers: int, model_dim: int, num_heads: int) -> ModelConfig:
    return ModelConfig(num_layers, model_dim, num_heads, ffn_dim=4 * model_dim, sequence_length=512)


MODEL_SIZES: dict[str, ModelConfig] = {
    "demo": ModelConfig(moe_pattern=(True,)),
    "gpt-small": _gpt(12, 768, 12),
    "gpt-medium": _gpt(24, 1024, 16),
    "gpt-large": _gpt(24, 1536, 16),
}
"""The dense sizes 125M, 350M and 760M of SYMI's evaluation, with sequences of 512 tokens, and the size of the demo. In
the former every second layer is a mixture of experts, as in DeepSpeed-MoE (the paper does not specify it); in the demo
every layer is."""


def model_size(name: str) -> ModelConfig:
    """Looks up a model size by name.

    Args:
        name: 'demo', 'gpt-small', 'gpt-medium' or 'gpt-large'.

    >>> model_size("gpt-small").model_dim
    768
    """
    if name not in MODEL_SIZES:
        raise SettingError("model_size.name", name, f"choose one of {', '.join(MODEL_SIZES)}")
    return MODEL_SIZES[name]
