"""Sums of rows that belong together: the gradient of a table of which rows were looked up, some of them often.

Rows are sorted by index, and runs of one index are added up in pairs, pairs of pairs, and so on: an order that follows
from the indices alone. So the sums are the same to the bit in every run of a program. Those of a scatter-add are not,
whose order is undefined on GPU.

Legend: R rows, D width, V sums.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


def sum_rows(
    rows_RD: Float[Array, "R D"], index_R: Int[Array, " R"], num_sums: int, dtype: DTypeLike
) -> Float[Array, "V D"]:
    """Sums the rows of each index.

    Args:
        rows_RD: rows.
        index_R: int32, the sum that each row belongs to.
        num_sums: V.
        dtype: dtype of the sums, at least as wide as that of the rows.
    """
    order_R = jnp.argsort(index_R, stable=True)
    sorted_R, ordered_RD = index_R[order_R], rows_RD[order_R].astype(dtype)
    changes, always = sorted_R[1:] != sorted_R[:-1], jnp.ones(1, bool)
    begins_R, ends_R = jnp.concatenate([always, changes]), jnp.concatenate([changes, always])

    def joined(before: Any, after: Any) -> Any:
        (has_begun, sums_before), (begins, sums) = before, after
        return has_begun | begins, jnp.where(begins[:, None], sums, sums_before + sums)

    _, sums_RD = lax.associative_scan(joined, (begins_R, ordered_RD))
    # The last row of a run has its sum. The others go beyond the table, each to a place of its own, and are dropped.
    beyond_R = num_sums + jnp.arange(len(index_R), dtype=sorted_R.dtype)
    none_VD = jnp.zeros((num_sums, rows_RD.shape[1]), dtype)
    return none_VD.at[jnp.where(ends_R, sorted_R, beyond_R)].set(sums_RD, mode="drop", unique_indices=True)
