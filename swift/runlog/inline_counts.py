"""Counts by expert class of runs that are so old that ``metrics.jsonl`` has them, as new runs have them."""

import os
import tempfile
import weakref
from typing import Any

from swift.runlog.class_counts import ClassCounts, CountsWriter, counts_array


class InlineCounts:
    """Rows of an unnamed file, which is gone with this object and what it has returned."""

    def __init__(self, name: str):
        self._name = name
        with tempfile.TemporaryFile() as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._writer = CountsWriter(self._descriptor, name)

    def add(self, step: int, inline: list[Any]) -> None:
        """Adds the counts of a step, by kind; raises SettingError where they are no counts of one shape."""
        self._writer.write(step, counts_array(self._name, step, inline))

    def finish(self) -> ClassCounts:
        """All rows; there will be no more."""
        return ClassCounts(os.dup(self._descriptor), self._name)
