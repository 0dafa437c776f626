"""A binary file of counts by expert class for every iteration.

The file has a header of 512 bytes, then an entry of fixed size for each iteration. The header is a JSON object with the
shape. An entry contains the step (uint64), the counts (uint32) and a CRC-32 of both, so that every torn or damaged
entry is detected.

``CountsWriter`` appends entries, and ``cut_entries`` removes them again when a run continues from an earlier step.
``ClassCounts`` reads entries, at most a few megabytes at a time, and skips damaged ones.

Shape suffixes: R entries, K kinds of counts, L MoE layers, E expert classes.
"""

import json
import os
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from swift.errors import SettingError

CLASS_COUNTS = "class_counts.bin"
KINDS = ("popularity", "replicas", "dropped")
"""Kinds of counts, in the order in which an entry holds them."""
_HEADER_BYTES, _CHECK_BYTES = 512, 4
_FORMAT, _VERSION = "swift class counts", 1
_BLOCK_BYTES = 2**22


@dataclass(frozen=True)
class CountsLayout:
    """The shape of a file's counts, which determines its header and entries."""

    num_layers: int
    num_classes: int

    @property
    def entry(self) -> np.dtype:
        """Dtype of an entry."""
        shape = (len(KINDS), self.num_layers, self.num_classes)
        return np.dtype([("step", "<u8"), ("counts", "<u4", shape), ("check", "<u4")])

    @property
    def header(self) -> bytes:
        """The header as bytes."""
        fields = {
            "format": _FORMAT,
            "version": _VERSION,
            "kinds": KINDS,
            "dtype": "<u4",
            "layers": self.num_layers,
            "classes": self.num_classes,
        }
        return (json.dumps(fields) + "\n").encode().ljust(_HEADER_BYTES)

    @classmethod
    def read(cls, descriptor: int, name: str) -> Self | None:
        """Reads the layout from an open file; returns None if its header is incomplete.

        Raises:
            SettingError: the header is damaged.
        """
        header = os.pread(descriptor, _HEADER_BYTES, 0)
        if len(header) < _HEADER_BYTES:
            return None
        try:
            fields = json.loads(header)
            layout = cls(int(fields["layers"]), int(fields["classes"]))
        except (ValueError, TypeError, KeyError):
            layout = None
        if layout is None or layout.header != header:
            allowed = "is damaged, or of another version; without the file, the run can be resumed and reported"
            raise SettingError(name, "its first 512 bytes", allowed)
        return layout


def counts_array(name: str, step: int, by_kind: list[Any]) -> np.ndarray:
    """Checks a step's counts and returns them as one array, integers ``[K, L, E]`` in the range of uint32.

    Args:
        name: name of the file, for errors.
        step: step, from 1.
        by_kind: counts of each of ``KINDS``, ``[layers][classes]``.

    Raises:
        SettingError: a value is not a count, or the kinds have different shapes.
    """
    try:
        counts_KLE = np.asarray(by_kind)
    except ValueError:
        counts_KLE = np.zeros(0)
    in_range = counts_KLE.size and counts_KLE.dtype.kind in "iu" and 0 <= counts_KLE.min() <= counts_KLE.max() < 2**32
    if counts_KLE.ndim != 3 or not in_range:
        allowed = "must be numbers of tokens or replicas of one shape, layers by classes"
        raise SettingError(name, f"{', '.join(KINDS)} of step {step}", allowed)
    return counts_KLE


class ClassCounts:
    """Reads the entries that a file had when it was opened.

    Args:
        descriptor: open file, closed together with this object.
        name: name of the file, for errors.
    """

    def __init__(self, descriptor: int, name: str):
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        layout = CountsLayout.read(descriptor, name)
        self._entry = None if layout is None else layout.entry
        self.shape = (0, 0) if layout is None else (layout.num_layers, layout.num_classes)
        size = os.fstat(descriptor).st_size
        self.num_entries = 0 if self._entry is None else (size - _HEADER_BYTES) // self._entry.itemsize

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Opens a file of counts; returns None if it is missing, and raises SettingError if its header is damaged."""
        try:
            return cls(os.open(path, os.O_RDONLY), str(path))
        except FileNotFoundError:
            return None

    def blocks(self, begin: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Reads the intact entries from entry ``begin`` on, a few megabytes at a time.

        Yields:
            (steps, uint64[R]; counts, uint32[R, K, L, E]).
        """
        if self._entry is None:
            return
        at_once = max(1, _BLOCK_BYTES // self._entry.itemsize)
        for start in range(begin, self.num_entries, at_once):
            entries_R, is_sound_R = self._read(start, min(at_once, self.num_entries - start))
            yield entries_R["step"][is_sound_R], entries_R["counts"][is_sound_R]

    def after(self, step: int, upto: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (step, uint32[K, L, E]) for the intact entries with steps above ``step`` and up to ``upto``."""
        for steps_R, counts_RKLE in self.blocks(self.num_upto(step)):
            for step_of_entry, counts_KLE in zip(steps_R.tolist(), counts_RKLE, strict=True):
                if step_of_entry > upto:
                    return
                yield step_of_entry, counts_KLE

    def at(self, step: int, hint: int) -> np.ndarray | None:
        """Reads the counts of a step, uint32[K, L, E]; None if its entry is missing or damaged.

        Args:
            step: step, from 1.
            hint: index of the step's entry if no entry is missing; tried first.
        """
        if 0 <= hint < self.num_entries and self._step(hint) == step:
            return self._counts(hint)
        entry = self.num_upto(step) - 1
        return self._counts(entry) if entry >= 0 and self._step(entry) == step else None

    def num_upto(self, step: int) -> int:
        """Counts the entries up to the last intact one whose step is at most ``step``, by bisection."""
        count, low, high = 0, 0, self.num_entries
        while low < high:
            middle = (low + high) // 2
            # A damaged entry has no step to compare: take the nearest intact one before it.
            entry = next((entry for entry in range(middle, low - 1, -1) if self._step(entry) is not None), None)
            if entry is None:
                low = middle + 1
            elif (self._step(entry) or 0) <= step:
                low, count = middle + 1, entry + 1
            else:
                high = entry
        return count

    def _step(self, entry: int) -> int | None:
        """Returns an entry's step; None if the entry is damaged."""
        entries_R, is_sound_R = self._read(entry, 1)
        return int(entries_R["step"][0]) if is_sound_R[0] else None

    def _counts(self, entry: int) -> np.ndarray:
        return self._read(entry, 1)[0]["counts"][0]

    def _read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads ``count`` entries from entry ``start`` on; returns them, and which of them are intact, bool[R]."""
        assert self._entry is not None
        size = self._entry.itemsize
        content = memoryview(os.pread(self._descriptor, count * size, _HEADER_BYTES + start * size))
        entries_R = np.frombuffer(content[: len(content) // size * size], self._entry)
        checks = [zlib.crc32(content[at : at + size - _CHECK_BYTES]) for at in range(0, len(entries_R) * size, size)]
        return entries_R, np.array(checks, np.uint32) == entries_R["check"]


class CountsWriter:
    """Appends entries to a file; the first entry of a new file determines its layout."""

    def __init__(self, descriptor: int, name: str):
        self._descriptor, self._name = descriptor, name
        self._layout = CountsLayout.read(descriptor, name)
        size = os.fstat(descriptor).st_size
        # A torn last entry is overwritten.
        self._end = 0 if self._layout is None else size - (size - _HEADER_BYTES) % self._layout.entry.itemsize

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens a file to write after its last complete entry; creates a missing file."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            return cls(descriptor, str(path))
        except BaseException:
            os.close(descriptor)
            raise

    def write(self, step: int, counts_KLE: np.ndarray) -> None:
        """Appends the counts of a step, which must be later than all steps in the file.

        Raises:
            SettingError: the file has counts of another shape.
            OSError: the entry cannot be written. The next entry overwrites its half-written bytes.
        """
        layout = CountsLayout(*counts_KLE.shape[1:])
        if self._layout is None:
            self._append(layout.header)
            self._layout = layout
        if self._layout != layout:
            expected, actual = (
                f"{shape.num_layers} layers of {shape.num_classes} classes" for shape in (layout, self._layout)
            )
            raise SettingError(self._name, actual, f"must be {expected}, as this run counts")
        entry = np.zeros((), layout.entry)
        entry["step"], entry["counts"] = step, counts_KLE
        entry["check"] = zlib.crc32(entry.tobytes()[:-_CHECK_BYTES])
        self._append(entry.tobytes())

    def _append(self, content: bytes) -> None:
        """Writes after the last complete entry, even if an earlier write failed halfway."""
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
    """Truncates a file of counts after the last intact entry up to ``step``; removes the file if there is none."""
    counts = ClassCounts.open(path)
    if counts is None:
        return
    num_entries = counts.num_upto(step)
    if num_entries:
        os.truncate(path, _HEADER_BYTES + num_entries * CountsLayout(*counts.shape).entry.itemsize)
    else:
        path.unlink()
