"""Counts by expert class of every iteration: the binary file ``class_counts.bin`` beside ``metrics.jsonl``.

``layout`` defines the file, ``writer`` appends to it, ``reader`` reads it. Entries are in the order of their steps; a
step may be missing.
"""

from swift.runlog.class_counts.layout import CLASS_COUNTS, KINDS, counts_array
from swift.runlog.class_counts.reader import ClassCounts
from swift.runlog.class_counts.writer import CountsWriter, cut_entries

__all__ = ["CLASS_COUNTS", "KINDS", "ClassCounts", "CountsWriter", "counts_array", "cut_entries"]
