"""Truncation of a run's record after the checkpoint from which the run is resumed."""

import json
import os
from pathlib import Path

from swift.errors import SettingError
from swift.files import sync_directory
from swift.runlog.class_counts import CLASS_COUNTS, KINDS, ClassCounts, CountsWriter, counts_array, cut_entries
from swift.runlog.events import EVENTS
from swift.runlog.json_lines import cut_after, parse_object, read_objects, step_of
from swift.runlog.metrics import METRICS


def truncate_record(path: Path, step: int) -> None:
    """Truncates the metrics after a step, and any file after its last complete line; reads only what it removes.

    An old run, which has the counts by expert class in its metrics, first gets a file of counts.

    Args:
        path: run directory.
        step: last step to keep.

    Raises:
        SettingError: a line is damaged, or the header of the counts is.
    """
    if _is_old(path / METRICS):
        _move_counts(path, step)
    ClassCounts.open(path / CLASS_COUNTS)  # reports damage before anything is cut
    last = cut_after(path / METRICS, lambda line: step_of(path / METRICS, line) <= step)
    cut_entries(path / CLASS_COUNTS, 0 if last is None else step_of(path / METRICS, last))
    cut_after(path / EVENTS)


def _is_old(metrics: Path) -> bool:
    if not metrics.exists():
        return False
    with metrics.open("rb") as file:
        return any((parse_object(file.readline()) or {}).get(kind) for kind in KINDS)


def _move_counts(path: Path, step: int) -> None:
    """Moves the counts up to a step into a file of their own.

    The metrics are replaced last: if interrupted, the run is still an old one, and the next attempt starts over.
    """
    temporary = {name: path / f".{name}.tmp" for name in (CLASS_COUNTS, METRICS)}
    temporary[CLASS_COUNTS].unlink(missing_ok=True)
    counts = CountsWriter.open(temporary[CLASS_COUNTS])
    try:
        with temporary[METRICS].open("w") as lines:
            for record in read_objects(path / METRICS):
                if not isinstance(record.get("step"), int):
                    raise SettingError(str(path / METRICS), str(record)[:60], "is damaged: it has no step")
                if record["step"] > step:
                    break
                by_kind = [record.pop(kind, None) for kind in KINDS]
                if any(by_kind):
                    counts.write(record["step"], counts_array(str(path / METRICS), record["step"], by_kind))
                lines.write(json.dumps(record) + "\n")
    finally:
        counts.close()
    for name in (CLASS_COUNTS, METRICS):
        with temporary[name].open("rb") as file:
            os.fsync(file.fileno())
        temporary[name].replace(path / name)
        sync_directory(path)
