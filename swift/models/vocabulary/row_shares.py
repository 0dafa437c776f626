"""The layout of an embedding in shares: each rank has the optimizer's state of its rows, and looks up in the same.

Ranks take turns: row r is on rank ``r % N``. Tokenizers number frequent tokens first, so each rank has as many frequent
rows as the others. What a rank computes with is what it updates, so no row is exchanged with the optimizer's slices:
only the parameters before the rows, the learned positions, are whole on every rank, and sliced as in ``Decoupled``.

Legend: L layers, E experts, both 1; N ranks, V rows of the table, v = V / N padded, D width of a row, P parameters
before the rows, p = P / N padded, W = P + V * D.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from swift.experts.exchange import collect, from_slices, materialize, padded_size, to_slices
from swift.experts.state_layouts import Decoupled
from swift.models.vocabulary.column_shares import share_size


@dataclass(frozen=True)
class RowShares(Decoupled):
    """A rank's state is its slice of what comes before the rows, and its rows; its slot has the former whole.

    The gradients that a step adds up are of the rows, summed over the tokens of all ranks, and of what comes before
    them, for the rank's own tokens.

    Attributes, beside those of ``Decoupled``:
        num_rows: rows of the table, V, which comes last among the parameters.
        row_size: numbers of a row, D.
    """

    num_rows: int
    row_size: int

    @property
    def num_before(self) -> int:
        """Parameters before the rows, P."""
        return self.size - self.num_rows * self.row_size

    def init(
        self, params_LEW: Float[Array | np.ndarray, "L E W"], placement_LNS: Any
    ) -> Float[Array | np.ndarray, "L N ..."]:
        """See Layout; ``[L, N, E, p + v * D]``, on the host if the parameters are."""
        del placement_LNS
        xp = np if isinstance(params_LEW, np.ndarray) else jnp
        lead, share = params_LEW.shape[:2], share_size(self.num_rows, self.num_ranks)
        before_LNEp = to_slices(params_LEW[..., : self.num_before], self.num_ranks)
        rows_LEVD = params_LEW[..., self.num_before :].reshape(*lead, self.num_rows, self.row_size)
        padded = xp.pad(rows_LEVD, ((0, 0), (0, 0), (0, share * self.num_ranks - self.num_rows), (0, 0)))
        by_rank_LNEvD = xp.moveaxis(padded.reshape(*lead, share, self.num_ranks, self.row_size), 3, 1)
        return xp.concatenate([before_LNEp, by_rank_LNEvD.reshape(*before_LNEp.shape[:3], -1)], axis=-1)

    def classes(self, master: Float[Array | np.ndarray, "L ..."], placement_LNS: Any) -> Float[np.ndarray, "L E W"]:
        """See Layout."""
        del placement_LNS
        before_LNEp, rows = np.split(np.asarray(master), [self._slice_before], axis=-1)
        lead = rows.shape[0], rows.shape[2]
        rows_LEvND = np.moveaxis(rows.reshape(*rows.shape[:3], -1, self.row_size), 1, 3)
        rows_LEW = rows_LEvND.reshape(*lead, -1)[..., : self.num_rows * self.row_size]
        return np.concatenate([from_slices(before_LNEp, self.num_before), rows_LEW], axis=-1)

    def first_position(self, width: int) -> NoReturn:
        """See Layout: there is none."""
        del width
        raise AssertionError("the rows of a rank do not follow one another")

    def collect(
        self, gradients_LSW: Float[Array, "L S W"], placement_LNS: Int[Array, "L N S"]
    ) -> Float[Array, "L ..."]:
        """See Layout; ``[1, 1, p + v * D]``."""
        if not self.num_before:
            return gradients_LSW
        before_LSP, rows = jnp.split(gradients_LSW, [self.num_before], axis=-1)
        padding = padded_size(self.num_before, self.num_ranks) - self.num_before
        padded = jnp.pad(before_LSP, ((0, 0), (0, 0), (0, padding)))
        before_LEp = collect(padded, placement_LNS, self.num_classes, self.wire_dtype)
        return jnp.concatenate([before_LEp, rows], axis=-1)

    def materialize(self, master: Float[Array, "L ..."], placement_LNS: Int[Array, "L N S"]) -> Float[Array, "L S W"]:
        """See Layout; ``[1, 1, P + v * D]``."""
        weights = master.astype(self.compute_dtype)
        if not self.num_before:
            return weights
        before_LEp, rows = jnp.split(weights, [self._slice_before], axis=-1)
        before_LSP = materialize(before_LEp, placement_LNS)[..., : self.num_before]
        return jnp.concatenate([before_LSP, rows], axis=-1)

    @property
    def _slice_before(self) -> int:
        """Numbers of a slice of what comes before the rows, p."""
        return padded_size(self.num_before, self.num_ranks) // self.num_ranks
