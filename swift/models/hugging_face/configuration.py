"""``config.json`` of a Hugging Face model, read and written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from swift.errors import SettingError
from swift.models.config import ModelConfig
from swift.models.hugging_face.families import FAMILIES, Family
from swift.models.rope import RopeScaling

_ROPE_KINDS: Mapping[str, RopeScaling] = {"default": "none", "linear": "linear", "yarn": "yarn"}

_OTHER_ROPE = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
_EXPECTED_ROPE: Mapping[str, tuple[object, ...]] = {
    "beta_fast": (32, None),
    "beta_slow": (1, None),
    "truncate": (True, None),
}
_MOST = 10_000_000
"""The largest whole number that a configuration may have."""
_ANY_NUM_EXPERTS = "num_local_experts"
"""The name that ``transformers`` 5 has for the number of experts of any family."""


@dataclass(frozen=True)
class Decoder:
    """A model of the hub in our words.

    Attributes:
        family: its architecture.
        model: shape of the model, the size of its vocabulary included.
        num_experts: experts of a layer, E.
        top_k: experts that each token is sent to.
        normalizes: whether the gates of a token's experts sum to 1.
        aux_loss_coefficient: weight of the load-balancing loss.
    """

    family: Family
    model: ModelConfig
    num_experts: int
    top_k: int
    normalizes: bool
    aux_loss_coefficient: float

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, V."""
        assert self.model.vocab_size is not None
        return self.model.vocab_size


def read_decoder(config: Mapping[str, Any], path: str) -> Decoder:
    """Reads a configuration.

    Args:
        config: contents of ``config.json``.
        path: its path, for errors.

    Raises:
        SettingError: it is of another architecture, or has a part that is not computed here.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        allowed = f"is of model_type {config.get('model_type')!r}; known are {', '.join(FAMILIES)}"
        raise SettingError("DIR", path, allowed)
    read = _Reader(config, path, family.defaults)
    for key, values in family.expected.items():
        if config.get(key) not in values:
            raise SettingError("DIR", path, f"has {key} = {config.get(key)!r}, which is not computed here")
    normalizes = family.normalizes
    if normalizes is None:
        normalizes = bool(config.get("norm_topk_prob", False))
    try:
        model = ModelConfig(
            num_layers=read.whole("num_hidden_layers"),
            model_dim=read.whole("hidden_size"),
            num_heads=read.whole("num_attention_heads"),
            num_kv_heads=read.whole("num_key_value_heads", read.whole("num_attention_heads")),
            head_dim=None if config.get("head_dim") is None else read.whole("head_dim"),
            ffn_dim=read.whole("intermediate_size"),
            expert_dim=read.whole(family.expert_dim),
            num_shared_experts=read.whole(family.num_shared, 0) if family.num_shared else 0,
            num_dense_layers=read.whole("first_k_dense_replace", 0) if family.has_dense_layers else 0,
            moe_pattern=(True,),
            vocab_size=read.whole("vocab_size"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            sequence_length=read.whole("max_position_embeddings"),
            norm="rmsnorm",
            norm_epsilon=read.number("rms_norm_eps"),
            qk_norm=family.qk_norm,
            activation="swiglu",
            positions="rope",
            **_rope(read),
        )
    except SettingError as error:
        if error.setting == "DIR":
            raise
        raise SettingError("DIR", path, f"has sizes that do not fit: {error}") from error
    return Decoder(
        family,
        model,
        num_experts=read.whole(family.num_experts, config.get(_ANY_NUM_EXPERTS)),
        top_k=read.whole("num_experts_per_tok"),
        normalizes=normalizes,
        aux_loss_coefficient=read.number(_aux_key(family)),
    )


def write_decoder(decoder: Decoder, dtype: str) -> dict[str, Any]:
    """Writes a configuration that ``transformers`` loads.

    Args:
        decoder: the model.
        dtype: type of its tensors, such as ``bfloat16``.
    """
    family, model = decoder.family, decoder.model
    rope: dict[str, Any] = {"rope_type": next(name for name, ours in _ROPE_KINDS.items() if ours == model.rope_scaling)}
    if model.rope_scaling != "none":
        rope["factor"] = model.rope_factor
    if model.rope_scaling == "yarn":
        rope["original_max_position_embeddings"] = model.rope_length
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "dtype": dtype,
        "vocab_size": decoder.vocab_size,
        "hidden_size": model.model_dim,
        "intermediate_size": model.ffn_dim,
        family.expert_dim: model.expert_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.channels,
        "hidden_act": "silu",
        "max_position_embeddings": model.sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_theta": model.rope_theta, **rope},
        "rope_scaling": rope if model.rope_scaling != "none" else None,
        "attention_bias": False,
        "tie_word_embeddings": model.tied_embeddings,
        family.num_experts: decoder.num_experts,
        "num_experts_per_tok": decoder.top_k,
        _aux_key(family): decoder.aux_loss_coefficient,
    }
    if family.normalizes is None:
        config["norm_topk_prob"] = decoder.normalizes
    if family.has_dense_layers:
        config["first_k_dense_replace"] = model.num_dense_layers
    if family.num_shared:
        config[family.num_shared] = model.num_shared_experts
    return config


@dataclass(frozen=True)
class _Reader:
    config: Mapping[str, Any]
    path: str
    defaults: Mapping[str, float] = field(default_factory=dict)

    def whole(self, key: str, default: int | None = None) -> int:
        """Reads a whole number; a missing one, or null, is the default."""
        value = self._found(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
            raise SettingError("DIR", self.path, f"has {key} = {value!r:.40}, which is not a whole number to {_MOST:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Reads a number; a missing one, or null, is the default."""
        value = self._found(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise SettingError("DIR", self.path, f"has {key} = {value!r}, which is not a number")
        try:
            return float(value)
        except OverflowError as error:
            raise SettingError("DIR", self.path, f"has a {key} that is too large") from error

    def _found(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            value = self.defaults.get(key) if default is None else default
        if value is None:
            raise SettingError("DIR", self.path, f"has no {key}")
        return value


def _aux_key(family: Family) -> str:
    return "aux_loss_alpha" if "aux_loss_alpha" in family.defaults else "router_aux_loss_coef"


def _rope(read: _Reader) -> dict[str, Any]:
    """Reads the rotations, which ``transformers`` has written in two ways."""
    rope = read.config.get("rope_parameters") or read.config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise SettingError("DIR", read.path, f"has rope_scaling = {rope!r}, which is not an object")
    own = _Reader(cast(Mapping[str, Any], rope), read.path)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KINDS:
        raise SettingError("DIR", read.path, f"has rope_type = {kind!r}; known are {', '.join(_ROPE_KINDS)}")
    settings = {"rope_theta": own.number("rope_theta", read.number("rope_theta"))}
    if kind == "default":
        return settings
    for key in sorted({*rope} & _OTHER_ROPE):
        if rope[key] not in _EXPECTED_ROPE.get(key, (None,)):
            raise SettingError("DIR", read.path, f"has {key} = {rope[key]!r}, which is not computed here")
    length = own.whole("original_max_position_embeddings", read.whole("max_position_embeddings"))
    return settings | {
        "rope_scaling": _ROPE_KINDS[kind],
        "rope_factor": own.number("factor"),
        "rope_length": length,
    }
