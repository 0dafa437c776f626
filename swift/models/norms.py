"""Norms and matrices that the modules are made of, as a model's config says."""

from flax import nnx
from jax import numpy as jnp
from jax.typing import DTypeLike

from swift.models.config import ModelConfig
from swift.models.initial_values import Normal

INIT_STD = 0.02  # GPT-2's


def linear(rngs: nnx.Rngs, dim_in: int, dim_out: int, std: float = INIT_STD) -> nnx.Linear:
    """Makes a matrix without a bias."""
    return nnx.Linear(dim_in, dim_out, use_bias=False, kernel_init=Normal(std), rngs=rngs)


def make_norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """Makes the norm before a part of a layer."""
    if config.norm == "rmsnorm":
        return rms_norm(config, rngs, config.model_dim)
    return nnx.LayerNorm(config.model_dim, epsilon=config.norm_epsilon, use_fast_variance=False, rngs=rngs)


def rms_norm(config: ModelConfig, rngs: nnx.Rngs, dim: int) -> nnx.RMSNorm:
    """Makes a norm by the root of the mean square, with a scale for each channel."""
    return nnx.RMSNorm(dim, epsilon=config.norm_epsilon, use_fast_variance=False, rngs=rngs)


def residual_std(config: ModelConfig) -> float:
    """Standard deviation of the matrices that write to the residual stream, scaled down by the root of their number."""
    return INIT_STD / (2 * config.num_layers) ** 0.5


def at_least_float32(dtype: DTypeLike) -> DTypeLike:
    """A dtype, or float32 if it is narrower."""
    return jnp.promote_types(dtype, jnp.float32)
