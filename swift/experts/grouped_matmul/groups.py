"""Rows sorted by slot, in blocks of a fixed size that belong to one slot each."""

from typing import NamedTuple

import jax

_LARGEST_BLOCK = 128


class Groups(NamedTuple):
    """Row ranges of the slots, in order and without gaps."""

    start_S: jax.Array  # int32, a multiple of the block
    size_S: jax.Array  # int32, a multiple of the block


def block_rows(num_rows: int, num_slots: int) -> int:
    """Chooses the rows of a block: the largest power of two up to 128 whose padding adds at most 1 row in 32.

    >>> block_rows(2048, 4), block_rows(256, 4), block_rows(8, 4)
    (16, 2, 1)
    """
    block = 1
    while 2 * block <= _LARGEST_BLOCK and num_slots * (2 * block - 1) * 32 <= num_rows:
        block *= 2
    return block


def padded_rows(num_rows: int, num_slots: int) -> int:
    """Number of rows P that suffices for ``num_rows`` rows in blocks, however they are spread over the slots."""
    block = block_rows(num_rows, num_slots)
    return (num_rows + num_slots * (block - 1)) // block * block
