"""Layout of the file of counts: a header of 512 bytes, then an entry of one size for each iteration.

The header is a JSON object with the shape. An entry has the step (uint64), the counts (uint32) and a CRC-32 of both, so
that a torn or damaged entry is detected on its own.

Shape suffixes: K kinds of counts, L MoE layers, E expert classes.
"""

import json
import os
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from swift.errors import SettingError

CLASS_COUNTS = "class_counts.bin"
KINDS = ("popularity", "replicas", "dropped")
"""Kinds of counts, in the order of an entry."""
HEADER_BYTES, CHECK_BYTES = 512, 4

_FORMAT, _VERSION = "swift class counts", 1


@dataclass(frozen=True)
class CountsLayout:
    """The shape of a file's counts."""

    num_layers: int
    num_classes: int

    @property
    def entry(self) -> np.dtype:
        """The type of an entry."""
        shape = (len(KINDS), self.num_layers, self.num_classes)
        return np.dtype([("step", "<u8"), ("counts", "<u4", shape), ("check", "<u4")])

    @property
    def header(self) -> bytes:
        """The header of a file."""
        fields = {
            "format": _FORMAT,
            "version": _VERSION,
            "kinds": KINDS,
            "dtype": "<u4",
            "layers": self.num_layers,
            "classes": self.num_classes,
        }
        return (json.dumps(fields) + "\n").encode().ljust(HEADER_BYTES)

    @classmethod
    def read(cls, descriptor: int, name: str) -> Self | None:
        """Reads the layout of an open file; None if its header is incomplete.

        Raises:
            SettingError: the header is damaged.
        """
        header = os.pread(descriptor, HEADER_BYTES, 0)
        if len(header) < HEADER_BYTES:
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
    """Returns the counts of a step as uint32[K, L, E].

    Args:
        name: name of their file, for errors.
        step: step, from 1.
        by_kind: counts of each of ``KINDS``, ``[layers][classes]``.

    Raises:
        SettingError: they are not counts, or not of one shape.
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
