"""The supported Hugging Face architectures, and functions that read and write their ``config.json``.

A ``Family`` describes the differences between an architecture and the others; a ``Decoder`` is one model, described by
Swift's settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from swift.errors import SettingError
from swift.models.config import ModelConfig, QueryKeyNorm
from swift.models.rope import RopeScaling

_ROPE_KINDS: Mapping[str, RopeScaling] = {"default": "none", "linear": "linear", "yarn": "yarn"}

_OTHER_ROPE = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
_EXPECTED_ROPE: Mapping[str, tuple[object, ...]] = {
    "beta_fast": (32, None),
    "beta_slow": (1, None),
    "truncate": (True, None),
}
_MOST = 10_000_000
"""Largest integer accepted in a configuration, to reject absurd sizes in damaged files."""
_NUM_EXPERTS = ("num_experts", "num_local_experts")
"""Two names of the same key; ``transformers`` 5 reads either, and writes the second even where the first was usual."""


@dataclass(frozen=True)
class Family:
    """An architecture: its keys in ``config.json``, the names of its tensors, and its computation.

    Attributes:
        model_type: name in ``config.json``.
        class_name: class of ``transformers`` that loads the model.
        num_experts: key for the number of experts.
        expert_dim: key for the hidden width of an expert.
        moe: name of the submodule with the router and the experts.
        ffn: names of an expert's three matrices: gate, up and down.
        qk_norm: kind of RMSNorm on queries and keys.
        normalizes: whether the gates of a token's experts are normalized to a sum of 1; None if ``norm_topk_prob``
            decides.
        normalizes_one: whether the gate is also normalized, to 1, if a token has a single expert.
        pools_layers: whether the load-balancing loss is top_k times a single loss over all layers, instead of the sum
            of the layers' losses.
        chooses_head_dim: whether the width of heads may differ from ``hidden_size / num_attention_heads``.
        rope_kinds: supported kinds of RoPE scaling.
        aux_loss: key for the weight of the load-balancing loss.
        has_dense_layers: whether ``first_k_dense_replace`` sets the number of dense layers.
        num_shared: key for the number of shared experts; None if the architecture has no shared experts.
        defaults: defaults of the configuration class in ``transformers``, for keys that a configuration may omit.
        expected: by key, the values that Swift implements; other values are refused.
    """

    model_type: str
    class_name: str
    num_experts: str
    expert_dim: str
    moe: str = "mlp"
    ffn: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    qk_norm: QueryKeyNorm = "none"
    normalizes: bool | None = None
    normalizes_one: bool = True
    pools_layers: bool = True
    chooses_head_dim: bool = True
    rope_kinds: tuple[RopeScaling, ...] = ("none", "linear", "yarn")
    aux_loss: str = "router_aux_loss_coef"
    has_dense_layers: bool = False
    num_shared: str | None = None
    defaults: Mapping[str, float] = field(default_factory=dict)
    expected: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


_EXPECTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
    "attention_bias": (False, None),
    "attention_chunk_size": (None,),
    "is_causal": (True, None),
    "per_layer_config": (None, {}),
}
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            num_experts="num_experts",
            expert_dim="intermediate_size",
            qk_norm="projection",
            chooses_head_dim=False,  # the norms on queries and keys span the width of the model
            defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e4, "router_aux_loss_coef": 0.01},
            expected=_EXPECTED | {"clip_qkv": (None,), "sliding_window": (None,)},
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            num_experts="num_local_experts",
            expert_dim="intermediate_size",
            moe="block_sparse_moe",
            ffn=("w1", "w3", "w2"),
            normalizes=True,
            defaults={
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "router_aux_loss_coef": 0.001,
                "num_key_value_heads": 8,
            },
            expected=_EXPECTED | {"sliding_window": (None,)},
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            num_experts="num_experts",
            expert_dim="moe_intermediate_size",
            qk_norm="head",
            defaults={
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e4,
                "router_aux_loss_coef": 0.001,
                "num_key_value_heads": 4,
            },
            expected=_EXPECTED
            | {"use_sliding_window": (False, None), "mlp_only_layers": ([], None), "decoder_sparse_step": (1, None)},
        ),
        Family(
            "deepseek",
            "DeepseekForCausalLM",
            num_experts="n_routed_experts",
            expert_dim="moe_intermediate_size",
            normalizes_one=False,
            pools_layers=False,
            chooses_head_dim=False,
            rope_kinds=("none", "linear"),
            aux_loss="aux_loss_alpha",
            has_dense_layers=True,
            num_shared="n_shared_experts",
            defaults={"rms_norm_eps": 1e-6, "rope_theta": 1e4, "aux_loss_alpha": 0.001},
            expected=_EXPECTED | {"scoring_func": ("softmax", None), "moe_layer_freq": (1, None)},
        ),
    )
}
"""The supported architectures, by ``model_type`` in ``config.json``."""


@dataclass(frozen=True)
class Decoder:
    """A Hugging Face model, described by Swift's settings.

    Attributes:
        family: architecture.
        model: architecture settings, with ``vocab_size`` set.
        num_experts: number of experts in a layer, E.
        top_k: number of experts for each token.
        normalizes: whether the gates of a token's experts are normalized to a sum of 1.
        aux_loss_coefficient: weight of the load-balancing loss, in the units of ``ExpertConfig``.
    """

    family: Family
    model: ModelConfig
    num_experts: int
    top_k: int
    normalizes: bool
    aux_loss_coefficient: float

    @property
    def vocab_size(self) -> int:
        """Number of rows in the embedding, V."""
        assert self.model.vocab_size is not None
        return self.model.vocab_size


def read_decoder(config: Mapping[str, Any], path: str) -> Decoder:
    """Converts a ``config.json`` to Swift's settings.

    Args:
        config: content of ``config.json``.
        path: path of the file, for error messages.

    Raises:
        SettingError: the architecture is unknown, or a setting is not supported.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        allowed = f"is of model_type {config.get('model_type')!r}; known are {', '.join(FAMILIES)}"
        raise SettingError("DIR", path, allowed)
    read = _Reader(config, path, family.defaults)
    for key, values in family.expected.items():
        if config.get(key) not in values:
            raise read.not_computed(key, config.get(key))
    layer_types = config.get("layer_types") or ()
    if any(kind != "full_attention" for kind in layer_types):
        raise read.not_computed("layer_types", layer_types)
    num_heads, top_k = read.whole("num_attention_heads"), read.whole("num_experts_per_tok")
    try:
        model = ModelConfig(
            num_layers=read.whole("num_hidden_layers"),
            model_dim=read.whole("hidden_size"),
            num_heads=num_heads,
            num_kv_heads=_kv_heads(read, num_heads),
            head_dim=None if config.get("head_dim") is None else read.whole("head_dim"),
            ffn_dim=read.whole("intermediate_size"),
            expert_dim=read.whole(family.expert_dim),
            num_shared_experts=read.whole(family.num_shared, 0) if family.num_shared else 0,
            num_dense_layers=read.whole("first_k_dense_replace", 0) if family.has_dense_layers else 0,
            moe_pattern=(True,),
            vocab_size=read.whole("vocab_size"),
            tied_embeddings=read.flag("tie_word_embeddings"),
            sequence_length=read.whole("max_position_embeddings"),
            norm="rmsnorm",
            norm_epsilon=read.number("rms_norm_eps"),
            qk_norm=family.qk_norm,
            activation="swiglu",
            positions="rope",
            **_rope(read, family),
        )
        if model.head_dim is not None and not family.chooses_head_dim:
            _check_head_dim(model)
    except SettingError as error:
        if error.setting == "DIR":
            raise
        raise SettingError("DIR", path, f"has sizes that do not fit: {error}") from error
    return Decoder(
        family,
        model,
        num_experts=_num_experts(read, family),
        top_k=top_k,
        normalizes=_normalizes(read, family, top_k),
        aux_loss_coefficient=read.number(family.aux_loss) / _balance_losses(family, model, top_k),
    )


def write_decoder(decoder: Decoder, dtype: str) -> dict[str, Any]:
    """Converts Swift's settings to a ``config.json`` that ``transformers`` loads.

    Args:
        decoder: the model.
        dtype: dtype of the tensors, such as ``bfloat16``.
    """
    family, model = decoder.family, decoder.model
    kind = next(name for name, scaling in _ROPE_KINDS.items() if scaling == model.rope_scaling)
    rope: dict[str, Any] = {"rope_type": kind}
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
        # The DeepSeek authors' own code reads the older key ``type``.
        "rope_scaling": {"type": kind, **rope} if model.rope_scaling != "none" else None,
        "attention_bias": False,
        "tie_word_embeddings": model.tied_embeddings,
        family.num_experts: decoder.num_experts,
        "num_experts_per_tok": decoder.top_k,
        family.aux_loss: _rounded(decoder.aux_loss_coefficient * _balance_losses(family, model, decoder.top_k)),
    }
    if family.normalizes is None:
        config["norm_topk_prob"] = decoder.normalizes
    if family.has_dense_layers:
        config["first_k_dense_replace"] = model.num_dense_layers
    if family.num_shared:
        config[family.num_shared] = model.num_shared_experts or None
    return config


@dataclass(frozen=True)
class _Reader:
    config: Mapping[str, Any]
    path: str
    defaults: Mapping[str, float] = field(default_factory=dict)

    def whole(self, key: str, default: int | None = None) -> int:
        """Reads an integer, or the default if the key is missing or null."""
        value = self._found(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
            raise SettingError("DIR", self.path, f"has {key} = {value!r:.40}, which is not a whole number to {_MOST:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Reads a number, or the default if the key is missing or null."""
        value = self._found(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise SettingError("DIR", self.path, f"has {key} = {value!r}, which is not a number")
        try:
            return float(value)
        except OverflowError as error:
            raise SettingError("DIR", self.path, f"has a {key} that is too large") from error

    def flag(self, key: str) -> bool:
        """Reads a boolean, or False if the key is missing or null."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise SettingError("DIR", self.path, f"has {key} = {value!r:.40}, which is not true or false")
        return bool(value)

    def not_computed(self, key: str, value: object) -> SettingError:
        """Returns the error for a value that Swift does not implement."""
        return SettingError("DIR", self.path, f"has {key} = {value!r:.80}, which is not computed here")

    def _found(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            value = self.defaults.get(key) if default is None else default
        if value is None:
            raise SettingError("DIR", self.path, f"has no {key}")
        return value


def _kv_heads(read: _Reader, num_heads: int) -> int:
    """Reads the number of key-value heads; null means all heads, and a missing key the default in ``transformers``."""
    key = "num_key_value_heads"
    is_left_out = key not in read.config and key in read.defaults
    return read.whole(key, None if is_left_out else num_heads)


def _check_head_dim(model: ModelConfig) -> None:
    if model.channels * model.num_heads != model.model_dim:
        allowed = f"must be {model.model_dim / model.num_heads:g}, which is hidden_size / num_attention_heads"
        raise SettingError("head_dim", model.channels, allowed)


def _num_experts(read: _Reader, family: Family) -> int:
    names = _NUM_EXPERTS if family.num_experts in _NUM_EXPERTS else (family.num_experts,)
    counts = {name: read.whole(name) for name in names if read.config.get(name) is not None}
    if len(set(counts.values())) > 1:
        both = " and ".join(f"{name} = {value}" for name, value in counts.items())
        raise SettingError("DIR", read.path, f"has {both}, which mean the same")
    return next(iter(counts.values()), None) or read.whole(family.num_experts)


def _normalizes(read: _Reader, family: Family, top_k: int) -> bool:
    if top_k == 1 and not family.normalizes_one:
        return False
    normalizes = read.flag("norm_topk_prob")
    return normalizes if family.normalizes is None else family.normalizes


def _balance_losses(family: Family, model: ModelConfig, top_k: int) -> float:
    """Returns the ratio of Swift's load-balancing loss to the family's, at perfectly balanced load.

    Swift's loss is a sum over layers, in which each term is 1 at balance. The loss of ``transformers`` counts the
    assignments of all layers together and does not divide by the number of a token's choices, so at balance it is top_k
    for any number of layers.
    """
    return max(sum(model.moe_layers), 1) / top_k if family.pools_layers and top_k else 1.0


def _rounded(value: float) -> float:
    """Rounds to 12 digits, so that multiplying a quotient by its divisor gives the original number."""
    return float(f"{value:.12g}")


def _rope(read: _Reader, family: Family) -> dict[str, Any]:
    """Reads the RoPE settings; if both keys are present, ``rope_scaling`` takes precedence, as in ``transformers``."""
    name = "rope_scaling" if read.config.get("rope_scaling") else "rope_parameters"
    rope = read.config.get(name) or {}
    if not isinstance(rope, Mapping):
        raise SettingError("DIR", read.path, f"has {name} = {rope!r}, which is not an object")
    rope_reader = _Reader(cast(Mapping[str, Any], rope), read.path)
    kind = rope.get("rope_type", rope.get("type", "default"))
    allowed = [known for known, scaling in _ROPE_KINDS.items() if scaling in family.rope_kinds]
    if not isinstance(kind, str) or kind not in allowed:
        raise SettingError("DIR", read.path, f"has rope_type = {kind!r}; known are {', '.join(allowed)}")
    for key, value in rope.items():
        is_factor = key == "partial_rotary_factor" and value not in (1.0, None)
        if is_factor or isinstance(value, Mapping):  # a mapping holds settings for some layers only
            raise rope_reader.not_computed(f"{name}.{key}", value)
    settings = {"rope_theta": _theta(read, rope_reader)}
    if kind == "default":
        return settings
    if kind == "yarn":
        for key in sorted({*rope} & _OTHER_ROPE):
            if rope[key] not in _EXPECTED_ROPE.get(key, (None,)):
                raise rope_reader.not_computed(key, rope[key])
    length = rope_reader.whole("original_max_position_embeddings", read.whole("max_position_embeddings"))
    return settings | {
        "rope_scaling": _ROPE_KINDS[kind],
        "rope_factor": rope_reader.number("factor"),
        # In transformers, the value at the top level takes precedence over the one in the RoPE settings.
        "rope_length": read.whole("original_max_position_embeddings", length),
    }


def _theta(read: _Reader, chosen: _Reader) -> float:
    """Reads the base of the RoPE wavelengths from the chosen RoPE settings, else from the top level.

    If ``rope_scaling`` was added by hand, ``transformers`` ignores the base in ``rope_parameters``. A configuration in
    which the two differ is therefore refused.
    """
    theta = chosen.number("rope_theta", read.number("rope_theta"))
    other = read.config.get("rope_parameters")
    forgotten = other.get("rope_theta") if isinstance(other, Mapping) else None
    if forgotten is not None and forgotten != theta:
        both = (
            f"rope_theta = {forgotten!r} in rope_parameters, where rope_scaling, which is read instead, means {theta!r}"
        )
        raise SettingError("DIR", read.path, f"has {both}: name the right one in rope_scaling")
    return theta
