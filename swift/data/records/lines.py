"""Records of JSON lines, also compressed."""

import functools
import json
import os
import weakref
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from swift.data.files import DataError
from swift.data.records.files import FileRecords, Parts, uncompressed
from swift.errors import first_line
from swift.files import open_regular

_SCANNED = 1 << 24
_BLANK_BEGINS = list(b" \t\r" + BOM_UTF8[:1])
"""First bytes of a line that may be of white space alone."""


@dataclass(frozen=True)
class JsonLines(FileRecords):
    """Files with a JSON object in each line, whose names are the fields; ``.gz`` and ``.zst`` are uncompressed.

    A file that is not compressed is read by position; a compressed one is kept in memory while its records are read, so
    these are best kept (see ``Resources``) before they are shuffled. Lines of white space are not records, and a
    byte-order mark is left out.

    Args:
        pattern: pattern of the files, such as ``corpus/*.jsonl.gz``; or of a remote directory.
    """

    def _num_records(self, file: int) -> int:
        return len(self._lines[file])

    def _record(self, file: int, number: int) -> Mapping[str, Any]:
        one, (begin, end) = self.files[file], self._lines[file][number]
        line = self._parts[file][begin:end] if self._is_whole(file) else self._read(file, int(begin), int(end))
        try:
            record = json.loads(line.decode("utf-8").removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
            raise DataError(f"{one.path}: record {number + 1} is not JSON: {first_line(error)}") from error
        if not isinstance(record, dict):
            raise DataError(f"{one.path}: record {number + 1} is not a JSON object")
        return record

    def _is_whole(self, file: int) -> bool:
        one = self.files[file]
        return one.is_remote or one.path.endswith((".gz", ".zst"))

    @functools.cached_property
    def _lines(self) -> list[np.ndarray]:
        """Start and end of each line that is not of white space, int64[num, 2] for each file."""
        return [self._scanned(file) for file in range(len(self.files))]

    def _scanned(self, file: int) -> np.ndarray:
        if self._is_whole(file):
            content = self._parts[file]
            return _lines_of(lambda begin, end: content[begin:end], len(content))
        return _lines_of(lambda begin, end: self._read(file, begin, end), self.files[file].state.num_bytes)

    @functools.cached_property
    def _parts(self) -> Parts:
        return Parts(lambda file: uncompressed(self.files[file]))

    @functools.cached_property
    def _opened(self) -> dict[int, int]:
        return {}

    def _read(self, file: int, begin: int, end: int) -> bytes:
        one = self.files[file]
        try:
            if file not in self._opened:
                fd = self._opened.setdefault(file, open_regular(one.path))
                weakref.finalize(self._opened_by, os.close, fd)
            content = os.pread(self._opened[file], end - begin, begin)
        except OSError as error:
            raise DataError(f"{one.path} cannot be read: {error.strerror}") from error
        one.check()
        return content

    @functools.cached_property
    def _opened_by(self) -> "_Owner":
        return _Owner()


class _Owner:
    """Owns descriptors: they are closed with it."""


def _lines_of(read: Callable[[int, int], bytes], size: int, piece_bytes: int = _SCANNED) -> np.ndarray:
    """Returns start and end of the lines, int64[num, 2], but for lines of white space.

    Args:
        read: function that returns the bytes from one place to another.
        size: number of bytes.
        piece_bytes: bytes that are read at once.
    """
    starts, breaks, begun = np.zeros(1, np.int64), list[np.ndarray](), list[np.ndarray]()
    blank, undecided = list[int](), list[int]()
    for begin in range(0, size, piece_bytes):
        content = read(begin, min(size, begin + piece_bytes))
        piece = np.frombuffer(content, np.uint8)
        breaks.append(np.flatnonzero(piece == ord("\n")) + begin)
        starts = np.concatenate([starts, breaks[-1] + 1])
        is_here = starts < begin + len(piece)
        begun.append(starts[is_here])
        starts = starts[~is_here]
        suspects = begun[-1][np.isin(piece[begun[-1] - begin], _BLANK_BEGINS)]
        num_ended = int(np.searchsorted(suspects, breaks[-1][-1])) if len(breaks[-1]) else 0
        undecided += suspects[num_ended:].tolist()
        ends = breaks[-1][np.searchsorted(breaks[-1], suspects[:num_ended])]
        for start, end in zip(suspects[:num_ended].tolist(), ends.tolist(), strict=True):
            if _is_blank(content[start - begin : end - begin]):
                blank.append(start)
    if not begun:
        return np.zeros((0, 2), np.int64)
    begins_L = np.concatenate(begun)
    ends_L = np.append(np.concatenate(breaks), size)[: len(begins_L)]
    for place in np.searchsorted(begins_L, undecided).tolist():  # they end in a later piece
        if _is_blank(read(int(begins_L[place]), int(ends_L[place]))):
            blank.append(int(begins_L[place]))
    is_line_L = (ends_L > begins_L) & ~np.isin(begins_L, blank)
    return np.stack([begins_L, ends_L], axis=1)[is_line_L]


def _is_blank(line: bytes) -> bool:
    """Whether a line is of white space alone, after a byte-order mark or without one."""
    return not line.removeprefix(BOM_UTF8).strip()
