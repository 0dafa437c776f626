"""Initial parameters are bit for bit what the modules' initializers draw when they are called with keys."""

import jax
import numpy as np
import pytest
from flax import nnx

from swift.models.config import ModelConfig
from swift.models.gpt import GPT

pytestmark = pytest.mark.usefixtures("compiled_well")

CONFIG = ModelConfig(num_layers=2, model_dim=32, num_heads=2, ffn_dim=40, sequence_length=24, moe_pattern=(False, True))


def drawn_by_modules(gpt: GPT, key: jax.Array) -> dict[str, jax.Array]:
    """Values that the modules draw when they are made with keys, each group as one program."""
    drawn = {}
    for (name, group), own in zip(gpt.groups.items(), jax.random.split(key, len(gpt.groups)), strict=True):

        def one(key: jax.Array, group=group) -> jax.Array:
            return group.pack(nnx.state(group.create(nnx.Rngs(key))))

        keys = jax.random.split(own, (group.num_layers, group.num_classes))
        drawn[name] = jax.jit(jax.vmap(jax.vmap(one)))(keys)
    return drawn


@pytest.mark.parametrize("is_wide", [False, pytest.param(True, marks=pytest.mark.long)])
def test_parameters_begin_as_their_modules_draw_them(is_wide):
    gpt = GPT(CONFIG, vocab_size=50, num_classes=3)
    with jax.enable_x64(is_wide):
        key = jax.random.key(11)
        expected, begun = jax.device_get((drawn_by_modules(gpt, key), jax.jit(gpt.init)(key)))
    assert begun.keys() == expected.keys()
    for name, values in expected.items():
        assert begun[name].dtype == values.dtype
        np.testing.assert_array_equal(begun[name], values, err_msg=name)


@pytest.mark.long
def test_numbers_do_not_depend_on_the_size_of_a_piece(monkeypatch):
    gpt = GPT(CONFIG, vocab_size=50, num_classes=3)
    begun = jax.jit(gpt.init)(jax.random.key(3))
    monkeypatch.setattr("swift.models.parameters._SMALLEST_PIECE", 64)
    monkeypatch.setattr("swift.models.parameters._NUM_PIECES", 2**16)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(gpt.init)(jax.random.key(3)), begun)
