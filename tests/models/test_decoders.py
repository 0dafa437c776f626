"""Today's decoders against numpy, and rotations against their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.experts.routers import TopK
from swift.models.config import ModelConfig
from swift.models.gpt import GPT
from swift.models.reference_model import plain_logits
from swift.models.rope import Rope
from tests.models import decoder_oracle

pytestmark = pytest.mark.usefixtures("x64")

COMMON = {"num_layers": 2, "model_dim": 12, "num_heads": 4, "ffn_dim": 10, "sequence_length": 6, "moe_pattern": (True,)}
MODERN = {"norm": "rmsnorm", "norm_epsilon": 1e-5, "positions": "rope", "activation": "swiglu"}
DECODERS = {
    "olmoe": (
        {"num_kv_heads": 4, "head_dim": 4, "qk_norm": "projection"},
        {"top_k": 3, "router": TopK(normalize_gates=False)},
    ),
    "qwen3": (
        {"num_kv_heads": 2, "head_dim": 6, "qk_norm": "head", "rope_theta": 1e6},
        {"top_k": 3, "router": TopK(normalize_gates=True)},
    ),
    "deepseek": (
        {"num_kv_heads": 4, "head_dim": 4, "num_dense_layers": 1, "num_shared_experts": 2, "expert_dim": 6},
        {"top_k": 2, "router": TopK(normalize_gates=False)},
    ),
    "sigmoid": (
        {"num_kv_heads": 1, "head_dim": 4, "tied_embeddings": True},
        {"top_k": 2, "router": TopK("sigmoid", normalize_gates=True, gate_scale=2.5)},
    ),
}


def by_name(weights):
    """Parameters by group and row, as dicts of arrays by name."""
    return {
        group: [
            {
                ".".join(str(key.key) for key in path if hasattr(key, "key")): np.asarray(leaf)
                for path, leaf in jax.tree_util.tree_leaves_with_path(state)
            }
            for state in rows
        ]
        for group, rows in weights.items()
    }


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_that_of_the_papers(name):
    """Logits, and their gradient along a random direction."""
    shape, routing = DECODERS[name]
    config, experts = ModelConfig(**COMMON, **MODERN, **shape), ExpertConfig(num_classes=5, **routing)
    gpt, random = GPT(config, 11, 5), np.random.default_rng(len(name))
    params = {
        group: 0.5 * random.standard_normal(shape.shape)
        for group, shape in jax.eval_shape(lambda: gpt.init(jax.random.key(0))).items()
    }
    along = {group: random.standard_normal(array.shape) for group, array in params.items()}
    tokens, weights = random.integers(0, 11, 6), random.standard_normal((6, 11))

    def expected(step):
        moved = {group: params[group] + step * along[group] for group in params}
        return decoder_oracle.logits(by_name(gpt.unpack(moved)), config, experts, tokens)

    def found(params):
        return plain_logits(gpt, experts, gpt.unpack(params), tokens[None])[0]

    logits, pull_back = jax.vjp(jax.jit(found), jax.tree.map(jnp.asarray, params))
    np.testing.assert_allclose(logits, expected(0), rtol=1e-10, atol=1e-10)
    gradient = pull_back(jnp.asarray(weights))[0]
    slope = np.sum(weights * (expected(1e-6) - expected(-1e-6))) / 2e-6
    np.testing.assert_allclose(sum(np.sum(gradient[g] * along[g]) for g in params), slope, rtol=1e-6)


def test_scores_of_rotated_queries_and_keys_depend_on_their_distance_alone():
    rope = Rope(8, 10_000.0)
    query, key = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 8))

    def score(here, there):
        return np.sum(rope.rotate(query, np.array([[here]])) * rope.rotate(key, np.array([[there]])))

    np.testing.assert_allclose(score(7, 4), score(103, 100), rtol=1e-9)
    assert not np.isclose(score(7, 4), score(7, 5))


def test_stretched_rotations():
    plain, linear = Rope(64, 10_000.0), Rope(64, 10_000.0, "linear", 4.0)
    yarn = Rope(64, 10_000.0, "yarn", 4.0, 2048)
    np.testing.assert_allclose(linear.frequencies_F, plain.frequencies_F / 4)
    ratio = yarn.frequencies_F / plain.frequencies_F
    turns = 2048 * plain.frequencies_F / (2 * np.pi)
    np.testing.assert_allclose(ratio[turns > 40], 1)
    np.testing.assert_allclose(ratio[turns < 0.8], 1 / 4)
    assert (np.diff(ratio) <= 1e-12).all()
    # Bounds that have crossed, as the authors' code and transformers have it: nothing is stretched, or everything.
    for length, theta, expected in ((2, 100.0, 1), (100_000, 2.0, 1 / 4)):
        stretched, base = Rope(14, theta, "yarn", 4.0, length), Rope(14, theta)
        np.testing.assert_allclose(stretched.frequencies_F / base.frequencies_F, expected)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ({"num_kv_heads": 3}, r"ModelConfig.num_kv_heads = 3: must divide ModelConfig.num_heads = 4"),
        ({"head_dim": 3, "positions": "rope"}, r"ModelConfig.head_dim = 3: must be even"),
        ({"norm": "batch"}, r"ModelConfig.norm = 'batch': must be one of layernorm, rmsnorm"),
        ({"num_dense_layers": 3}, r"ModelConfig.num_dense_layers = 3: must be at most ModelConfig.num_layers = 2"),
        (
            {"num_dense_layers": 1, "moe_pattern": (False, True)},
            r"moe_pattern .* less ModelConfig.num_dense_layers = 1",
        ),
    ],
)
def test_shapes_that_cannot_work(setting, line):
    with pytest.raises(SettingError, match=line):
        ModelConfig(**COMMON | setting)


def test_a_shape_of_before_is_named_as_it_was():
    """Checkpoints know their model by this text."""
    assert repr(ModelConfig()) == (
        "ModelConfig(num_layers=4, model_dim=128, num_heads=4, ffn_dim=512, sequence_length=128, "
        "moe_pattern=(False, True))"
    )
    assert repr(ModelConfig(norm="rmsnorm")).endswith("moe_pattern=(False, True), norm='rmsnorm')")
