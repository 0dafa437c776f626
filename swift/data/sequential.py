"""Streams of documents that are read once, in their order: no file, no index, no shuffling."""

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from swift.data.files import DataError
from swift.errors import error_line

_BOUNDLESS = 2**40
"""Tokens of a stream, whose end is not known: more than any run reads."""
_CHECKSUM_TOKENS = 4096
_AT_ONCE = 64


class SequentialStream:
    """The tokens of a stream of documents, in ascending order; the last ones that were read can be read again.

    Reading back further than that restarts the stream, and skips what comes before as fast as the source gives it.
    After its last document the stream restarts, too, so an epoch is one pass over it.

    Args:
        begin: function that begins the stream: the tokens of one document after the other, with their separators.
        name: name of the source, for errors.
    """

    file = None
    num_tokens = _BOUNDLESS

    def __init__(self, begin: Callable[[], Iterator[np.ndarray]], name: str):
        self._begin, self._name, self._num_kept = begin, name, 0
        self._start = self._end = self._furthest = 0
        self._restart()

    def keep(self, num_tokens: int) -> None:
        """Sets how many tokens before the furthest read stay in memory, to be read again."""
        self._num_kept = num_tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads the tokens ``start`` to ``stop`` of the stream, [stop - start].

        Raises:
            DataError: the stream has no documents, or reading it fails.
        """
        if start < self._start:
            self._restart()
        self._furthest = max(self._furthest, stop)
        while self._end < stop:
            piece = np.concatenate(self._more())
            self._held.append(piece)
            self._end += len(piece)
            self._drop(min(start, self._furthest - self._num_kept))
        found, end = list[np.ndarray](), self._end
        for piece in reversed(self._held):  # what is read is mostly near the end
            begin, end = end - len(piece), end - len(piece)
            found.append(piece[max(0, start - begin) : max(0, stop - begin)])
            if begin <= start:
                break
        return np.concatenate(found[::-1]) if found else np.empty(0, np.uint32)

    def skip_to(self, position: int) -> None:
        """Reads on to a position, as fast as the source gives it; what is kept before it can be read afterwards.

        Raises:
            DataError: the stream has no documents, or reading it fails.
        """
        self.read(position, position)

    def digest(self) -> None:
        """Returns None: the digest of a stream is unknown until all of it has been read."""

    def checksum(self) -> int:
        """Computes a CRC-32 of the first tokens."""
        return zlib.crc32(self.read(0, _CHECKSUM_TOKENS).astype("<u4").tobytes())

    def _restart(self) -> None:
        self._pieces = self._endless()
        self._held = deque[np.ndarray]()  # the tokens from ``_start`` to ``_end``
        self._start = self._end = self._furthest = 0

    def _drop(self, before: int) -> None:
        """Drops pieces all of whose tokens come before a position."""
        while self._held and self._start + len(self._held[0]) <= before:
            self._start += len(self._held.popleft())

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
