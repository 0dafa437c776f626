"""Records of JSON lines, also compressed."""

import functools
import json
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from swift.data.files import DataError
from swift.data.records.files import FileRecords, Parts, uncompressed
from swift.files import open_regular

_SCANNED = 1 << 24


@dataclass(frozen=True)
class JsonLines(FileRecords):
    """Files with a JSON object in each line, whose names are the fields; ``.gz`` and ``.zst`` are uncompressed.

    A file that is not compressed is read by position; a compressed one is kept in memory while its records are read, so
    these are best kept (see ``Resources``) before they are shuffled. Empty lines are not records.

    Args:
        pattern: pattern of the files, such as ``corpus/*.jsonl.gz``; or of a remote directory.
    """

    def _num_records(self, file: int) -> int:
        return len(self._lines[file])

    def _record(self, file: int, number: int) -> Mapping[str, Any]:
        one, (begin, end) = self.files[file], self._lines[file][number]
        line = self._parts[file][begin:end] if self._is_whole(file) else self._read(file, int(begin), int(end))
        try:
            record = json.loads(line)
        except ValueError as error:  # also of bytes that are not UTF-8
            raise DataError(f"{one.path}: record {number + 1} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{one.path}: record {number + 1} is not a JSON object")
        return record

    def _is_whole(self, file: int) -> bool:
        one = self.files[file]
        return one.is_remote or one.path.endswith((".gz", ".zst"))

    @functools.cached_property
    def _lines(self) -> list[np.ndarray]:
        """Start and end of each line that is not empty, int64[num, 2] for each file."""
        return [self._scanned(file) for file in range(len(self.files))]

    def _scanned(self, file: int) -> np.ndarray:
        if self._is_whole(file):
            content = self._parts[file]
            return _lines_of([np.flatnonzero(np.frombuffer(content, np.uint8) == 10)], len(content))
        size, breaks = self.files[file].state.num_bytes, list[np.ndarray]()
        for begin in range(0, size, _SCANNED):
            piece = np.frombuffer(self._read(file, begin, min(size, begin + _SCANNED)), np.uint8)
            breaks.append(np.flatnonzero(piece == 10) + begin)
        return _lines_of(breaks, size)

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


def _lines_of(breaks: list[np.ndarray], size: int) -> np.ndarray:
    ends = np.concatenate([*breaks, [size]]).astype(np.int64)
    begins = np.concatenate([[0], ends[:-1] + 1])
    lines = np.stack([begins, ends], axis=1)
    return lines[ends > begins]
