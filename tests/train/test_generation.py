"""Texts continued with kept keys and values, against the whole model run anew for each token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.errors import SettingError
from swift.experts import ExpertConfig
from swift.models import GPT, ModelConfig, plain_logits
from swift.train import Sampling
from swift.train.generation import continuation

pytestmark = pytest.mark.usefixtures("x64", "quickly_compiled")

COMMON = {"num_layers": 2, "model_dim": 8, "num_heads": 2, "ffn_dim": 12, "sequence_length": 12}
MODELS = {
    "learned positions": ModelConfig(**COMMON, moe_pattern=(False, True)),
    "rotated positions, shared keys": ModelConfig(
        **COMMON, moe_pattern=(True,), norm="rmsnorm", positions="rope", activation="swiglu", num_kv_heads=1
    ),
}
TEXTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]]
"""Shorter than the window, of a single token, and longer."""
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(params=MODELS)
def model(request):
    gpt = GPT(MODELS[request.param], 17, 4)
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: gpt.init(jax.random.key(0)))
    return gpt, gpt.unpack({name: jnp.asarray(random.standard_normal(of.shape)) for name, of in shapes.items()})


def test_every_token_is_the_likeliest_of_the_whole_model(model):
    """Also beyond the window of positions, and whatever the other texts are."""
    gpt, weights = model
    experts, length, count = ExpertConfig(num_classes=4, top_k=2), gpt.config.sequence_length, 15
    run = jax.jit(lambda tokens, last: plain_logits(gpt, experts, weights, tokens)[0, last])
    expected = [list(text) for text in TEXTS]
    for text in expected:
        for _ in range(count):
            seen = text[-length:]
            window = np.zeros((1, length), np.int32)
            window[0, : len(seen)] = seen
            text.append(int(jnp.argmax(run(window, len(seen) - 1))))
    found = np.stack(list(continuation(gpt, experts, weights, TEXTS, count, GREEDY)), axis=1)
    assert len({tuple(text) for text in found}) == len(TEXTS)
    np.testing.assert_array_equal(found, [text[-count:] for text in expected])
    alone = np.stack(list(continuation(gpt, experts, weights, TEXTS[:1], 4, GREEDY)), axis=1)
    np.testing.assert_array_equal(alone[0], found[0, :4])


def test_choices():
    """A token of the likeliest k, among those that reach the probability p, as often as it is likely."""
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))

    def shares(sampling):
        keys = jax.random.split(jax.random.key(1), 4000)
        chosen = jax.vmap(lambda key: sampling.choose(logits, key)[0])(keys)
        return np.bincount(np.asarray(chosen), minlength=4) / 4000

    np.testing.assert_allclose(shares(Sampling(1.0, 4)), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(shares(Sampling(1.0, 2)), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(Sampling(1.0, 4, 0.6)), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(Sampling(1.0, 4, 0.4)), [1, 0, 0, 0])
    np.testing.assert_allclose(shares(Sampling(0.0, 4)), [1, 0, 0, 0])
    squares = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    np.testing.assert_allclose(shares(Sampling(0.5, 4)), squares / squares.sum(), atol=0.03)


@pytest.mark.parametrize(("p", "allowed"), [(0.0, "must be a number above 0"), (1.5, "must be at most 1")])
def test_a_probability_that_cannot_be(p, allowed):
    with pytest.raises(SettingError, match=f"--top-p = {p}: {allowed}"):
        Sampling(top_p=p)
