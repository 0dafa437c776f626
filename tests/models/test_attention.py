"""Attention in blocks against the plain form, and documents that do not see each other."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.experts.config import ExpertConfig
from swift.experts.routers import TopK
from swift.models import attention_kernels
from swift.models.attention_kernels import KERNELS, blockwise_attention, causal_attention, tiled_attention
from swift.models.config import ModelConfig
from swift.models.gpt import GPT
from swift.models.reference_model import plain_logits
from tests.models import decoder_oracle
from tests.models.test_decoders import by_name

pytestmark = pytest.mark.usefixtures("x64")


def drawn(length, heads, kv_heads, channels, dtype):
    """Queries, keys and values of two sequences, a cotangent, and documents."""
    random = np.random.default_rng(length)
    shapes = [(2, length, count, channels) for count in (heads, kv_heads, kv_heads, heads)]
    documents = np.sort(random.integers(0, 4, (2, length)).astype(np.int32), axis=1)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes], jnp.asarray(documents)


def with_gradients(mix, arrays, documents):
    """(what is mixed, gradients of queries, keys and values)."""
    *inputs, dy = arrays
    y, pull_back = jax.jit(lambda inputs: jax.vjp(lambda *inputs: mix(*inputs, documents), *inputs))(inputs)
    return y, *pull_back(dy)


@pytest.mark.parametrize("separates", [False, True])
@pytest.mark.parametrize(("length", "kv_heads"), [(12, 4), (11, 2), (4, 1), (9, 1)])
def test_blocks_are_the_plain_form(monkeypatch, length, kv_heads, separates):
    monkeypatch.setattr(attention_kernels, "BLOCK", 4)
    arrays, documents = drawn(length, 4, kv_heads, 6, jnp.float64)
    documents = documents if separates else None
    found = with_gradients(blockwise_attention, arrays, documents)
    for ours, plain in zip(found, with_gradients(KERNELS["plain"], arrays, documents), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-12, atol=1e-12)


def test_tiles_are_the_plain_form_and_have_few_scores(monkeypatch):
    """Blocks are halved until all scores of one are few: 2 sequences of 4 heads have 72 of them in 3 x 3."""
    monkeypatch.setattr(attention_kernels, "BLOCK", 12)
    monkeypatch.setattr(attention_kernels, "SMALLEST_TILE", 2)
    monkeypatch.setattr(attention_kernels, "TILE_SCORES", 72)
    arrays, documents = drawn(13, 4, 2, 6, jnp.float64)
    found = with_gradients(tiled_attention, arrays, documents)
    for ours, plain in zip(found, with_gradients(KERNELS["plain"], arrays, documents), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-12, atol=1e-12)
    text = str(jax.make_jaxpr(tiled_attention)(*arrays[:3], documents))
    assert "[2,2,2,3,3]" in text
    assert "6,6]" not in text


def test_groups_read_their_head():
    """Head h of 4 reads head h // 2 of 2."""
    (query, key, value, _), _ = drawn(7, 4, 2, 3, jnp.float64)
    each = [causal_attention(query[:, :, [h]], key[:, :, [h // 2]], value[:, :, [h // 2]]) for h in range(4)]
    np.testing.assert_allclose(causal_attention(query, key, value), jnp.concatenate(each, axis=2), atol=1e-12)


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("kernel", ["plain", "blockwise"])
def test_a_packed_document_is_as_if_alone(monkeypatch, positions, kernel):
    """Logits of three documents in a sequence, each ending with token 0, are those of each as a sequence of its own."""
    monkeypatch.setattr(attention_kernels, "BLOCK", 4)
    config = ModelConfig(2, 12, 2, 10, 11, (True,), positions=positions)
    gpt, experts = GPT(config, 9, 3, kernel, separator=0), ExpertConfig(num_classes=3)
    random = np.random.default_rng(0)
    params = {
        group: array + 0.3 * random.standard_normal(array.shape)
        for group, array in jax.device_get(jax.jit(gpt.init)(jax.random.key(0))).items()
    }
    documents = [np.array(tokens, np.int32) for tokens in ([3, 1, 7, 0], [0], [5, 5, 2, 8, 1, 4])]

    @functools.partial(jax.jit, static_argnums=0)
    def logits(separator, tokens):
        return plain_logits(replace(gpt, separator=separator), experts, gpt.unpack(params), tokens)

    alone = [logits(0, tokens[None])[0] for tokens in documents]
    packed = logits(0, np.concatenate(documents)[None])[0]
    np.testing.assert_allclose(packed, np.concatenate(alone), rtol=1e-10)
    mixed = logits(None, np.concatenate(documents)[None])
    assert not np.allclose(mixed[0, 4:], packed[4:], atol=1e-3)


def test_a_packed_sequence_is_that_of_the_papers():
    """Against numpy, a document at a time."""
    config = ModelConfig(
        2, 12, 4, 10, 6, (True,), norm="rmsnorm", positions="rope", activation="swiglu", num_kv_heads=2, head_dim=4
    )
    experts = ExpertConfig(num_classes=3, top_k=2, router=TopK(normalize_gates=True))
    gpt, random = GPT(config, 9, 3, "blockwise", separator=8), np.random.default_rng(1)
    params = {
        group: 0.5 * random.standard_normal(shape.shape)
        for group, shape in jax.eval_shape(lambda: gpt.init(jax.random.key(0))).items()
    }
    documents = [np.array([3, 1, 8]), np.array([5, 2, 4])]
    parts = by_name(gpt.unpack(params))
    expected = [decoder_oracle.logits(parts, config, experts, tokens) for tokens in documents]
    logits = jax.jit(lambda params, tokens: plain_logits(gpt, experts, gpt.unpack(params), tokens))
    found = logits(params, np.concatenate(documents)[None])
    np.testing.assert_allclose(found[0], np.concatenate(expected), rtol=1e-9, atol=1e-9)
