"""Counts by expert class that old runs have in ``metrics.jsonl``, converted to the format of new runs."""

import os
import tempfile
import weakref
from typing import Any

from swift.runlog.class_counts.layout import counts_array
from swift.runlog.class_counts.reader import ClassCounts
from swift.runlog.class_counts.writer import CountsWriter


class InlineCounts:
    """Counts in an unnamed temporary file, which exists as long as this object or the counts that it returns."""

    def __init__(self, name: str):
        self._name = name
        with tempfile.TemporaryFile() as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._writer = CountsWriter(self._descriptor, name)

    def add(self, step: int, inline: list[Any]) -> None:
        """Adds the counts of a step, by kind; raises SettingError if they are not counts of one shape."""
        self._writer.write(step, counts_array(self._name, step, inline))

    def finish(self) -> ClassCounts:
        """Returns all entries; no more can be added."""
        return ClassCounts(os.dup(self._descriptor), self._name)
