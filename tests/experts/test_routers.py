"""The built-in routers against NumPy, a token or an expert at a time; and their gradients along random directions."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.errors import SettingError
from swift.experts.config import ExpertConfig, RankCapacity, SlotCapacity
from swift.experts.layer import auxiliary_loss
from swift.experts.routers import ExpertChoice, NoisyTopK, Sinkhorn, TopK
from swift.experts.routing import Number, RouterTokens, TokenNoise
from swift.generate.engine import TextEngine
from swift.models.config import ModelConfig
from swift.models.gpt import GPT
from tests import oracles

pytestmark = pytest.mark.usefixtures("x64")
EXPERTS, LENGTH = 6, 4


def tokens_of(num_tokens=16, num_logits=EXPERTS, seed=0, state=None, noisy=False):
    random = np.random.default_rng(seed)
    keys = jnp.asarray(random.integers(0, 2**32, (num_tokens // LENGTH, 2), dtype=np.uint32))
    return RouterTokens(
        jnp.asarray(2 * random.standard_normal((num_tokens, num_logits))),
        jnp.zeros((num_tokens, 2)),
        jnp.asarray(random.random(num_tokens) < 0.8),
        state or {},
        TokenNoise.of(keys, 0, LENGTH) if noisy else None,
    )


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def assert_gradient(router, tokens, top_k, gates_of):
    """The gates' gradient along a direction is the slope of the oracle's ``gates_of`` (logits) -> gates[T, K]."""
    random = np.random.default_rng(5)
    routing = router.route(tokens, EXPERTS, top_k)
    weights, direction = random.standard_normal(routing.gates_TK.shape), random.standard_normal(tokens.logits_TX.shape)

    def total(logits):
        return jnp.sum(router.route(tokens._replace(logits_TX=logits), EXPERTS, top_k).gates_TK * weights)

    gradient = jax.grad(total)(tokens.logits_TX)
    expected = oracles.slope(lambda logits: np.sum(gates_of(logits) * weights), np.asarray(tokens.logits_TX), direction)
    np.testing.assert_allclose(np.sum(gradient * direction), expected, rtol=1e-6)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("group_score", ["max", "top2"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_token_stays_in_its_best_groups(scores, group_score, bias):
    """DeepSeek's choice: groups by the largest biased score or the sum of the two largest, then experts in them."""
    bias_E = np.random.default_rng(9).standard_normal(EXPERTS)
    state = {"bias_E": jnp.asarray(bias_E)} if bias else {}
    router = TopK(scores, num_groups=3, top_groups=2, group_score=group_score)
    tokens = tokens_of(state=state)
    found = router.route(tokens, EXPERTS, 3)
    for logits, choices, gates in zip(np.asarray(tokens.logits_TX), found.choices_TK, found.gates_TK, strict=True):
        score = softmax(logits) if scores == "softmax" else 1 / (1 + np.exp(-logits))
        biased = score + bias_E * bias
        of_groups = [
            sorted(biased[2 * group : 2 * group + 2])[-1 if group_score == "max" else 0 :] for group in range(3)
        ]
        groups = sorted(range(3), key=lambda group: -sum(of_groups[group]))[:2]
        allowed = [expert for group in groups for expert in (2 * group, 2 * group + 1)]
        wanted = sorted(allowed, key=lambda expert: -biased[expert])[:3]
        assert choices.tolist() == wanted
        np.testing.assert_allclose(gates, score[wanted] / score[wanted].sum())


def test_a_single_noisy_choice_has_a_gradient():
    router, tokens = NoisyTopK(), tokens_of(num_logits=2 * EXPERTS, noisy=True)
    gradient = jax.grad(lambda logits: router.route(tokens._replace(logits_TX=logits), EXPERTS, 1).gates_TK.sum())(
        tokens.logits_TX
    )
    assert (np.abs(gradient) > 0).all()


def test_the_z_loss_is_of_the_logits_alone():
    experts, tokens = ExpertConfig(EXPERTS, EXPERTS, 2, z_loss_coefficient=1.0, router=NoisyTopK()), tokens_of(16, 12)
    tokens = tokens._replace(logits_TX=tokens.logits_TX.at[:, :EXPERTS].set(0.0))
    loss = auxiliary_loss(
        replace(experts, aux_loss_coefficient=0.0),
        experts.route(tokens),
        tokens,
        jnp.ones(EXPERTS, jnp.int32),
        tokens.valid_T.sum(),
    )
    np.testing.assert_allclose(loss, np.log(EXPERTS) ** 2)


@pytest.mark.parametrize("std", [None, 0.7])
def test_noise_moves_choices_and_its_size_is_learned(std):
    router = NoisyTopK(std)
    tokens = tokens_of(num_logits=router.num_logits(EXPERTS), noisy=True)
    noise = np.concatenate(
        [np.asarray(jax.random.normal(key, (LENGTH, EXPERTS), jnp.float64)) for key in tokens.noise.keys_B]
    )

    def gates_of(logits):
        sizes = np.log1p(np.exp(logits[:, EXPERTS:])) if std is None else std
        noisy = logits[:, :EXPERTS] + sizes * noise
        return np.stack([softmax(row[choices]) for row, choices in zip(noisy, found.choices_TK, strict=True)])

    found = router.route(tokens, EXPERTS, 2)
    np.testing.assert_allclose(found.gates_TK, gates_of(np.asarray(tokens.logits_TX)), rtol=1e-12)
    assert_gradient(router, tokens, 2, gates_of)
    without = router.route(tokens._replace(noise=None), EXPERTS, 2)
    np.testing.assert_array_equal(without.choices_TK, np.argsort(-tokens.logits_TX[:, :EXPERTS], axis=1)[:, :2])
    assert (without.choices_TK != found.choices_TK).any()


def test_noise_follows_the_sequence_and_the_layer_alone():
    keys = jnp.asarray(np.arange(6, dtype=np.uint32).reshape(3, 2))
    whole = TokenNoise.of(keys, 2, 5).draw(jax.random.normal, 4).reshape(3, 5, 4)
    for part in ([2], [1, 0], [0, 1, 2]):
        alone = TokenNoise.of(keys[jnp.asarray(part)], 2, 5).draw(jax.random.normal, 4).reshape(-1, 5, 4)
        np.testing.assert_array_equal(alone, whole[jnp.asarray(part)])
    assert (np.asarray(TokenNoise.of(keys, 1, 5).draw(jax.random.normal, 4)).reshape(3, 5, 4) != whole).all()
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        np.testing.assert_array_equal(TokenNoise.of(keys, 2, 5).draw(jax.random.normal, 4).reshape(3, 5, 4), whole)


@pytest.mark.parametrize("top_k", [1, 2])
def test_sinkhorn_balances_the_tokens_that_are_there(top_k):
    """In NumPy: rows and columns normalized in turn. Padding changes nothing for the other tokens."""
    tokens = tokens_of(64, seed=3)
    tokens = tokens._replace(
        logits_TX=tokens.logits_TX + jnp.asarray([[3.0, 0, 0, 0, 0, -3.0]])
    )  # a hot and a cold one
    found = Sinkhorn(200).route(tokens, EXPERTS, top_k)
    valid, logits = np.asarray(tokens.valid_T), np.asarray(tokens.logits_TX)
    plan = np.exp(logits[valid])
    for _ in range(300):
        plan /= plan.sum(axis=1, keepdims=True)
        plan /= plan.sum(axis=0, keepdims=True)
    np.testing.assert_array_equal(found.choices_TK[valid], np.argsort(-plan, axis=1)[:, :top_k])
    plain = np.bincount(np.argsort(-logits[valid], axis=1)[:, :top_k].ravel(), minlength=EXPERTS)
    balanced = np.bincount(np.asarray(found.choices_TK)[valid].ravel(), minlength=EXPERTS)
    assert balanced.max() < 0.6 * plain.max()

    def gates_of(logits):
        rows = 1 / (1 + np.exp(-logits)) if top_k == 1 else np.stack([softmax(row) for row in logits])
        return np.take_along_axis(rows, np.asarray(found.choices_TK), axis=1)

    np.testing.assert_allclose(found.gates_TK, gates_of(logits), rtol=1e-12)
    assert_gradient(Sinkhorn(200), tokens, top_k, gates_of)


def chosen_by_experts(logits, valid, per_expert, most):
    """{(token, expert)} of expert choice: each expert's most probable tokens; a token keeps its ``most`` best."""
    probs = np.stack([softmax(row) for row in logits])
    pairs = set()
    for expert in range(EXPERTS):
        wanted = sorted(
            (token for token in range(len(logits)) if valid[token]), key=lambda token: -probs[token, expert]
        )
        pairs |= {(token, expert) for token in wanted[:per_expert]}
    for token in range(len(logits)):
        mine = sorted((expert for of, expert in pairs if of == token), key=lambda expert: -probs[token, expert])
        pairs -= {(token, expert) for expert in mine[most:]}
    return pairs, probs


@pytest.mark.parametrize(("top_k", "most"), [(1, None), (2, None), (2, 2)])
def test_experts_choose_their_tokens(top_k, most):
    tokens, router = tokens_of(24, seed=4), ExpertChoice(most)
    found = router.route(tokens, EXPERTS, top_k)
    logits, valid = np.asarray(tokens.logits_TX), np.asarray(tokens.valid_T)
    pairs, probs = chosen_by_experts(logits, valid, 24 * top_k // EXPERTS, most or EXPERTS)
    is_choice, choices = np.asarray(found.is_choice_TK), np.asarray(found.choices_TK)
    assert {(token, int(choices[token, k])) for token, k in zip(*np.nonzero(is_choice), strict=True)} == pairs
    assert choices.shape == (24, most or EXPERTS)
    assert len(pairs) <= router.most_pairs(24, EXPERTS, top_k)

    def gates_of(logits):
        rows = np.stack([softmax(row) for row in logits])
        return np.where(is_choice, np.take_along_axis(rows, choices, axis=1), 0)

    np.testing.assert_allclose(found.gates_TK, gates_of(logits), rtol=1e-12)
    np.testing.assert_allclose(found.probs_TE, probs, rtol=1e-12)
    assert_gradient(router, tokens, top_k, gates_of)
    assert router.auxiliary_loss(found, tokens, jnp.zeros(EXPERTS, jnp.int32), jnp.int32(0), top_k) == 0


def test_experts_cannot_choose_a_part_of_a_token():
    with pytest.raises(SettingError, match="too few tokens"):
        ExpertChoice().route(tokens_of(4), EXPERTS, 1)


def test_a_model_of_expert_choice_cannot_generate():
    experts = ExpertConfig(EXPERTS, EXPERTS, 2, router=ExpertChoice())
    shape = ModelConfig(num_layers=2, model_dim=8, num_heads=2, ffn_dim=8, sequence_length=8)
    gpt = GPT(shape, 16, EXPERTS, router=experts.router)
    with pytest.raises(SettingError, match=r"ExpertConfig\.router = .*can only be trained"):
        TextEngine(gpt, experts, {})


def test_sinkhorn_generates_by_the_largest_logits():
    tokens = tokens_of(12)
    found = Sinkhorn().route_alone(tokens, EXPERTS, 2)
    np.testing.assert_array_equal(found.choices_TK, np.argsort(-tokens.logits_TX, axis=1)[:, :2])


def test_numbers_are_sums_or_means_of_valid_tokens():
    values, valid = np.arange(6.0).reshape(3, 2), np.array([True, False, True])
    mean = Number.mean(jnp.asarray(values), jnp.asarray(valid))
    np.testing.assert_array_equal(mean.value, [2, 3])
    layers = Number(jnp.asarray([[4.0, 6.0], [0.0, 0.0]]), jnp.asarray([2.0, 0.0]))
    np.testing.assert_array_equal(layers.value, [[2, 3], [0, 0]])
    assert Number(jnp.asarray(3.0)).value == 3


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: ExpertConfig(6, router=TopK(num_groups=4)),
            "TopK.num_groups = 4: must divide ExpertConfig.num_classes",
        ),
        (lambda: ExpertConfig(6, top_k=3, router=TopK(num_groups=3)), "TopK.top_groups = 1: groups of 2 experts each"),
        (lambda: ExpertConfig(3, router=TopK(num_groups=3, group_score="top2")), "needs groups of at least two"),
        (lambda: TopK(num_groups=2, top_groups=3), "TopK.top_groups = 3"),
        (lambda: TopK("relu"), "TopK.scores = 'relu'"),
        (lambda: TopK(bias_update_rate=-1), "TopK.bias_update_rate = -1"),
        (lambda: NoisyTopK(-0.1), "NoisyTopK.std = -0.1"),
        (lambda: Sinkhorn(0), "Sinkhorn.num_iterations = 0"),
        (lambda: ExpertChoice(0), "ExpertChoice.most_experts = 0"),
        (lambda: ExpertConfig(router="top"), "ExpertConfig.router = 'top': must be a router"),
        (lambda: ExpertConfig(router=NoisyTopK(), capacity=SlotCapacity(rules="deepspeed")), r"must be @TopK\(\) with"),
        (
            lambda: ExpertConfig(router=TopK("sigmoid"), capacity=SlotCapacity(rules="deepspeed")),
            "TopK.scores = 'sigmoid': must be 'softmax' with SlotCapacity.rules",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(make, text):
    with pytest.raises(SettingError, match=text):
        make()


def test_room_for_every_choice_is_for_as_many_as_there_can_be():
    """With the factor None no token is dropped: also where a token may have more experts than top_k."""
    experts = ExpertConfig(EXPERTS, EXPERTS, 2, RankCapacity(None), router=ExpertChoice())
    assert experts.capacity.rows_per_rank(experts, 9, 4) == 4 * (9 * 2 // EXPERTS) * EXPERTS
    assert experts.most_choices == EXPERTS
