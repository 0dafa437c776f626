"""Routing: a token's classes and gates, where probabilities are ordinary and where they underflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.experts.config import ExpertConfig
from swift.experts.layer import auxiliary_loss
from swift.experts.routers import TopK
from swift.experts.routing import RouterTokens, balance_loss, z_loss

DTYPES = ["float32", "bfloat16"]


def tokens_of(logits_TE, **state):
    return RouterTokens(logits_TE, jnp.zeros((len(logits_TE), 2)), jnp.ones(len(logits_TE), bool), state)


def route(logits_TE, top_k, router=TopK(), **state):  # noqa: B008 - frozen
    return ExpertConfig(logits_TE.shape[1], top_k=top_k, router=router).route(tokens_of(logits_TE, **state))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 300.0, 1e30])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_tokens_go_to_the_classes_of_the_largest_logits(top_k, scale, dtype):
    """Beyond a spread of about 100 all probabilities but the first are zero, and say nothing of the order."""
    steps_TE = np.random.default_rng(0).permuted(np.tile(np.arange(8), (64, 1)), axis=1) - 5
    logits_TE = jnp.asarray(steps_TE * scale, dtype)
    choices_TK, gates_TK, probs_TE, *_ = jax.device_get(route(logits_TE, top_k))
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
    gradient_TE = jax.grad(lambda logits_TE: jnp.sum(route(logits_TE, 2).gates_TK[:, 1]))(logits_TE)
    assert gradient_TE.dtype == logits_TE.dtype
    np.testing.assert_array_equal(np.asarray(gradient_TE, np.float32), 0)


def drawn(num_tokens=9, num_classes=5):
    random = np.random.default_rng(num_tokens)
    return random.standard_normal((num_tokens, num_classes)), random


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("top_k", [1, 3])
def test_a_bias_chooses_and_does_not_weigh(top_k):
    """A token at a time: the experts of the largest sum of score and bias, with their scores alone as gates."""
    logits_TE, random = drawn()
    bias_E = random.standard_normal(5)
    router = TopK("sigmoid", normalize_gates=True, gate_scale=2.5)
    choices_TK, gates_TK, *_ = route(jnp.asarray(logits_TE), top_k, router, bias_E=jnp.asarray(bias_E))
    for logits_E, choices_K, gates_K in zip(logits_TE, choices_TK, gates_TK, strict=True):
        scores = [1 / (1 + np.exp(-logit)) for logit in logits_E]
        wanted = sorted(range(5), key=lambda e: -(scores[e] + bias_E[e]))[:top_k]
        assert list(choices_K) == wanted
        np.testing.assert_allclose(gates_K, [2.5 * scores[e] / sum(scores[e] for e in wanted) for e in wanted])

    def sum_of_gates(bias_E):
        return route(jnp.asarray(logits_TE), top_k, router, bias_E=bias_E).gates_TK.sum()

    gradient_E = jax.grad(sum_of_gates)(jnp.asarray(bias_E))
    assert not gradient_E.any()


def test_gates_are_numbers_where_all_sigmoids_underflow():
    logits_TE = jnp.asarray([[-200.0, -201.0, -202.0, -203.0]])

    def total(logits_TE):
        routing = route(logits_TE, 2, TopK("sigmoid", normalize_gates=True))
        return routing.gates_TK[0, 0] + routing.probs_TE[0, 0]

    value, gradient_TE = jax.value_and_grad(total)(logits_TE)
    # Sigmoids as small as these are exponentials.
    weights = np.exp(-np.arange(4.0))
    np.testing.assert_allclose(value, 1 / weights[:2].sum() + 1 / weights.sum(), rtol=1e-4)
    assert np.isfinite(np.asarray(gradient_TE)).all()
    assert gradient_TE[0, 0] > 0


@pytest.mark.usefixtures("x64")
def test_the_ranks_parts_of_the_z_loss():
    logits_TE, random = drawn(8)
    valid_T, direction_TE = np.arange(8) % 3 > 0, random.standard_normal((8, 5))

    def expected(logits_TE):
        return np.mean([np.log(sum(np.exp(logits_E))) ** 2 for logits_E in logits_TE[valid_T]])

    def parts(logits_TE):
        return sum(z_loss(logits_TE[half], valid_T[half], valid_T.sum()) for half in (slice(3), slice(3, 8)))

    value, gradient_TE = jax.value_and_grad(parts)(jnp.asarray(logits_TE))
    np.testing.assert_allclose(value, expected(logits_TE), rtol=1e-12)
    slope = (expected(logits_TE + 1e-6 * direction_TE) - expected(logits_TE - 1e-6 * direction_TE)) / 2e-6
    np.testing.assert_allclose(np.sum(gradient_TE * direction_TE), slope, rtol=1e-7)
    assert z_loss(jnp.asarray(logits_TE), np.zeros(8, bool), np.int32(0)) == 0


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("of_balance", "of_z"), [(0.3, 0.0), (0.3, 0.07), (0.0, 0.07)])
def test_what_is_minimized_is_the_sum_of_both_losses_by_their_coefficients(of_balance, of_z):
    experts = ExpertConfig(5, top_k=2, aux_loss_coefficient=of_balance, z_loss_coefficient=of_z)
    logits_TE, valid_T = jnp.asarray(drawn()[0]), np.ones(9, bool)
    tokens, popularity_E = tokens_of(logits_TE), jnp.asarray([6, 1, 5, 4, 2], jnp.int32)
    routing = experts.route(tokens)
    found = experts.auxiliary_weight * auxiliary_loss(experts, routing, tokens, popularity_E, np.int32(9))
    balance = balance_loss(routing.probs_TE, valid_T, popularity_E, np.int32(9), 2)
    np.testing.assert_allclose(found, of_balance * balance + of_z * z_loss(logits_TE, valid_T, np.int32(9)))


def test_biases_rise_where_tokens_are_few():
    popularity_LE = jnp.asarray([[5, 3, 4], [0, 0, 9], [0, 0, 0]], jnp.int32)
    expected_LE = [[-0.25, 0.25, 0], [0.25, 0.25, -0.25], [0, 0, 0]]
    router, before = TopK(bias_update_rate=0.25), {"bias_E": jnp.asarray([0.5, 0.0, -1.0])}
    for popularity_E, expected_E in zip(popularity_LE, expected_LE, strict=True):
        after = router.update_state(before, popularity_E)
        np.testing.assert_array_equal(after["bias_E"], before["bias_E"] + np.array(expected_E))
