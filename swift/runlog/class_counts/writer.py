"""Writing of counts: entries are appended, and cut off again when a run continues from an earlier step."""

import os
import zlib
from pathlib import Path
from typing import Self

import numpy as np

from swift.errors import SettingError
from swift.runlog.class_counts.layout import CHECK_BYTES, HEADER_BYTES, CountsLayout
from swift.runlog.class_counts.reader import ClassCounts


class CountsWriter:
    """Appends entries to a file; the first entry of a new file decides its layout."""

    def __init__(self, descriptor: int, name: str):
        self._descriptor, self._name = descriptor, name
        self._layout = CountsLayout.read(descriptor, name)
        size = os.fstat(descriptor).st_size
        self._end = 0 if self._layout is None else size - (size - HEADER_BYTES) % self._layout.entry.itemsize

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens a file for writing after its last complete entry; a missing file is created."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            return cls(descriptor, str(path))
        except BaseException:
            os.close(descriptor)
            raise

    def write(self, step: int, counts_KLE: np.ndarray) -> None:
        """Appends the counts of a step, which must be later than those in the file.

        Raises:
            SettingError: the file has counts of another shape.
            OSError: the entry cannot be written; the next one overwrites what was written of it.
        """
        layout = CountsLayout(*counts_KLE.shape[1:])
        if self._layout is None:
            self._append(layout.header)
            self._layout = layout
        if self._layout != layout:
            here, there = (f"{one.num_layers} layers of {one.num_classes} classes" for one in (layout, self._layout))
            raise SettingError(self._name, there, f"must be {here}, as this run counts")
        entry = np.zeros((), layout.entry)
        entry["step"], entry["counts"] = step, counts_KLE
        entry["check"] = zlib.crc32(entry.tobytes()[:-CHECK_BYTES])
        self._append(entry.tobytes())

    def _append(self, content: bytes) -> None:
        """Writes after the last complete entry, also if an earlier write failed half-way."""
        done = 0
        while done < len(content):
            done += os.pwrite(self._descriptor, content[done:], self._end + done)
        self._end += len(content)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def cut_entries(path: Path, step: int) -> None:
    """Truncates a file of counts after the last intact entry whose step is at most ``step``; removes it if none is."""
    counts = ClassCounts.open(path)
    if counts is None:
        return
    num_entries = counts.num_upto(step)
    if num_entries:
        os.truncate(path, HEADER_BYTES + num_entries * CountsLayout(*counts.shape).entry.itemsize)
    else:
        path.unlink()
