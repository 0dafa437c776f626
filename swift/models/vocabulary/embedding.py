"""The embedding of a rank, whole or in shares, and its gradient.

Legend: B sequences, T positions, D model dim, H hot rows of a rank.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from swift.models.modules import look_up
from swift.models.parameter_groups import Group
from swift.models.vocabulary.row_look_up import gradient_in_shares, look_up_in_shares


class Copies(NamedTuple):
    """Copies that a rank has of other ranks' rows, see ``hot_rows``."""

    hot_H: Int[Array, " H"]  # int32, the rows, ascending
    copy_HD: Float[Array, "H D"]

    @classmethod
    def none_like(cls, rows_D: Float[Array, "... D"]) -> "Copies":
        """Copies of no rows."""
        return cls(jnp.zeros(0, jnp.int32), rows_D[..., :0, :].reshape(0, rows_D.shape[-1]))


def embed(
    group: Group,
    own: Any,
    copies: Copies | None,
    tokens_BT: Int[Array, "B T"],
    position_BT: Int[Array, "B T"] | None,
    num_ranks: int,
) -> Float[Array, "B T D"]:
    """Embeds tokens.

    Args:
        group: the embedding's, as a rank has it.
        own: its state on this rank.
        copies: copies of other rows; None: it asks for all that its tokens need.
        tokens_BT: int32; all ranks that share the rows have equally many.
        position_BT: int32; None: the first ones.
        num_ranks: ranks that share the rows; 1: they are whole.
    """

    def in_shares(own_vD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        return look_up_in_shares(own_vD, *(copies or Copies.none_like(own_vD)), tokens_BT, num_ranks)

    return group.module(own)(tokens_BT, position_BT, look_up if num_ranks == 1 else in_shares)


def embedding_gradient(
    group: Group,
    own: Any,
    copies: Copies | None,
    tokens_BT: Int[Array, "B T"],
    position_BT: Int[Array, "B T"] | None,
    d_x_BTD: Float[Array, "B T D"],
    num_ranks: int,
    wire_dtype: DTypeLike,
) -> tuple[Any, Float[Array, "H D"]]:
    """Computes the gradients of the state and of the copies from that of ``embed``; no row is looked up.

    Args:
        group, own, copies, tokens_BT, position_BT, num_ranks: see ``embed``.
        d_x_BTD: gradient of its result.
        wire_dtype: dtype of gradients of shared rows on the wire; their sum is at least float32.
    """
    rows_of = look_up if num_ranks == 1 else lambda *_: jnp.zeros_like(d_x_BTD)
    _, pull_back = jax.vjp(lambda own: group.module(own)(tokens_BT, position_BT, rows_of), own)
    (gradient,) = pull_back(d_x_BTD)
    hot_H, none_0D = copies or Copies.none_like(d_x_BTD)
    if num_ranks == 1:
        return gradient, none_0D
    table, num_rows = gradient["token_VD"], own["token_VD"].shape[0]
    of_rows, of_copies_HD = gradient_in_shares(d_x_BTD, hot_H, tokens_BT, num_rows, num_ranks, wire_dtype)
    gradient["token_VD"] = table.replace(of_rows)
    return gradient, of_copies_HD
