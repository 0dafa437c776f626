"""The GPT's parts, sizes and packing."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.models.attention_kernels import causal_attention
from swift.models.config import MODEL_SIZES, ModelConfig, model_size
from swift.models.gpt import GPT
from swift.models.modules import look_up
from swift.models.reference_model import plain_logits

TINY = ModelConfig(num_layers=2, model_dim=16, num_heads=2, ffn_dim=24, sequence_length=8, moe_pattern=(False, True))


@pytest.fixture(scope="module")
def tiny():
    gpt = GPT(TINY, vocab_size=32, num_classes=3)
    return gpt, gpt.init(jax.random.key(0))


@pytest.mark.parametrize(("name", "millions"), [("gpt-small", 125), ("gpt-medium", 350), ("gpt-large", 760)])
def test_sizes_are_those_of_the_paper(name, millions):
    """One class in every mixture and GPT-2's vocabulary: the dense models that the paper names."""
    dense = GPT(model_size(name), vocab_size=50257, num_classes=1)
    tied = dense.num_parameters - dense.groups["head"].size
    assert tied == pytest.approx(millions * 1e6, rel=0.07)


def test_packing_is_lossless(tiny):
    gpt, params = tiny
    again = gpt.pack(gpt.unpack(params))
    chex.assert_trees_all_equal(again, params)
    assert {name: p.shape for name, p in params.items()} == {
        name: (group.num_layers, group.num_classes, group.size) for name, group in gpt.groups.items()
    }


def test_matrices_are_told_beyond_2_to_the_31():
    """The positions of a slice are int32, which wrap around there."""
    head = GPT(TINY, vocab_size=150_000_000, num_classes=3).groups["head"]
    norms = head.size - 16 * 150_000_000
    start, width = 15 * (head.size // 16), 4
    assert head.size > start > 1 << 31
    near = np.array([0, norms - 1, norms, start, head.size - 1, head.size, head.size + width], np.int64)
    found = head.in_matrix(jnp.asarray(near.astype(np.uint32).view(np.int32)))
    np.testing.assert_array_equal(found, (near >= norms) & (near < head.size))


def test_every_class_and_layer_starts_differently(tiny):
    _, params = tiny
    assert len(np.unique(np.asarray(params["expert"])[:, :, 0])) == 3
    assert len(np.unique(np.asarray(params["attention"])[:, 0, -1])) == 2


def test_no_token_sees_a_later_one(tiny):
    gpt, params = tiny
    logits = jax.jit(lambda tokens: plain_logits(gpt, ExpertConfig(num_classes=3), gpt.unpack(params), tokens))
    tokens = np.arange(8, dtype=np.int32)[None]
    changed = tokens.copy()
    changed[0, 5] = 31
    before, after = logits(tokens), logits(changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.asarray(before[:, 5:]) != np.asarray(after[:, 5:])).any(axis=-1).all()


def test_attention_is_that_of_jax():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
    expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(causal_attention(query, key, value), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_activations_have_the_type_of_the_weights_and_logits_are_wide(tiny, dtype):
    gpt, params = tiny
    weights = gpt.unpack({name: p.astype(dtype) for name, p in params.items()})
    x = gpt.embed(weights, jnp.zeros((1, 8), jnp.int32))
    assert x.dtype == dtype
    assert gpt.groups["attention"].module(weights["attention"][0])(x).dtype == dtype
    assert gpt.groups["mlp"].module(weights["mlp"][0])(x).dtype == dtype
    normed, logits = gpt.groups["router"].module(weights["router"][0])(x)
    assert (normed.dtype, logits.dtype) == (dtype, jnp.float32)
    assert gpt.logits(weights, x).dtype == jnp.float32


def test_loss_of_padding_is_nothing(tiny):
    gpt, params = tiny
    weights = gpt.unpack(params)
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    labels = jnp.zeros((2, 8), jnp.int32)
    valid = jnp.arange(8)[None] < jnp.array([[3], [0]])
    short = gpt.head_loss(weights, x[:1, :3], labels[:1, :3], valid[:1, :3])
    np.testing.assert_allclose(gpt.head_loss(weights, x, labels, valid), short, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model_dim": 10, "num_heads": 4},
            "ModelConfig.model_dim = 10: must be a multiple of ModelConfig.num_heads = 4",
        ),
        ({"num_layers": 3, "moe_pattern": (False, True)}, "its length must divide ModelConfig.num_layers = 3"),
        ({"moe_pattern": ()}, "ModelConfig.moe_pattern = (): its length must divide"),
        ({"ffn_dim": 0}, "ModelConfig.ffn_dim = 0: must be a whole number of at least 1"),
    ],
)
def test_impossible_shapes_are_refused(settings, message):
    with pytest.raises(SettingError) as error:
        ModelConfig(**settings)
    assert message in str(error.value)


def test_unknown_size_is_refused_with_the_known_ones():
    with pytest.raises(SettingError, match=f"choose one of {', '.join(MODEL_SIZES)}"):
        model_size("gpt-huge")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_frequent_token_gets_its_whole_gradient(dtype):
    """2,048 gradients of 0.01 add up to 20; a sum in bfloat16 stops at 4."""
    tokens = jnp.where(jnp.arange(2048) % 8 == 0, 1, 3).reshape(2, 1024)
    gradient = jax.grad(lambda table: jnp.sum(look_up(table, tokens).astype(jnp.float32) * 0.01))
    found = np.asarray(gradient(jnp.zeros((5, 2), dtype)), np.float32)
    np.testing.assert_allclose(found[:, 0], [0, 2.56, 0, 17.92, 0], rtol=0.01)


def test_gradients_of_a_small_table_are_not_rounded_on_the_way_to_its_matmul():
    """By default a TPU multiplies float32 as bfloat16, and a GPU as TensorFloat-32."""
    gradient = jax.grad(lambda table: jnp.sum(look_up(table, jnp.zeros((2, 4), jnp.int32))))
    lowered = jax.jit(gradient).trace(jnp.zeros((5, 2))).lower(lowering_platforms=("tpu",)).as_text()
    (matmul,) = [line for line in lowered.splitlines() if "dot_general" in line]
    assert "precision = [HIGHEST, HIGHEST]" in matmul


def test_scores_and_logits_in_bfloat16_are_as_good_as_their_inputs(tiny):
    gpt, params = tiny
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 8)).astype(jnp.bfloat16) * 4
    exact = causal_attention(*(x.astype(jnp.float32) for x in (query, key, value)))
    expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    error, usual = (
        np.abs(np.asarray(a, np.float32) - exact).mean() for a in (causal_attention(query, key, value), expected)
    )
    assert error < 1.1 * usual
    weights = gpt.unpack({name: p.astype(jnp.bfloat16) for name, p in params.items()})
    x = jax.random.normal(jax.random.key(1), (1, 8, 16)).astype(jnp.bfloat16)
    logits = np.asarray(gpt.logits(weights, x))
    assert (logits != np.asarray(logits, jnp.bfloat16).astype(np.float32)).mean() > 0.9
