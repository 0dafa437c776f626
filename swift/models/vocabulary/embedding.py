"""The embedding of a rank, whole or in shares, and its gradient.

Legend: B sequences, T positions, D model dim.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from swift.models.modules import look_up
from swift.models.parameter_groups import Group
from swift.models.vocabulary.row_look_up import gradient_in_shares, look_up_in_shares


def embed(
    group: Group, own: Any, tokens_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"] | None, num_ranks: int
) -> Float[Array, "B T D"]:
    """Embeds tokens.

    Args:
        group: the embedding's, as a rank has it.
        own: its state on this rank.
        tokens_BT: int32.
        position_BT: int32; None: the first ones.
        num_ranks: ranks that share the rows; 1: they are whole.
    """
    rows_of = look_up if num_ranks == 1 else partial(look_up_in_shares, num_ranks=num_ranks)
    return group.module(own)(tokens_BT, position_BT, rows_of)


def embedding_gradient(
    group: Group,
    own: Any,
    tokens_BT: Int[Array, "B T"],
    position_BT: Int[Array, "B T"] | None,
    d_x_BTD: Float[Array, "B T D"],
    num_ranks: int,
    wire_dtype: DTypeLike,
) -> Any:
    """Computes the gradient of the state from that of ``embed``; no row is looked up.

    Args:
        group, own, tokens_BT, position_BT, num_ranks: see ``embed``.
        d_x_BTD: gradient of its result.
        wire_dtype: dtype of gradients of shared rows on the wire; their sum is at least float32.
    """
    rows_of = look_up if num_ranks == 1 else lambda *_: jnp.zeros_like(d_x_BTD)
    _, pull_back = jax.vjp(lambda own: group.module(own)(tokens_BT, position_BT, rows_of), own)
    (gradient,) = pull_back(d_x_BTD)
    if num_ranks > 1:
        table, num_rows = gradient["token_VD"], own["token_VD"].shape[0]
        of_rows = gradient_in_shares(d_x_BTD, tokens_BT, num_rows, num_ranks, wire_dtype)
        gradient["token_VD"] = table.replace(of_rows)
    return gradient
