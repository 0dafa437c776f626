"""The architectures that can be read and written: what sets them apart."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from swift.models.config import QueryKeyNorm
from swift.models.rope import RopeScaling


@dataclass(frozen=True)
class Family:
    """An architecture, as its ``config.json`` and its tensors name its parts.

    Attributes:
        model_type: its name in ``config.json``.
        class_name: class of ``transformers`` that loads it.
        num_experts: key of the number of experts.
        expert_dim: key of an expert's hidden width.
        moe: name of a layer's part that has the router and the experts.
        ffn: names of the three matrices of an expert: gate, up and down.
        qk_norm: RMSNorm of queries and keys.
        normalizes: whether the gates of a token's experts sum to 1; None: ``norm_topk_prob`` says so.
        normalizes_one: whether that holds for the gate of a single expert, too, which is then 1.
        pools_layers: whether its load-balancing loss is top_k times one loss over all layers together, instead of a
            sum of one loss for each layer.
        chooses_head_dim: whether heads may have other channels than ``hidden_size / num_attention_heads``.
        rope_kinds: rotations that it computes.
        aux_loss: key of the weight of the load-balancing loss.
        has_dense_layers: whether ``first_k_dense_replace`` says how many layers are dense.
        num_shared: key of the number of shared experts; None: it has none.
        defaults: values of keys that a configuration may leave out, as the library's own class has them.
        expected: by key, the values that mean what is computed here; any other is refused.
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
            chooses_head_dim=False,  # the norms of queries and keys have the width of the model
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
"""Architectures by the ``model_type`` of their ``config.json``."""
