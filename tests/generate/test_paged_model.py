"""The memory of a call of the model."""

import jax
import jax.numpy as jnp

from swift.experts.config import ExpertConfig
from swift.generate.paged_model import Passages, extend
from swift.models.config import ModelConfig
from swift.models.gpt import GPT

EXPERTS = ExpertConfig(num_classes=2)
GPT_ = GPT(ModelConfig(num_layers=2, model_dim=8, num_heads=2, ffn_dim=8, sequence_length=64), 16, 2)


def temporary_bytes(num_pages):
    """Temporary memory of a call that decodes, and the bytes of the pages that are written in place."""
    weights = jax.eval_shape(lambda: GPT_.unpack(GPT_.init(jax.random.key(0))))
    pages = tuple(jax.ShapeDtypeStruct((num_pages, 2, 2, 4), jnp.float32) for _ in range(2))
    shapes = Passages((4, 1), (4, 1), (4,), (4,), (4, 64), (4, 1))
    arrays = Passages(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))
    analysis = extend.lower(GPT_, EXPERTS, weights, pages, arrays).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= 2 * num_pages * 2 * 2 * 4 * 4
    return analysis.temp_size_in_bytes


def test_pages_are_written_in_place_and_never_copied():
    assert temporary_bytes(16_384) == temporary_bytes(1024)
