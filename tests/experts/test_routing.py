"""Routing: a token's classes and gates, where probabilities are ordinary and where they underflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.experts.routing import Gating, route

DTYPES = ["float32", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 300.0, 1e30])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_tokens_go_to_the_classes_of_the_largest_logits(top_k, scale, dtype):
    """Beyond a spread of about 100 all probabilities but the first are zero, and say nothing of the order."""
    steps_TE = np.random.default_rng(0).permuted(np.tile(np.arange(8), (64, 1)), axis=1) - 5
    logits_TE = jnp.asarray(steps_TE * scale, dtype)
    choices_TK, gates_TK, probs_TE = jax.device_get(route(logits_TE, Gating(top_k)))
    np.testing.assert_array_equal(choices_TK, np.argsort(-steps_TE, axis=1)[:, :top_k])
    assert choices_TK.dtype == np.int32
    assert gates_TK.dtype == probs_TE.dtype == np.float32

    chosen_TK = np.take_along_axis(np.asarray(logits_TE, np.float64), choices_TK, axis=1)
    expected_TK = np.exp(chosen_TK - chosen_TK[:, :1])
    total_T1 = expected_TK.sum(axis=1, keepdims=True) if top_k > 1 else 1 / probs_TE.max(axis=1, keepdims=True)
    np.testing.assert_allclose(gates_TK, expected_TK / total_T1, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_second_choice_whose_probability_underflows_has_a_finite_gradient(dtype):
    logits_TE = jnp.asarray([[0.0, -300.0, 200.0, -400.0]], dtype)
    gradient_TE = jax.grad(lambda logits_TE: jnp.sum(route(logits_TE, Gating(2)).gates_TK[:, 1]))(logits_TE)
    assert gradient_TE.dtype == logits_TE.dtype
    np.testing.assert_array_equal(np.asarray(gradient_TE, np.float32), 0)
