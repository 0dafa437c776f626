"""The loss a chunk of tokens at a time, against all logits at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.models import losses
from swift.models.config import ModelConfig
from swift.models.gpt import GPT
from tests.oracles import softmax

VOCABULARY = 11


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("tokens_at_once", [1, 4, 8])
def test_chunks_are_all_logits_at_once(monkeypatch, tokens_at_once, weighs):
    """Loss and gradients of twelve tokens, three of them padding, from gradients by hand."""
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", tokens_at_once * VOCABULARY)
    monkeypatch.setattr(losses, "LEAST_AT_ONCE", 1)
    random = np.random.default_rng(0)
    x_RD, kernel_DV = random.standard_normal((12, 5)), random.standard_normal((5, VOCABULARY))
    labels_R, valid_R = random.integers(0, VOCABULARY, 12), np.arange(12) < 9
    weight_R = random.integers(0, 3, 12).astype(np.float32) / 2 if weighs else None
    factor_R = valid_R * (1.0 if weight_R is None else weight_R)
    tokens = x_RD, kernel_DV, labels_R, valid_R, weight_R
    value, gradients = jax.jit(jax.value_and_grad(losses.sum_of_losses, argnums=(0, 1)))(*tokens)
    log_probs_RV = np.log(softmax(x_RD @ kernel_DV))
    np.testing.assert_allclose(value, -log_probs_RV[np.arange(12), labels_R] @ factor_R, rtol=1e-12)
    d_logits_RV = (np.exp(log_probs_RV) - np.eye(VOCABULARY)[labels_R]) * factor_R[:, None]
    np.testing.assert_allclose(gradients[0], d_logits_RV @ kernel_DV.T, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gradients[1], x_RD.T @ d_logits_RV, rtol=1e-10, atol=1e-12)
    evaluated = losses.sum_of_losses(*jax.tree.map(jnp.asarray, tokens))
    np.testing.assert_allclose(evaluated, value, rtol=1e-12)


@pytest.mark.parametrize(
    ("vocab_size", "least", "at_once"),
    [
        (50_304, 1, 512),
        (151_936, 1, 128),
        (151_936, 512, 512),
        (2**26, 1, 1),
        (1_000, 512, 4_000),
        (30_000, 512, 1_024),
    ],
)
def test_chunks_have_a_power_of_two_tokens(vocab_size, least, at_once):
    assert losses.tokens_per_block(4_000, vocab_size, least) == at_once


def test_a_whole_head_is_not_read_for_a_few_tokens():
    head, shape = jax.ShapeDtypeStruct((4, 2**18), jnp.bfloat16), (1_024,)
    x, labels, valid = (
        jax.ShapeDtypeStruct(of, t) for of, t in (((*shape, 4), jnp.bfloat16), (shape, int), (shape, bool))
    )
    text = str(jax.make_jaxpr(jax.grad(losses.sum_of_losses, argnums=(0, 1)))(x, head, labels, valid))
    assert "[512,262144]" in text
    assert "[1024,262144]" not in text


def test_no_array_of_a_step_has_all_logits(monkeypatch):
    """Nor one as large, in the loss and its gradient."""
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 32 * 640)
    monkeypatch.setattr(losses, "LEAST_AT_ONCE", 1)
    config = ModelConfig(1, 16, 2, 8, sequence_length=64, moe_pattern=(False,))
    gpt = GPT(config, 640, 1)
    weights = jax.eval_shape(lambda: gpt.unpack(gpt.init(jax.random.key(0))))
    shape = (2, 64)
    x, labels, valid = (
        jax.ShapeDtypeStruct(of, dtype)
        for of, dtype in (((*shape, 16), jnp.float32), (shape, jnp.int32), (shape, bool))
    )
    text = str(jax.make_jaxpr(jax.value_and_grad(gpt.head_loss, argnums=(0, 1)))(weights, x, labels, valid))
    assert "[32,640]" in text
    assert "[2,64,640]" not in text
    assert "[128,640]" not in text
