"""Layouts of a sharded embedding and head: where their state lives, and how slots are filled from it.

Embedding (``RowSharded``): each rank has the state of its rows, and looks up tokens in the same rows. Rows are assigned
round-robin: row r is on rank ``r % N``. Tokenizers number frequent tokens first, so all ranks have equally many
frequent rows. A rank computes with the same rows that it updates, so no row is exchanged with optimizer slices. Only
the parameters before the rows, the learned positions, are whole on every rank; their state is sliced as in
``Decoupled``.

Head (``ColumnSharded``): the state is sliced as in ``Decoupled``: each rank has 1/N of the head's parameters, which are
consecutive and cover a few rows of its matrix. A rank multiplies by a few columns, however. Weights and gradients are
therefore exchanged between rows and columns, each number once; a head that is whole on every rank would be sent N
times. A slice may begin and end anywhere in a row. It is sent as whole rows, with zeros before its first number and
after its last: two ranks may send parts of the same row, and the sum of the parts is the row.

Legend: L layers, E experts, both 1; N ranks, D model dim, V vocabulary, v rows or columns of a rank, V / N padded;
P parameters before the table or matrix, p = P / N padded, W all parameters, w = W / N padded; R rows that a slice may
touch.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from swift.experts.state_layouts import Decoupled
from swift.experts.weight_exchange import collect, from_slices, materialize, padded_size, to_slices
from swift.mesh.per_rank import EXPERT_AXIS


def share_size(vocab_size: int, num_ranks: int) -> int:
    """Returns the rows or columns per rank, v; the last ranks have padding if V is not a multiple of N."""
    return -(-vocab_size // num_ranks)


@dataclass(frozen=True)
class RowSharded(Decoupled):
    """Layout in which a rank's state is its table rows, and its slice of the parameters before the rows.

    A slot has the rank's rows, and all parameters before the rows. A step accumulates two gradients: that of the rows,
    summed over the tokens of all ranks, and that of the parameters before the rows, for the rank's own tokens only.

    Attributes, in addition to ``Decoupled``'s:
        num_rows: rows of the table, V, which comes last among the parameters.
        row_size: numbers of a row, D.
    """

    num_rows: int
    row_size: int

    @property
    def num_before(self) -> int:
        """Number of parameters before the rows, P."""
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
        """See Layout: undefined, since a rank's numbers are not consecutive."""
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
        """Size of a rank's slice in the parameters before the rows, p."""
        return padded_size(self.num_before, self.num_ranks) // self.num_ranks


@dataclass(frozen=True)
class ColumnSharded(Decoupled):
    """Layout with state as in ``Decoupled``, in which a slot has the norm and its rank's columns of the matrix.

    A step accumulates two gradients: that of the columns, summed over the tokens of all ranks, and that of the norm,
    for the rank's own tokens only.

    Attributes, in addition to ``Decoupled``'s:
        num_rows: rows of the matrix, D, which comes last among the parameters.
        num_columns: columns of the matrix, V.
    """

    num_rows: int
    num_columns: int

    @property
    def message_size(self) -> int:
        """Number of values that a rank sends to each rank, including itself, to collect or to materialize."""
        return self._touched * self._share + self._num_before

    def collect(
        self, gradients_LSW: Float[Array, "1 1 W"], placement_LNS: Int[Array, "L N S"]
    ) -> Float[Array, "1 1 w"]:
        """See Layout; ``[1, 1, w]``."""
        del placement_LNS
        norm_P, matrix = jnp.split(gradients_LSW[0, 0], [self._num_before])
        matrix_Dv = matrix.reshape(self.num_rows, -1)
        sent_NM = jnp.stack([_message(norm_P, self._rows(matrix_Dv, first)) for first in self._first_rows])
        norm_NP, columns_NRv = self._exchange(sent_NM.astype(self.wire_dtype))
        rows_RV = columns_NRv.swapaxes(0, 1).reshape(self._touched, -1)[:, : self.num_columns]
        matrix_w = lax.dynamic_slice_in_dim(rows_RV.reshape(-1), self._offset(), self._width)
        norm_P = jnp.sum(norm_NP.astype(norm_P.dtype), axis=0)
        position_w = self._start() + jnp.arange(self._width, dtype=jnp.int32)
        norm_w = jnp.take(norm_P, position_w, mode="clip")
        return jnp.where(position_w < self._num_before, norm_w, matrix_w.astype(norm_w.dtype))[None, None]

    def materialize(self, master: Float[Array, "1 1 w"], placement_LNS: Int[Array, "L N S"]) -> Float[Array, "1 1 W"]:
        """See Layout; ``[1, 1, P + D * v]``."""
        del placement_LNS
        mine_w = master[0, 0].astype(self.compute_dtype)
        none = jnp.zeros(self._touched * self.num_columns, mine_w.dtype)
        rows_RV = lax.dynamic_update_slice_in_dim(none, mine_w, self._offset(), 0).reshape(self._touched, -1)
        padding = self.num_ranks * self._share - self.num_columns
        columns_RNv = jnp.pad(rows_RV, ((0, 0), (0, padding))).reshape(self._touched, self.num_ranks, -1)
        index_P = jnp.arange(self._num_before, dtype=jnp.int32) - self._start()
        is_mine_P = (index_P >= 0) & (index_P < self._width)
        norm_P = jnp.where(is_mine_P, jnp.take(mine_w, index_P, mode="clip"), jnp.zeros((), mine_w.dtype))
        sent_NM = jax.vmap(_message, (None, 1))(norm_P, columns_RNv)
        norm_NP, columns_NRv = self._exchange(sent_NM)
        # Every number of the norm is in one message, and zero in all others.
        return _message(jnp.sum(norm_NP, axis=0), self._matrix(columns_NRv))[None, None]

    def _exchange(self, sent_NM: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Exchanges messages with all ranks, and splits the received ones: (norm_NP, columns_NRv)."""
        received_NM = lax.all_to_all(sent_NM, EXPERT_AXIS, split_axis=0, concat_axis=0)
        norm_NP, columns_NM = jnp.split(received_NM, [self._num_before], axis=1)
        return norm_NP, columns_NM.reshape(self.num_ranks, self._touched, -1)

    def _rows(self, matrix_Dv: jax.Array, first: int) -> jax.Array:
        """Returns the rows that a slice may touch ``[R, v]``, with zeros before and after the matrix."""
        above, below = self._margins
        return jnp.pad(matrix_Dv, ((above, below), (0, 0)))[above + first :][: self._touched]

    def _matrix(self, columns_NRv: jax.Array) -> jax.Array:
        """Assembles this rank's columns ``[D, v]``, from each rank's rows."""
        above, below = self._margins
        rows_Rv = jnp.zeros((above + self.num_rows + below, self._share), columns_NRv.dtype)
        for first, own_Rv in zip(self._first_rows, columns_NRv, strict=True):
            rows_Rv = rows_Rv.at[above + first : above + first + self._touched].add(own_Rv)
        return rows_Rv[above : above + self.num_rows]

    def _start(self) -> jax.Array:
        """Position of this rank's slice among the head's parameters, int32; P for slices that begin in the matrix."""
        return _own_number([min(start, self._num_before) for start in self._starts])

    def _offset(self) -> jax.Array:
        """Offset of this rank's slice in the row where it begins, int32."""
        return _own_number([(start - self._num_before) % self.num_columns for start in self._starts])

    @property
    def _starts(self) -> list[int]:
        """Position of each rank's slice among the head's parameters."""
        return [rank * self._width for rank in range(self.num_ranks)]

    @property
    def _num_before(self) -> int:
        """Number of parameters before the matrix, P."""
        return self.size - self.num_rows * self.num_columns

    @property
    def _share(self) -> int:
        return share_size(self.num_columns, self.num_ranks)

    @property
    def _width(self) -> int:
        """Size of a slice, w."""
        return padded_size(self.size, self.num_ranks) // self.num_ranks

    @property
    def _first_rows(self) -> list[int]:
        """Row in which each rank's slice begins; negative if it begins before the matrix."""
        return [(start - self._num_before) // self.num_columns for start in self._starts]

    @property
    def _margins(self) -> tuple[int, int]:
        """Rows before and after the matrix that slices may touch."""
        firsts = self._first_rows
        return max(0, -firsts[0]), max(0, firsts[-1] + self._touched - self.num_rows)

    @property
    def _touched(self) -> int:
        """Maximum number of rows that a slice touches, R."""
        ends = [((rank + 1) * self._width - 1 - self._num_before) // self.num_columns for rank in range(self.num_ranks)]
        return 1 + max(end - first for first, end in zip(self._first_rows, ends, strict=True))


def _own_number(numbers: list[int]) -> jax.Array:
    """Returns this rank's number from a list, int32; computing positions on the device could exceed 2^31."""
    return jnp.array(numbers, jnp.int32)[lax.axis_index(EXPERT_AXIS)]


def _message(norm_P: jax.Array, columns_Rv: jax.Array) -> jax.Array:
    return jnp.concatenate([norm_P, columns_Rv.reshape(-1)])
