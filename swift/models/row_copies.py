"""Matrices to and from flat vectors, a few rows at a time, for compilers that write a reshape out in full.

A TPU keeps the last two dims of an array in tiles, so that a reshape between ``[size]`` and ``[rows, columns]`` moves
every number, and its compiler (libtpu 0.0.42) has no loop for that: 8 matrices of 2,048 x 1,024 became 1.2 million
instructions, a minute to compile, and a stage has hundreds. A loop has those of one piece.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

_PIECE = 1 << 18
"""Numbers of a piece, at most, unless a row has more: half a second to compile, and longer to copy than to begin."""

_Part: TypeAlias = tuple[tuple[jax.Array | int, ...], tuple[int, ...]]
"""Index of the first number of a part of an array, and the part's shape."""


def split_by_rows(vectors: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Splits vectors ``[*lead, size or more]`` into an array ``[*lead, *shape]`` for each shape, in this order.

    Args:
        vectors: flat arrays, one after the other.
        shapes: their shapes.
    """
    lead, arrays = vectors.shape[:-1], []
    for pieces in _pieces(lead, shapes):
        if pieces.is_matrix:
            empty = jnp.zeros((*lead, *pieces.shape), vectors.dtype)
            arrays.append(_copy(vectors, empty, pieces, pieces.in_vectors, pieces.in_array))
        else:
            arrays.append(vectors[..., pieces.start : pieces.end].reshape((*lead, *pieces.shape)))
    return arrays


def join_by_rows(arrays: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]]) -> jax.Array:
    """Joins arrays ``[*lead, *shape]`` into vectors ``[*lead, size]``: the inverse of ``split_by_rows``."""
    lead = arrays[0].shape[: arrays[0].ndim - len(shapes[0])]
    vectors = jnp.zeros((*lead, sum(map(math.prod, shapes))), jnp.result_type(*arrays))
    for array, pieces in zip(arrays, _pieces(lead, shapes), strict=True):
        array = array.astype(vectors.dtype)
        if pieces.is_matrix:
            vectors = _copy(array, vectors, pieces, pieces.in_array, pieces.in_vectors)
        else:
            vectors = vectors.at[..., pieces.start : pieces.end].set(array.reshape((*lead, pieces.size)))
    return vectors


class _Pieces(NamedTuple):
    """Pieces of the arrays of one shape; the last of an array may have rows of the one before.

    Attributes:
        lead: dims of the stack of arrays.
        start: where such an array begins in its vector.
        shape: shape of an array.
    """

    lead: tuple[int, ...]
    start: int
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows that are worth a loop: a vector stays a vector, and nothing needs no copy."""
        return len(self.shape) > 1 and 0 not in self.shape

    @property
    def size(self) -> int:
        """Numbers of an array."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """End of such an array in its vector."""
        return self.start + self.size

    @property
    def row_size(self) -> int:
        """Numbers of a row."""
        return math.prod(self.shape[1:])

    @property
    def rows(self) -> int:
        """Rows of a piece."""
        return min(self.shape[0], max(1, _PIECE // self.row_size))

    @property
    def of_array(self) -> int:
        """Pieces of an array."""
        return -(-self.shape[0] // self.rows)

    def in_array(self, nth: jax.Array) -> _Part:
        """Finds the nth piece in the arrays."""
        at, row = self._place(nth)
        inner = self.shape[1:]
        return (*at, row, *(0 for _ in inner)), (*(1 for _ in at), self.rows, *inner)

    def in_vectors(self, nth: jax.Array) -> _Part:
        """Finds the nth piece in the vectors."""
        at, row = self._place(nth)
        return (*at, self.start + row * self.row_size), (*(1 for _ in at), self.rows * self.row_size)

    def _place(self, nth: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Index of the array that has the nth piece, and the piece's first row."""
        row = jnp.minimum(nth % self.of_array * self.rows, self.shape[0] - self.rows)
        return jnp.unravel_index(nth // self.of_array, self.lead) if self.lead else (), row


def _pieces(lead: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Iterator[_Pieces]:
    start = 0
    for shape in shapes:
        yield (pieces := _Pieces(lead, start, shape))
        start = pieces.end


def _copy(
    source: jax.Array,
    target: jax.Array,
    pieces: _Pieces,
    read: Callable[[jax.Array], _Part],
    written: Callable[[jax.Array], _Part],
) -> jax.Array:
    """Copies all pieces from where they are read to where they are written."""

    def copy(nth: jax.Array, target: jax.Array) -> jax.Array:
        (at, shape), (target_at, target_shape) = read(nth), written(nth)
        part = lax.dynamic_slice(source, at, shape).reshape(target_shape)
        return lax.dynamic_update_slice(target, part, target_at)

    return lax.fori_loop(0, math.prod(pieces.lead) * pieces.of_array, copy, target)
