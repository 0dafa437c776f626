"""Flax NNX modules of the GPT: pre-norm, learned positions, no biases in the matrices.

Parameters and activations have the compute dtype; norms, softmaxes and the loss are at least float32.

Legend: B sequences, T positions, D model dim, V vocabulary, E experts, R rows.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from swift.experts import Matmul
from swift.models.config import ModelConfig
from swift.models.initial_values import Normal

_INIT_STD = 0.02  # GPT-2's


def _linear(rngs: nnx.Rngs, dim_in: int, dim_out: int, std: float = _INIT_STD) -> nnx.Linear:
    return nnx.Linear(dim_in, dim_out, use_bias=False, kernel_init=Normal(std), rngs=rngs)


def _norm(rngs: nnx.Rngs, dim: int) -> nnx.LayerNorm:
    return nnx.LayerNorm(dim, use_fast_variance=False, rngs=rngs)


def _residual_std(config: ModelConfig) -> float:
    # GPT-2 scales down the matrices that write to the residual stream by the square root of their number.
    return _INIT_STD / (2 * config.num_layers) ** 0.5


def _at_least_float32(dtype: DTypeLike) -> DTypeLike:
    return jnp.promote_types(dtype, jnp.float32)


@jax.custom_vjp
def look_up(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Looks up rows of a table, ``table[tokens]``.

    Autodiff's gradient is a scatter-add in the table's dtype, in which the bfloat16 sum of a frequent token stops
    growing, and whose order is undefined on GPU. Here it is a matmul with the one-hot tokens, summed in at least
    float32.
    """
    return table_VD[tokens_BT]


def _look_up_forward(table_VD: jax.Array, tokens_BT: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return look_up(table_VD, tokens_BT), (table_VD, tokens_BT)


def _look_up_backward(residuals: tuple[jax.Array, jax.Array], dy_BTD: jax.Array) -> tuple[jax.Array, None]:
    table_VD, tokens_BT = residuals
    is_token_BTV = jax.nn.one_hot(tokens_BT, table_VD.shape[0], dtype=dy_BTD.dtype)
    wide = _at_least_float32(dy_BTD.dtype)
    return jnp.einsum("btv,btd->vd", is_token_BTV, dy_BTD, preferred_element_type=wide).astype(table_VD.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


class Embedding(nnx.Module):
    """Token and position embeddings."""

    def __init__(self, config: ModelConfig, vocab_size: int, rngs: nnx.Rngs):
        # nnx.Embed would convert float64 and bfloat16 tables to float32.
        init = Normal(_INIT_STD)
        self.token_VD = nnx.Param(init(rngs.params(), (vocab_size, config.model_dim)))
        self.position_TD = nnx.Param(init(rngs.params(), (config.sequence_length, config.model_dim)))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Embeds int32 tokens and their positions, as x_BTD."""
        return look_up(self.token_VD[...], tokens_BT) + self.position_TD[...][None, : tokens_BT.shape[1]]


def causal_attention(query_BTHC: jax.Array, key_BTHC: jax.Array, value_BTHC: jax.Array) -> jax.Array:
    """Causal attention with H heads of C channels.

    ``jax.nn.dot_product_attention`` computes the same, but its softmax is in float32 even for float64 inputs, and the
    parallel model is tested against the reference model in float64.
    """
    length, channels = query_BTHC.shape[1], query_BTHC.shape[3]
    wide = _at_least_float32(query_BTHC.dtype)
    scores_BHTS = jnp.einsum("bthc,bshc->bhts", query_BTHC, key_BTHC, preferred_element_type=wide) * channels**-0.5
    causal_TS = jnp.tril(jnp.ones((length, length), bool))[None, None]
    probs_BHTS = jax.nn.softmax(jnp.where(causal_TS, scores_BHTS, jnp.finfo(scores_BHTS.dtype).min), axis=-1)
    return jnp.einsum("bhts,bshc->bthc", probs_BHTS.astype(value_BTHC.dtype), value_BTHC)


class Attention(nnx.Module):
    """Causal self-attention with its norm; the caller adds the residual."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        self.norm = _norm(rngs, config.model_dim)
        self.qkv = _linear(rngs, config.model_dim, 3 * config.model_dim)
        self.out = _linear(rngs, config.model_dim, config.model_dim, _residual_std(config))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Computes the update to the residual stream x_BTD."""
        batch, length, dim = x_BTD.shape
        heads = self.qkv(self.norm(x_BTD)).reshape(batch, length, 3, self.num_heads, dim // self.num_heads)
        mixed = causal_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2])
        return self.out(mixed.reshape(batch, length, dim))


class Expert(nnx.Module):
    """A feed-forward network. It maps zeros to zeros, so that empty rows of a slot stay zero."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.up = _linear(rngs, config.model_dim, config.ffn_dim)
        self.down = _linear(rngs, config.ffn_dim, config.model_dim, _residual_std(config))

    def __call__(self, x_RD: jax.Array, matmul: Matmul = jnp.matmul) -> jax.Array:
        """Applies the network to x ``[..., D]``; ``matmul`` multiplies rows by the weights of their experts."""
        return matmul(jax.nn.gelu(matmul(x_RD, self.up.kernel[...])), self.down.kernel[...])


class Mlp(nnx.Module):
    """The feed-forward network of a dense layer, with its norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.norm = _norm(rngs, config.model_dim)
        self.ffn = Expert(config, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Computes the update to the residual stream x_BTD."""
        return self.ffn(self.norm(x_BTD))


class Router(nnx.Module):
    """Norm before the experts, and the matrix that computes their logits."""

    def __init__(self, config: ModelConfig, num_classes: int, rngs: nnx.Rngs):
        self.norm = _norm(rngs, config.model_dim)
        self.score = _linear(rngs, config.model_dim, num_classes)

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes (normed x_BTD for the experts, logits_BTE in at least float32)."""
        normed = self.norm(x_BTD)
        dtype = _at_least_float32(normed.dtype)
        return normed, jnp.einsum("btd,de->bte", normed.astype(dtype), self.score.kernel[...].astype(dtype))


class Head(nnx.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self, config: ModelConfig, vocab_size: int, rngs: nnx.Rngs):
        self.norm = _norm(rngs, config.model_dim)
        self.out = _linear(rngs, config.model_dim, vocab_size)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Computes logits_BTV, at least float32, from x_BTD."""
        normed, kernel_DV = self.norm(x_BTD), self.out.kernel[...]
        return jnp.einsum("btd,dv->btv", normed, kernel_DV, preferred_element_type=_at_least_float32(normed.dtype))
