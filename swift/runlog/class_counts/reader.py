"""Reading of counts, a few megabytes at a time at most; damaged entries are passed over.

Shape suffixes: R entries, K kinds of counts, L MoE layers, E expert classes.
"""

import os
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np

from swift.runlog.class_counts.layout import CHECK_BYTES, HEADER_BYTES, CountsLayout

_BLOCK_BYTES = 2**22


class ClassCounts:
    """The entries that a file had when it was opened.

    Args:
        descriptor: open file, which is closed with this object.
        name: name of the file, for errors.
    """

    def __init__(self, descriptor: int, name: str):
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        layout = CountsLayout.read(descriptor, name)
        self._entry = None if layout is None else layout.entry
        self.shape = (0, 0) if layout is None else (layout.num_layers, layout.num_classes)
        size = os.fstat(descriptor).st_size
        self.num_entries = 0 if self._entry is None else (size - HEADER_BYTES) // self._entry.itemsize

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Opens the entries of a file; None if it is missing. Raises SettingError if its header is damaged."""
        try:
            return cls(os.open(path, os.O_RDONLY), str(path))
        except FileNotFoundError:
            return None

    def blocks(self, begin: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Reads the intact entries from entry ``begin`` on, some megabytes at a time.

        Yields:
            (uint64[R], their steps; uint32[R, K, L, E], their counts).
        """
        if self._entry is None:
            return
        at_once = max(1, _BLOCK_BYTES // self._entry.itemsize)
        for start in range(begin, self.num_entries, at_once):
            entries_R, is_sound_R = self._read(start, min(at_once, self.num_entries - start))
            yield entries_R["step"][is_sound_R], entries_R["counts"][is_sound_R]

    def after(self, step: int, upto: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (step, uint32[K, L, E]) for the intact entries after ``step``, up to and including ``upto``."""
        for steps_R, counts_RKLE in self.blocks(self.num_upto(step)):
            for step_of_entry, counts_KLE in zip(steps_R.tolist(), counts_RKLE, strict=True):
                if step_of_entry > upto:
                    return
                yield step_of_entry, counts_KLE

    def at(self, step: int, hint: int) -> np.ndarray | None:
        """Reads the counts of a step, uint32[K, L, E]; None if they are missing or damaged.

        Args:
            step: step, from 1.
            hint: entry of that step if no entry is missing.
        """
        if 0 <= hint < self.num_entries and self._step(hint) == step:
            return self._counts(hint)
        entry = self.num_upto(step) - 1
        return self._counts(entry) if entry >= 0 and self._step(entry) == step else None

    def num_upto(self, step: int) -> int:
        """Counts the entries up to and including the last intact one whose step is at most ``step``, by bisection."""
        found, low, high = 0, 0, self.num_entries
        while low < high:
            middle = (low + high) // 2
            entry = next((entry for entry in range(middle, low - 1, -1) if self._step(entry) is not None), None)
            if entry is None:
                low = middle + 1
            elif (self._step(entry) or 0) <= step:
                low, found = middle + 1, entry + 1
            else:
                high = entry
        return found

    def _step(self, entry: int) -> int | None:
        """Step of an entry; None if the entry is damaged."""
        entries_R, is_sound_R = self._read(entry, 1)
        return int(entries_R["step"][0]) if is_sound_R[0] else None

    def _counts(self, entry: int) -> np.ndarray:
        return self._read(entry, 1)[0]["counts"][0]

    def _read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads some entries, and checks which of them are intact."""
        assert self._entry is not None
        size = self._entry.itemsize
        content = memoryview(os.pread(self._descriptor, count * size, HEADER_BYTES + start * size))
        entries_R = np.frombuffer(content[: len(content) // size * size], self._entry)
        checks = [zlib.crc32(content[at : at + size - CHECK_BYTES]) for at in range(0, len(entries_R) * size, size)]
        return entries_R, np.array(checks, np.uint32) == entries_R["check"]
