"""Windows of a stream of tokens, and batches of them.

Shapes: M micro-batches, B sequences per micro-batch, T positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from swift.data.sequential import SequentialStream
from swift.data.stream import TokenStream


class Batch(NamedTuple):
    """Sequences with their labels; a micro-batch lacks the first dim, a single window the first two."""

    inputs: np.ndarray  # int32[M, B, T], 0 where not valid
    labels: np.ndarray  # int32[M, B, T], the token after each input, 0 where not valid
    valid: np.ndarray  # bool[M, B, T], False for padding, which counts in nothing


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of a stream, by number: a random-access source for Grain.

    Window i reads tokens i*T to (i+1)*T inclusive, so every token but the stream's first is a label once. The last
    window that holds a label may be padded at its end.

    Args:
        stream: tokens.
        sequence_length: T, positions of a window.
        num_windows: number of windows; those past the end of the stream are padding only.
    """

    stream: TokenStream | SequentialStream
    sequence_length: int
    num_windows: int

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, index: int) -> Batch:
        start = index * self.sequence_length
        tokens = self.stream.read(start, start + self.sequence_length + 1)
        num_labels = max(0, len(tokens) - 1)
        inputs_T, labels_T = np.zeros((2, self.sequence_length), np.int32)
        inputs_T[:num_labels], labels_T[:num_labels] = tokens[:num_labels], tokens[1:]
        return Batch(inputs_T, labels_T, np.arange(self.sequence_length) < num_labels)


@dataclass(frozen=True, eq=False)
class JoinedWindows:
    """The windows of several streams, one stream after the other, by number.

    Args:
        parts: windows of each stream.
        num_windows: number of windows; those past the end of the last stream are padding only.
    """

    parts: Sequence[Windows]
    num_windows: int

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, index: int) -> Batch:
        for part in self.parts[:-1]:
            if index < len(part):
                return part[index]
            index -= len(part)
        return self.parts[-1][index]


def count_windows(num_tokens: int, sequence_length: int) -> int:
    """Number of windows of ``sequence_length`` labels with at least one label of a stream of ``num_tokens``."""
    return -(-(num_tokens - 1) // sequence_length)
