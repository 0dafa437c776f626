"""Data files, opened with care: regular files only, read by position.

A file that shrinks under a memory map ends the process with a signal; read by position, it raises an error.
"""

import functools
import glob
import os
import weakref
import zlib
from dataclasses import dataclass

import numpy as np

from swift.errors import RunError
from swift.files import open_regular

_SAMPLE_PIECES = 64
_SAMPLE_BYTES = 16384
_MOST_BYTES = 1 << 30
"""Bytes of one system call; Linux reads at most 2 GB."""


class DataError(RunError):
    """Data that a run started with can no longer be read, or have changed. Exit code 3."""


class ChangedFile(DataError):
    """A file that is not as it was found."""


class DocumentError(DataError):
    """A fault of a document, which the message names; no operator is to blame."""


class BeyondVocabulary(DataError):
    """A token in the data for which the model has no embedding."""


@dataclass(frozen=True)
class FileState:
    """Version of a file, without reading it.

    Attributes:
        num_bytes: size in bytes.
        mtime_ns: time of the last write, in nanoseconds since 1970.
    """

    num_bytes: int
    mtime_ns: int


def with_literal_brackets(pattern: str) -> str:
    """Returns a pattern whose directories, or file, that are there by this very name are taken by name.

    Brackets of such a name choose nothing: ``wiki [en]/*.txt`` are the texts of that directory, where it is one.
    """
    head = pattern
    while head and not os.path.lexists(head):
        head = os.path.dirname(head.rstrip("/"))
    return head.replace("[", "[[]") + pattern[len(head) :]


def matching(pattern: str) -> list[str]:
    """Returns the paths that match a pattern for ``glob``; none through a link to a directory that it is itself in."""

    @functools.cache
    def is_loop(directory: str) -> bool:
        above = os.path.dirname(directory)
        if above == directory or not directory:
            return False
        if os.path.islink(directory):
            inside, linked = os.path.realpath(above), os.path.realpath(directory)
            if os.path.commonpath([inside, linked]) == linked:
                return True
        return is_loop(above)

    paths = glob.glob(with_literal_brackets(pattern), recursive=True)
    return [path for path in paths if not is_loop(os.path.dirname(path))] if "**" in pattern else paths


class TokenReader:
    """Tokens of a file, read by position in slices on demand.

    The file stays open: renaming or removing it does not disturb the run. Every read checks the length of the file;
    if it has been written to, a sample of it must be unchanged. Threads may share one.

    Args:
        path: path of the file.
        dtype: type of a token, with its byte order.
        vocab_size: one more than the largest token allowed.

    Raises:
        OSError: the file cannot be opened, or is not a regular one.
    """

    def __init__(self, path: str, dtype: np.dtype, vocab_size: int):
        self.path, self.dtype, self.vocab_size = path, dtype, vocab_size
        self._fd = open_regular(path)
        weakref.finalize(self, os.close, self._fd)
        self._begun = self._seen = self._state_now()
        self._sampled = zlib.crc32(self.sample().tobytes())

    @property
    def state(self) -> FileState:
        """State of the file when it was opened."""
        return self._begun

    def __len__(self) -> int:
        return self._begun.num_bytes // self.dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        """Reads a slice of the tokens.

        Raises:
            DataError: the file has shrunk or changed, cannot be read, or holds a token beyond the vocabulary.
        """
        start, stop, step = part.indices(len(self))
        assert step == 1
        tokens = self._read(start, stop)
        self._check_state()
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            place = int(np.argmax(tokens >= self.vocab_size))
            raise BeyondVocabulary(
                f"{self.path} holds token {tokens[place]} (token {start + place} of the file), the vocabulary ends at "
                f"{self.vocab_size - 1}"
            )
        return tokens

    def sample(self) -> np.ndarray:
        """Reads pieces spread evenly over the file, each from an even position, and joins them without checks."""
        length = _SAMPLE_BYTES // self.dtype.itemsize
        places = np.linspace(0, max(0, len(self) - length), _SAMPLE_PIECES).astype(np.int64) // 2 * 2
        return np.concatenate([self._read(start, start + length) for start in np.unique(places).tolist()])

    def head(self, num_bytes: int) -> bytes:
        """Reads the first bytes."""
        return os.pread(self._fd, num_bytes, 0)

    def _read(self, start: int, stop: int) -> np.ndarray:
        size = self.dtype.itemsize
        first, last = start * size, min(stop, len(self)) * size
        pieces = []
        try:
            while first < last:
                pieces.append(os.pread(self._fd, min(last - first, _MOST_BYTES), first))
                if not pieces[-1]:
                    raise self._shrunk(self._state_now().num_bytes)
                first += len(pieces[-1])
        except OSError as error:
            raise self._unreadable(error) from error
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), self.dtype)

    def _check_state(self) -> None:
        now = self._state_now()
        if now.num_bytes < self._begun.num_bytes:
            raise self._shrunk(now.num_bytes)
        if now != self._seen:
            if zlib.crc32(self.sample().tobytes()) != self._sampled:
                raise DataError(f"{self.path} has been overwritten since the run opened it")
            self._seen = now

    def _shrunk(self, num_bytes: int) -> DataError:
        was = self._begun.num_bytes
        return DataError(f"{self.path} has shrunk from {was} to {num_bytes} bytes since the run opened it")

    def _state_now(self) -> FileState:
        try:
            found = os.fstat(self._fd)
        except OSError as error:
            raise self._unreadable(error) from error
        return FileState(found.st_size, found.st_mtime_ns)

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"{self.path} cannot be read any more: {error.strerror}")
