"""The loss with a sharded head, against gradients by hand of the whole head."""

import jax
import numpy as np
import pytest

from swift.mesh.per_rank import EXPERT_AXIS
from swift.models import losses
from swift.models.vocabulary.sharded_loss import sharded_loss_sum
from tests.oracles import softmax

RANKS, TOKENS, WIDTH, VOCABULARY, SHARE = 3, 4, 5, 11, 4


def draw():
    """Streams, head, labels and what is valid, of all ranks; the last rank's last column is padding."""
    random = np.random.default_rng(0)
    x_NRD, kernel_DV = random.standard_normal((RANKS, TOKENS, WIDTH)), random.standard_normal((WIDTH, VOCABULARY))
    labels_NR = random.integers(0, VOCABULARY, (RANKS, TOKENS))
    padded = np.append(kernel_DV, random.standard_normal((WIDTH, 1)), axis=1)
    shares_NDv = padded.reshape(WIDTH, RANKS, SHARE).swapaxes(0, 1)
    return x_NRD, kernel_DV, shares_NDv, labels_NR, random.random((RANKS, TOKENS)) < 0.7


def loss(x, kernel, labels, valid, weight=None):
    return sharded_loss_sum(x, kernel, labels, valid, VOCABULARY, weight)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("tokens_at_once", [1, 2, 4])
def test_shares_are_the_whole_head(monkeypatch, tokens_at_once, weighs):
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", tokens_at_once * VOCABULARY)
    x_NRD, kernel_DV, shares_NDv, labels_NR, valid_NR = draw()
    weights = [np.random.default_rng(1).integers(0, 3, valid_NR.shape).astype(np.float32) / 2] if weighs else []
    factor_NR = valid_NR * np.prod(weights, axis=0)
    both = jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), axis_name=EXPERT_AXIS)
    losses_N, (d_x_NRD, d_shares_NDv) = jax.jit(both)(x_NRD, shares_NDv, labels_NR, valid_NR, *weights)

    probabilities = softmax(x_NRD @ kernel_DV)
    chosen = np.take_along_axis(np.log(probabilities), labels_NR[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(losses_N, -(chosen * factor_NR).sum(axis=1), rtol=1e-12)
    d_logits = (probabilities - np.eye(VOCABULARY)[labels_NR]) * factor_NR[..., None]
    np.testing.assert_allclose(d_x_NRD, d_logits @ kernel_DV.T, rtol=1e-10, atol=1e-12)
    d_kernel_DV = np.einsum("nrd,nrv->dv", x_NRD, d_logits)
    found_DV = np.asarray(d_shares_NDv).swapaxes(0, 1).reshape(WIDTH, -1)
    np.testing.assert_allclose(found_DV[:, :VOCABULARY], d_kernel_DV, rtol=1e-10, atol=1e-12)
    assert not found_DV[:, VOCABULARY:].any()

    evaluated_N = jax.jit(jax.vmap(loss, axis_name=EXPERT_AXIS))(x_NRD, shares_NDv, labels_NR, valid_NR, *weights)
    np.testing.assert_allclose(evaluated_N, losses_N, rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_large_logits_do_not_overflow():
    x_NRD, _, shares_NDv, labels_NR, valid_NR = draw()
    losses_N = jax.vmap(loss, axis_name=EXPERT_AXIS)(1e4 * x_NRD, shares_NDv, labels_NR, valid_NR)
    assert np.isfinite(losses_N).all()


def test_a_rank_scores_its_share_alone(monkeypatch):
    """Logits of 8 of 32 tokens of each of 4 ranks under 160 of 640 columns, in the loss and its gradient."""
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 8 * 640)
    shapes = [((32, 16), np.float32), ((16, 160), np.float32), ((32,), np.int32), ((32,), bool)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]

    def loss(*tokens):
        return sharded_loss_sum(*tokens, 640)

    text = str(jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)), axis_env=[(EXPERT_AXIS, 4)])(*arguments))
    assert "[32,160]" in text
    for too_many in ("[32,640]", "[128,160]", "640]", "[128,16]"):
        assert too_many not in text
