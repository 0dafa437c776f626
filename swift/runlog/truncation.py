"""Truncation of a run's record after the checkpoint from which the run is resumed."""

from pathlib import Path

from swift.runlog.class_counts.layout import CLASS_COUNTS
from swift.runlog.class_counts.reader import ClassCounts
from swift.runlog.class_counts.writer import cut_entries
from swift.runlog.events import EVENTS
from swift.runlog.json_lines import cut_after, step_of
from swift.runlog.metrics import METRICS


def truncate_record(path: Path, step: int) -> None:
    """Truncates the metrics after a step, and any file after its last complete line; reads only what it removes.

    Args:
        path: run directory.
        step: last step to keep.

    Raises:
        SettingError: a line is damaged, or the header of the counts is.
    """
    ClassCounts.open(path / CLASS_COUNTS)  # reports damage before anything is cut
    last = cut_after(path / METRICS, lambda line: step_of(path / METRICS, line) <= step)
    cut_entries(path / CLASS_COUNTS, 0 if last is None else step_of(path / METRICS, last))
    cut_after(path / EVENTS)
