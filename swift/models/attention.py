"""Causal self-attention as a module with its norm.

Legend: B sequences, T positions, D model dim, H heads, K heads of keys and values, C channels of a head.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from swift.models.attention_kernels import KERNELS
from swift.models.config import AttentionKernel, ModelConfig
from swift.models.modules import linear, make_norm, residual_std, rms_norm
from swift.models.rope import Rope


class Attention(nnx.Module):
    """Causal self-attention with its norm; the caller adds the residual."""

    def __init__(self, config: ModelConfig, kernel: AttentionKernel, rngs: nnx.Rngs):
        self.kernel = kernel
        self.heads, self.channels = (config.num_heads, config.kv_heads), config.channels
        width, kv_width = (heads * self.channels for heads in self.heads)
        self.norm = make_norm(config, rngs)
        self.qkv = linear(rngs, config.model_dim, width + 2 * kv_width)
        self.out = linear(rngs, width, config.model_dim, residual_std(config))
        self.qk_norm = config.qk_norm
        if config.qk_norm != "none":
            one_head = config.qk_norm == "head"
            self.query_norm = rms_norm(config, rngs, self.channels if one_head else width)
            self.key_norm = rms_norm(config, rngs, self.channels if one_head else kv_width)
        rotates = config.positions == "rope"
        scaling = (config.rope_scaling, config.rope_factor, config.rope_length)
        self.rope = Rope(self.channels, config.rope_theta, *scaling) if rotates else None

    def __call__(
        self, x_BTD: Float[Array, "B T D"], document_BT: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Computes the update of the residual stream.

        Rotations can count positions from the start of the sequence instead of the document, because scores depend only
        on the distance between two positions.

        Args:
            x_BTD: residual stream.
            document_BT: int32, document number of each position; positions see only their own document. None if the
                whole sequence is one document.
        """
        mixed = KERNELS[self.kernel](*self.project(x_BTD, jnp.arange(x_BTD.shape[1])[None]), document_BT)
        return self.out(mixed.reshape(*mixed.shape[:2], -1))

    def project(
        self, x_BTD: Float[Array, "B T D"], position_BT: Int[Array, "#B T"]
    ) -> tuple[Float[Array, "B T H C"], Float[Array, "B T K C"], Float[Array, "B T K C"]]:
        """Computes queries, keys and values, rotated to the given positions if the model uses rotations."""
        num_heads, num_kv = self.heads
        width, kv_width = num_heads * self.channels, num_kv * self.channels
        query, key, value = jnp.split(self.qkv(self.norm(x_BTD)), [width, width + kv_width], axis=-1)
        if self.qk_norm == "projection":
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (array.reshape(*array.shape[:2], -1, self.channels) for array in (query, key, value))
        if self.qk_norm == "head":
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rope is not None:
            query, key = self.rope.rotate(query, position_BT), self.rope.rotate(key, position_BT)
        return query, key, value
