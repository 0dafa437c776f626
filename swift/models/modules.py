"""Flax NNX modules of a decoder other than attention, and their parts: pre-norm, linear layers without bias.

Parameters and activations have the compute dtype; norms, softmaxes and the loss are at least float32.

The gradient of a table sums the rows of each token (``sum_rows``). Rows are sorted by index, and runs of equal indices
are summed in pairs, pairs of pairs, and so on: an order that depends only on the indices. The sums are therefore
bit-identical in every run of a program. A scatter-add does not guarantee this, since its order is undefined on GPU.

Legend: B sequences, T positions, D model dim, V vocabulary size or number of sums, E experts, R rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from swift.experts.layer import Matmul
from swift.experts.routing import Router
from swift.models.config import ModelConfig
from swift.models.parameters import Normal

_INIT_STD = 0.02  # GPT-2's

ONE_HOT_AT_ONCE = 2**20
"""Maximum number of one-hot entries. Above it, sums by sorting take less time on a CPU: a sixtieth for 2,048 x 8,192.
Not measured on accelerators."""

_RowsOf = Callable[[jax.Array, jax.Array], jax.Array]
"""Function (table, tokens_BT) -> rows of the tokens, x_BTD."""


def linear(rngs: nnx.Rngs, dim_in: int, dim_out: int, std: float = _INIT_STD) -> nnx.Linear:
    """Creates a linear layer without a bias."""
    return nnx.Linear(dim_in, dim_out, use_bias=False, kernel_init=Normal(std), rngs=rngs)


def make_norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """Creates a norm of the configured kind for the residual stream."""
    if config.norm == "rmsnorm":
        return rms_norm(config, rngs, config.model_dim)
    return nnx.LayerNorm(config.model_dim, epsilon=config.norm_epsilon, use_fast_variance=False, rngs=rngs)


def rms_norm(config: ModelConfig, rngs: nnx.Rngs, dim: int) -> nnx.RMSNorm:
    """Creates an RMSNorm with a scale for each channel."""
    return nnx.RMSNorm(dim, epsilon=config.norm_epsilon, use_fast_variance=False, rngs=rngs)


def residual_std(config: ModelConfig) -> float:
    """Returns the initial std for matrices that write to the residual stream, divided by the root of their number."""
    return _INIT_STD / (2 * config.num_layers) ** 0.5


def at_least_float32(dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype, or float32 if it is narrower."""
    return jnp.promote_types(dtype, jnp.float32)


@jax.custom_vjp
def look_up(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Looks up rows of a table, ``table[tokens]``.

    Autodiff's gradient is a scatter-add in the table's dtype: in bfloat16 the sum of a frequent token stops growing,
    and on GPU the order is undefined. Here a token's rows are summed in at least float32, by a matmul with the one-hot
    tokens or, where this matmul would be too large, by ``sum_rows``.
    """
    return table_VD[tokens_BT]


def _look_up_forward(table_VD: jax.Array, tokens_BT: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return look_up(table_VD, tokens_BT), (table_VD, tokens_BT)


def _look_up_backward(residuals: tuple[jax.Array, jax.Array], dy_BTD: jax.Array) -> tuple[jax.Array, None]:
    (table_VD, tokens_BT), wide = residuals, at_least_float32(dy_BTD.dtype)
    if tokens_BT.size * len(table_VD) > ONE_HOT_AT_ONCE:
        rows_RD = dy_BTD.reshape(tokens_BT.size, -1)
        return sum_rows(rows_RD, tokens_BT.reshape(-1), len(table_VD), wide).astype(table_VD.dtype), None
    is_token_BTV = jax.nn.one_hot(tokens_BT, table_VD.shape[0], dtype=dy_BTD.dtype)
    # By default a TPU rounds float32 factors to bfloat16 and a GPU to TensorFloat-32, which is exact only for the
    # one-hot factor.
    sums_VD = jnp.einsum("btv,btd->vd", is_token_BTV, dy_BTD, precision="highest", preferred_element_type=wide)
    return sums_VD.astype(table_VD.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def sum_rows(
    rows_RD: Float[Array, "R D"], index_R: Int[Array, " R"], num_sums: int, dtype: DTypeLike
) -> Float[Array, "V D"]:
    """Sums the rows that have the same index, in an order that depends only on the indices.

    Args:
        rows_RD: rows to sum.
        index_R: int32, index of the sum that each row belongs to.
        num_sums: number of sums, V.
        dtype: dtype of the sums, at least as wide as the rows' dtype.
    """
    order_R = jnp.argsort(index_R, stable=True)
    sorted_R, ordered_RD = index_R[order_R], rows_RD[order_R].astype(dtype)
    changes, always = sorted_R[1:] != sorted_R[:-1], jnp.ones(1, bool)
    begins_R, ends_R = jnp.concatenate([always, changes]), jnp.concatenate([changes, always])

    def joined(before: Any, after: Any) -> Any:
        (has_begun, sums_before), (begins, sums) = before, after
        return has_begun | begins, jnp.where(begins[:, None], sums, sums_before + sums)

    _, sums_RD = lax.associative_scan(joined, (begins_R, ordered_RD))
    # The last row of a run holds its sum. All other rows get distinct indices beyond the table, as ``unique_indices``
    # requires, and are dropped.
    beyond_R = num_sums + jnp.arange(len(index_R), dtype=sorted_R.dtype)
    none_VD = jnp.zeros((num_sums, rows_RD.shape[1]), dtype)
    return none_VD.at[jnp.where(ends_R, sorted_R, beyond_R)].set(sums_RD, mode="drop", unique_indices=True)


def positions_within(document_BT: jax.Array) -> jax.Array:
    """Computes the tokens' positions within their documents, int32[B, T]."""
    position_1T = jnp.arange(document_BT.shape[1], dtype=jnp.int32)[None]
    is_first_BT = jnp.concatenate([document_BT[:, :1] == 0, document_BT[:, 1:] != document_BT[:, :-1]], axis=1)
    return position_1T - lax.cummax(jnp.where(is_first_BT, position_1T, 0), axis=1)


class Embedding(nnx.Module):
    """Token embeddings, to which position embeddings are added if positions are learned."""

    def __init__(self, config: ModelConfig, vocab_size: int, rngs: nnx.Rngs):
        # nnx.Embed would convert float64 and bfloat16 tables to float32.
        init = Normal(_INIT_STD)
        self.token_VD = nnx.Param(init(rngs.params(), (vocab_size, config.model_dim)))
        self.has_positions = config.positions == "learned"
        if self.has_positions:
            self.position_TD = nnx.Param(init(rngs.params(), (config.sequence_length, config.model_dim)))

    def __call__(
        self,
        tokens_BT: jax.Array,
        position_BT: jax.Array | None = None,
        rows_of: _RowsOf = look_up,
    ) -> jax.Array:
        """Embeds int32 tokens as x_BTD, at the given positions or at positions counted from 0.

        ``rows_of`` looks up the tokens' rows.
        """
        x_BTD = rows_of(self.token_VD[...], tokens_BT)
        if not self.has_positions:
            return x_BTD
        position_TD = self.position_TD[...]
        if position_BT is None:
            return x_BTD + position_TD[None, : tokens_BT.shape[1]]
        return x_BTD + look_up(position_TD, position_BT)


class Expert(nnx.Module):
    """Feed-forward network; it maps zeros to zeros, so that empty rows of a slot stay zero."""

    def __init__(self, config: ModelConfig, width: int, rngs: nnx.Rngs):
        self.up = linear(rngs, config.model_dim, width)
        self.down = linear(rngs, width, config.model_dim, residual_std(config))
        self.is_gated = config.activation == "swiglu"
        if self.is_gated:
            self.gate = linear(rngs, config.model_dim, width)

    def __call__(self, x_RD: jax.Array, matmul: Matmul = jnp.matmul) -> jax.Array:
        """Applies the network to x ``[..., D]``; ``matmul`` multiplies rows by the weights of their experts."""
        up = matmul(x_RD, self.up.kernel[...])
        hidden = jax.nn.silu(matmul(x_RD, self.gate.kernel[...])) * up if self.is_gated else jax.nn.gelu(up)
        return matmul(hidden, self.down.kernel[...])


def make_network(config: ModelConfig, width: int, rngs: nnx.Rngs) -> Any:
    """Creates an expert or the network of a dense layer, from the user's block if there is one."""
    return Expert(config, width, rngs) if config.block is None else config.block.network(config, width, rngs)


class Mlp(nnx.Module):
    """Feed-forward network of a dense layer, with its norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.norm = make_norm(config, rngs)
        self.ffn = make_network(config, config.ffn_dim, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Computes the update of the residual stream x_BTD."""
        return self.ffn(self.norm(x_BTD))


class RouterModule(nnx.Module):
    """Dense part of an expert layer: its norm, the router's matrix and state, and the shared experts."""

    def __init__(self, config: ModelConfig, router: Router, num_classes: int, rngs: nnx.Rngs):
        self.norm = make_norm(config, rngs)
        self.score = linear(rngs, config.model_dim, router.num_logits(num_classes))
        for name, value in router.init_state(num_classes).items():
            setattr(self, name, nnx.Param(jnp.asarray(value)))
        self.has_shared = config.num_shared_experts > 0
        if self.has_shared:
            self.shared = make_network(config, config.num_shared_experts * config.expert_width, rngs)

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes (normed x_BTD for the experts, logits_BTX in at least float32)."""
        normed = self.norm(x_BTD)
        dtype = at_least_float32(normed.dtype)
        return normed, jnp.einsum("btd,de->bte", normed.astype(dtype), self.score.kernel[...].astype(dtype))

    def add_shared(self, x_BTD: jax.Array, normed_BTD: jax.Array) -> jax.Array:
        """Adds the output of the shared experts, if there are any, to the residual stream."""
        return x_BTD + self.shared(normed_BTD) if self.has_shared else x_BTD


class Head(nnx.Module):
    """Final norm and projection to the vocabulary; with tied embeddings the matrix belongs to the embedding."""

    def __init__(self, config: ModelConfig, vocab_size: int, rngs: nnx.Rngs):
        self.norm = make_norm(config, rngs)
        if not config.tied_embeddings:
            self.out = linear(rngs, config.model_dim, vocab_size)

    def __call__(self, x_BTD: jax.Array, kernel_DV: jax.Array) -> jax.Array:
        """Computes logits_BTV, at least float32, from x_BTD."""
        normed = self.norm(x_BTD)
        return jnp.einsum("btd,dv->btv", normed, kernel_DV, preferred_element_type=at_least_float32(normed.dtype))
