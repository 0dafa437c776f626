"""The parts that the plain model shares with the parallel one, and the plain model itself, against numpy alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from swift.experts.config import ExpertConfig, SlotCapacity
from swift.experts.optimizer import OptimizerConfig, learning_rate, make_optimizer
from swift.experts.routers import TopK
from swift.experts.routing import balance_loss
from swift.models.config import ModelConfig
from swift.models.gpt import GPT
from swift.models.reference_model import plain_logits, plain_sums
from tests import oracles

pytestmark = pytest.mark.usefixtures("x64")

CONFIG = ModelConfig(num_layers=2, model_dim=8, num_heads=2, ffn_dim=12, sequence_length=5, moe_pattern=(False, True))
VOCABULARY, CLASSES, RANKS, SLOTS = 11, 4, 2, 3


def along(gradients, directions):
    return sum(float(jnp.sum(g * d)) for g, d in zip(gradients, directions, strict=True))


@pytest.mark.parametrize("top_k", [1, 2])
def test_routing(top_k):
    random = np.random.default_rng(0)
    logits, weights, direction = random.standard_normal((3, 7, 5))
    choices, gates, probs = oracles.routing(logits, top_k)
    found = TopK().choose(jnp.asarray(logits), top_k)
    np.testing.assert_array_equal(found.choices_TK, choices)
    np.testing.assert_allclose(found.gates_TK, gates, rtol=1e-12)
    np.testing.assert_allclose(found.probs_TE, probs, rtol=1e-12)

    gradient = jax.grad(lambda logits: jnp.sum(TopK().choose(logits, top_k).gates_TK * weights[:, :top_k]))(logits)
    expected = oracles.slope(lambda at: np.sum(oracles.routing(at, top_k)[1] * weights[:, :top_k]), logits, direction)
    np.testing.assert_allclose(np.sum(gradient * direction), expected, rtol=1e-7)


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_ranks_parts_of_the_balance_loss(top_k):
    """The parts add up to the loss, and their gradients to its gradient, where the shares of choices stand still."""
    random = np.random.default_rng(1)
    logits_NTE, direction = random.standard_normal((2, RANKS, 6, CLASSES))
    valid_NT = random.random((RANKS, 6)) < 0.7
    choices, _, probs = oracles.routing(logits_NTE.reshape(-1, CLASSES), top_k)
    popularity_E = np.bincount(choices[valid_NT.ravel()].ravel(), minlength=CLASSES)

    def parts(logits_NTE):
        return sum(
            balance_loss(jax.nn.softmax(logits_NTE[n]), valid_NT[n], popularity_E, valid_NT.sum(), top_k)
            for n in range(RANKS)
        )

    value, gradient = jax.value_and_grad(parts)(jnp.asarray(logits_NTE))
    np.testing.assert_allclose(value, oracles.balance_loss(choices, probs, valid_NT.ravel()), rtol=1e-12)
    expected = oracles.slope(
        lambda at: oracles.balance_loss(choices, oracles.softmax(at.reshape(-1, CLASSES)), valid_NT.ravel()),
        logits_NTE,
        direction,
    )
    np.testing.assert_allclose(np.sum(gradient * direction), expected, rtol=1e-7)
    assert balance_loss(probs, np.zeros(len(probs), bool), np.zeros(CLASSES, np.int32), np.int32(0), top_k) == 0


def test_an_even_load_has_a_balance_loss_of_one():
    """Switch's reason for the factor E."""
    even_TE = np.full((8, CLASSES), 1 / CLASSES)
    loss = balance_loss(even_TE, np.ones(8, bool), np.full(CLASSES, 2), np.int32(8), 1)
    np.testing.assert_allclose(loss, 1.0)


def test_learning_rates():
    config = OptimizerConfig(peak_learning_rate=3e-3, final_learning_rate=2e-4, warmup_steps=7)
    schedule = learning_rate(config, 50)
    expected = [oracles.learning_rate(step, 3e-3, 2e-4, 7, 50) for step in range(1, 51)]
    np.testing.assert_allclose([schedule(done) for done in range(50)], expected, rtol=1e-6)
    assert [max(expected), expected[6], expected[-1]] == pytest.approx([3e-3, 3e-3, 2e-4])


def test_adamw_with_the_default_settings():
    config, random = OptimizerConfig(warmup_steps=3), np.random.default_rng(2)
    weights, gradients = random.standard_normal(20), random.standard_normal((6, 20)) * 10.0 ** np.arange(-3, 3)[:, None]
    optimizer = make_optimizer(config, 10)
    params, state = jnp.asarray(weights), optimizer.init(jnp.asarray(weights))
    for gradient in gradients:
        updates, state = optimizer.update(jnp.asarray(gradient), state, params)
        params = optax.apply_updates(params, updates)
    rates = [oracles.learning_rate(step, 1e-3, 1e-4, 3, 10) for step in range(1, 7)]
    expected = oracles.adamw(weights, gradients, rates, 0.9, 0.95, 0.1)
    np.testing.assert_allclose(params - weights, expected - weights, rtol=1e-5)


def test_moments_in_bfloat16_are_rounded_after_every_update():
    """AdamW by hand, with its two averages rounded; and much less than a per cent from those that are not."""
    config, random = OptimizerConfig(warmup_steps=3, moments="bfloat16"), np.random.default_rng(2)
    weights, gradients = random.standard_normal(20), random.standard_normal((6, 20))
    optimizer = make_optimizer(config, 10)
    params, state = jnp.asarray(weights), optimizer.init(jnp.asarray(weights))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim} == {"bfloat16"}
    first, second, expected = np.zeros(20), np.zeros(20), weights
    rounded = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float64))  # noqa: E731
    for step, gradient in enumerate(gradients, start=1):
        updates, state = optimizer.update(jnp.asarray(gradient), state, params)
        params = optax.apply_updates(params, updates)
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        rate = oracles.learning_rate(step, 1e-3, 1e-4, 3, 10)
        direction = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)
        expected = expected - rate * (direction + 0.1 * expected)
        first, second = rounded(first), rounded(second)
    np.testing.assert_allclose(params - weights, expected - weights, rtol=1e-5)
    rates = [oracles.learning_rate(step, 1e-3, 1e-4, 3, 10) for step in range(1, 7)]
    unrounded = oracles.adamw(weights, gradients, rates, 0.9, 0.95, 0.1)
    difference = np.abs(expected - unrounded).max() / np.abs(unrounded - weights).max()
    assert 0 < difference < 0.01


def packed(gpt, flat):
    """A flat vector as parameters ``[rows, classes, size]`` by group."""
    params, start = {}, 0
    for name, group in gpt.groups.items():
        shape = (group.num_layers, group.num_classes, group.size)
        params[name] = flat[start : start + math.prod(shape)].reshape(shape)
        start += math.prod(shape)
    return params


class Numpy:
    """The whole model in numpy, on parameters ``[rows, classes, size]`` as one flat vector."""

    def __init__(self, gpt, experts, placement_NS):
        self.gpt, self.experts = gpt, experts
        self.replicas_E = np.bincount(placement_NS.ravel(), minlength=CLASSES)
        self.rows = math.ceil(experts.capacity.factor * 2 * CONFIG.sequence_length * experts.top_k / placement_NS.size)

    def parts(self, flat):
        """The parameters by module: lists of dicts of arrays."""
        named = lambda state: {  # noqa: E731
            ".".join(str(key.key) for key in path if hasattr(key, "key")): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        }
        return {
            name: [named(state) for state in rows] for name, rows in self.gpt.unpack(packed(self.gpt, flat)).items()
        }

    def mixture(self, x_BTD, router, expert):
        """(y, the auxiliary loss, choices wanted and dropped by class)."""
        normed = oracles.layer_norm(x_BTD, router["norm.scale"], router["norm.bias"]).reshape(-1, CONFIG.model_dim)
        choices, gates, probs = oracles.routing(normed @ router["score.kernel"], self.experts.top_k)
        valid_NT = self.valid.reshape(RANKS, -1)
        kept = np.concatenate(
            [
                oracles.kept_by_slot(of_rank, valid_T, self.replicas_E, self.rows)
                for of_rank, valid_T in zip(choices.reshape(RANKS, -1, choices.shape[1]), valid_NT, strict=True)
            ]
        )
        y = oracles.mixture(normed, choices, gates, kept, expert["up.kernel"], expert["down.kernel"])
        aux = oracles.balance_loss(choices, probs, self.valid.ravel())
        wanted, served = choices[self.valid.ravel()], choices[kept]
        counts = [np.bincount(picked.ravel(), minlength=CLASSES) for picked in (wanted, served)]
        return y.reshape(x_BTD.shape), aux, counts[0], counts[0] - counts[1]

    def __call__(self, flat, inputs, labels, valid):
        """(sum of the losses, auxiliary loss, popularity, dropped)."""
        self.valid, at = valid, self.parts(flat)
        embedding, router, expert, head, mlp = (at[n][0] for n in ("embedding", "router", "expert", "head", "mlp"))
        x = embedding["token_VD"][inputs] + embedding["position_TD"][: inputs.shape[1]]

        def attend(x, layer):
            normed = oracles.layer_norm(x, layer["norm.scale"], layer["norm.bias"])
            return x + oracles.causal_attention(normed, layer["qkv.kernel"], layer["out.kernel"], CONFIG.num_heads)

        x = attend(x, at["attention"][0])
        normed = oracles.layer_norm(x, mlp["norm.scale"], mlp["norm.bias"])
        x = x + oracles.feed_forward(normed, mlp["ffn.up.kernel"], mlp["ffn.down.kernel"])
        x = attend(x, at["attention"][1])
        y, aux, wanted, dropped = self.mixture(x, router, expert)
        loss = oracles.head_loss(x + y, head["norm.scale"], head["norm.bias"], head["out.kernel"], labels, valid)
        return loss, aux, wanted, dropped


@pytest.mark.parametrize(("top_k", "factor"), [(1, 0.8), (2, 0.6)])
def test_the_plain_model_is_that_of_the_papers(top_k, factor):
    """Loss, auxiliary loss, who is dropped, and the gradients of both losses along random directions."""
    random = np.random.default_rng(top_k)
    experts = ExpertConfig(CLASSES, SLOTS, top_k, SlotCapacity(factor))
    gpt = GPT(CONFIG, VOCABULARY, CLASSES)
    placement_NS = np.array([[0, 1, 2], [3, 0, 1]], np.int32)
    model = Numpy(gpt, experts, placement_NS)
    flat = 0.3 * random.standard_normal(gpt.num_parameters)
    tokens = random.integers(0, VOCABULARY, (4, 6)).astype(np.int32)
    valid = np.arange(5) < np.array([[5], [3], [5], [4]])
    batch = tokens[:, :-1], tokens[:, 1:], valid

    def sums(flat):
        weights = gpt.unpack(packed(gpt, flat))
        loss, aux, (load,) = plain_sums(gpt, experts, weights, placement_NS[None], *batch)
        return (loss, aux), load

    loss, aux, wanted, dropped = model(flat, *batch)
    (found_loss, found_aux), load = jax.jit(sums)(flat)
    np.testing.assert_allclose([found_loss, found_aux], [loss, aux], rtol=1e-10)
    np.testing.assert_array_equal(load.popularity_E, wanted)
    np.testing.assert_array_equal(load.dropped_E, dropped)
    assert dropped.any()

    gradients = jax.jit(jax.jacrev(lambda flat: jnp.stack(sums(flat)[0])))(flat)
    for direction in random.standard_normal((3, gpt.num_parameters)):
        slopes = oracles.slope(lambda at: np.array(model(at, *batch)[:2]), flat, direction)
        np.testing.assert_allclose(gradients @ direction, slopes, rtol=1e-5)


def test_an_exported_model_serves_every_token():
    gpt, experts = GPT(CONFIG, VOCABULARY, CLASSES), ExpertConfig(CLASSES, SLOTS, 2, SlotCapacity(0.1))
    flat = 0.3 * np.random.default_rng(5).standard_normal(gpt.num_parameters)
    everybody = Numpy(gpt, ExpertConfig(CLASSES, SLOTS, 2, SlotCapacity(100.0)), np.arange(4))
    tokens = np.arange(20, dtype=np.int32).reshape(4, 5) % VOCABULARY
    logits = jax.jit(lambda flat: plain_logits(gpt, experts, gpt.unpack(packed(gpt, flat)), tokens))(flat)
    labels = np.roll(tokens, 1)
    found = -np.log(np.take_along_axis(oracles.softmax(np.asarray(logits)), labels[..., None], axis=-1)).sum()
    np.testing.assert_allclose(found, everybody(flat, tokens, labels, np.ones(tokens.shape, bool))[0], rtol=1e-10)
