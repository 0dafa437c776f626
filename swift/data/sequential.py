"""Streams of documents that are read once, in their order: no file, no index, no shuffling."""

import itertools
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from swift.data.files import DataError
from swift.errors import error_line

_BOUNDLESS = 2**40
"""Tokens of a stream, whose end is not known: more than any run reads."""
_CHECKSUM_TOKENS = 4096
_AT_ONCE = 64


class SequentialStream:
    """The tokens of a stream of documents, in ascending order; reading back restarts the stream.

    After its last document the stream restarts, too, so an epoch is one pass over it. A resumed run skips what it
    has read, as fast as the source gives it.

    Args:
        begin: function that begins the stream: the tokens of one document after the other, with their separators.
        name: name of the source, for errors.
    """

    file = None
    num_tokens = _BOUNDLESS

    def __init__(self, begin: Callable[[], Iterator[np.ndarray]], name: str):
        self._begin, self._name = begin, name
        self._start, self._held, self._pieces = 0, np.empty(0, np.uint32), self._endless()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads the tokens ``start`` to ``stop`` of the stream, [stop - start].

        Raises:
            DataError: the stream has no documents, or reading it fails.
        """
        if start < self._start:
            self._start, self._held, self._pieces = 0, np.empty(0, np.uint32), self._endless()
        while self._start + len(self._held) < stop:
            self._held = np.concatenate([self._held, *self._more()])
            passed = min(start - self._start, len(self._held))
            self._start, self._held = self._start + passed, self._held[passed:]
        return self._held[start - self._start : stop - self._start]

    def digest(self) -> None:
        """Returns None: the digest of a stream is unknown until all of it has been read."""

    def checksum(self) -> int:
        """Computes a CRC-32 of the first tokens."""
        return zlib.crc32(self.read(0, _CHECKSUM_TOKENS).astype("<u4").tobytes())

    def _more(self) -> list[np.ndarray]:
        try:
            pieces = list(itertools.islice(self._pieces, _AT_ONCE))
        except DataError:
            raise
        except Exception as error:  # raised by the user's code
            raise DataError(f"{self._name} cannot be read: {error_line(error)}") from error
        if not pieces:  # it has raised before
            raise DataError(f"{self._name} cannot be read any more")
        return pieces

    def _endless(self) -> Iterator[np.ndarray]:
        while True:
            is_empty = True
            for tokens in self._begin():
                is_empty = False
                yield tokens
            if is_empty:
                raise DataError(f"{self._name} has no documents")
