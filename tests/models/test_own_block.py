"""Own blocks: parameters begin as their modules draw them, and what cannot work is told before it starts."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from swift.errors import SettingError
from swift.models.config import ModelConfig
from swift.models.gpt import GPT
from swift.models.modules import linear
from swift.models.parameters import Normal, draw_parameters

CONFIG = ModelConfig(num_layers=2, model_dim=24, num_heads=2, ffn_dim=40, sequence_length=8, moe_pattern=(False, True))


class Mixer(nnx.Module):
    """Every kind of initial value that is not a plain draw, in the order of their names."""

    def __init__(self, config, rngs):
        dim, draw = config.model_dim, Normal(0.02)
        self.below = nnx.Param(jnp.full(dim, -1.0))
        self.bent = nnx.Param(jnp.linspace(-3, 3, dim))
        self.halved = nnx.Param(0.5 * draw(rngs.params(), (dim, dim)))
        self.joined = nnx.Param(jnp.concatenate([draw(rngs.params(), (dim, 1)), jnp.ones((dim, 2))], axis=1))
        self.plain = linear(rngs, dim, dim)
        self.turned = nnx.Param(jnp.asarray(draw(rngs.params(), (dim, dim))).T)
        self.uniform = nnx.Param(nnx.initializers.uniform(0.1)(rngs.params(), (dim, 3)))

    def __call__(self, x_BTD, _=None):
        return self.plain(x_BTD) * self.below[...][None, None]


class Stock(nnx.Module):
    """Layers of Flax as they come."""

    def __init__(self, config, rngs):
        self.one = nnx.Linear(config.model_dim, 2 * config.model_dim, rngs=rngs)
        self.two = nnx.Linear(2 * config.model_dim, config.model_dim, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, deterministic=True)

    def __call__(self, x, *_, **__):
        return self.dropout(self.two(jax.nn.relu(self.one(x))))


class Constants(nnx.Module):
    """Constants below zero, next to draws as they are."""

    def __init__(self, config, width, rngs):
        self.down, self.up = linear(rngs, width, config.model_dim), linear(rngs, config.model_dim, width)
        self.minus = nnx.Param(jnp.full((3, 2), -2.0))
        self.steps = nnx.Param(jnp.arange(4.0) - 2)

    def __call__(self, x, matmul=jnp.matmul):
        return matmul(jax.nn.relu(matmul(x, self.up.kernel[...])), self.down.kernel[...])


class WithDropout(Stock):
    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class WithBatchNorm(Stock):
    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.norm = nnx.BatchNorm(config.model_dim, rngs=rngs)


class Cut(Stock):
    def __call__(self, x, *_, **__):
        return super().__call__(x)[..., 1:]


class Failing(Stock):
    def __init__(self, config, rngs):
        super().__init__(config.no_such_setting, rngs)


@dataclass(frozen=True)
class Block:
    mixer: type = Mixer
    ffn: type = Constants

    def attention(self, config, rngs):
        return self.mixer(config, rngs)

    def network(self, config, width, rngs):
        return Constants(config, width, rngs) if self.ffn is Constants else self.ffn(config, rngs)


@pytest.mark.parametrize("block", [Block(), pytest.param(Block(Stock), marks=pytest.mark.long)], ids=["own", "stock"])
def test_parameters_begin_as_their_modules_draw_them(block):
    groups = GPT(replace(CONFIG, block=block), 30, 3).groups
    parts = {name: groups[name] for name in ("attention", "expert")}
    key = jax.random.key(5)
    begun = jax.jit(partial(draw_parameters, parts))(key)
    for (name, group), own in zip(parts.items(), jax.random.split(key, len(parts)), strict=True):
        last = jax.random.split(own, (group.num_layers, group.num_classes))[-1, -1]
        drawn = jax.jit(lambda key, group=group: nnx.state(group.create(nnx.Rngs(key))))(last)
        ours = group.unpack(begun[name][-1, -1])
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-8), ours, drawn)
        assert all(
            float(jnp.abs(leaf).max()) > 0 for path, leaf in jax.tree.leaves_with_path(ours) if "bias" not in str(path)
        )


@pytest.mark.long
def test_a_block_of_stock_layers_has_logits_and_gradients():
    gpt = GPT(replace(CONFIG, block=Block(Stock, Stock), moe_pattern=(False,)), 30, 1)
    weights, tokens = gpt.unpack(gpt.init(jax.random.key(0))), jnp.arange(16).reshape(2, 8)

    def loss(weights):
        x_BTD, _, _ = gpt.stage(weights, gpt.config.moe_layers, gpt.embed(weights, tokens), tokens >= 0, str)
        return gpt.head_loss(weights, x_BTD, tokens, tokens >= 0)

    for gradient in jax.tree.leaves(jax.grad(loss)(weights)["attention"]):
        assert float(jnp.abs(gradient).max()) > 0


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Block(WithDropout), r"its attention has 'dropout\.rngs\.\w+', a Rng\w+ of .*; it may have floating-point"),
        (Block(WithBatchNorm), r"its attention has 'norm\.mean', a BatchStat of float32; it may have floating-point"),
        (Block(Cut), r"its attention must return \[2, 8, 24\] of rows, and returns \[2, 8, 23\]"),
        (Block(Failing), r"its attention cannot be made: AttributeError: "),
        (
            Block(Stock, Stock),
            r"its network does not work on rows of several experts \(multiply by weights with matmul",
        ),
    ],
)
def test_a_block_that_cannot_work_is_told_in_one_line(block, message):
    with pytest.raises(SettingError, match=message) as raised:
        GPT(replace(CONFIG, block=block), 30, 3)
    assert str(raised.value).startswith("ModelConfig.block = ")
    assert "\n" not in str(raised.value)
