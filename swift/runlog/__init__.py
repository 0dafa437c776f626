"""The record of a run: a directory, written while the run trains and read back later.

``run_directory`` writes it: metrics and events to ``files``, counts by expert class to ``expert_counts``. ``observers``
and ``trackers`` receive it meanwhile, ``lease`` says which process owns it, and ``reading`` reads it back.

``swift.report.history`` derives from it the history of the run, its incidents, the presence of workers and the use of
time.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.runlog.expert_counts import CLASS_COUNTS, ClassCounts
    from swift.runlog.files import EVENTS, METRICS, Metrics, lines_from_end, parse_object, ranges_of, ranges_text
    from swift.runlog.lease import Lease, acquire_lease, last_heartbeat, remove_lease, this_process, writes_checkpoints
    from swift.runlog.observers import Observer
    from swift.runlog.reading import (
        CONFIG,
        SUMMARY,
        Run,
        changed_settings,
        check_is_run,
        check_new_run,
        check_same_run,
        is_run,
        measure,
        ratio,
        read_run,
        running_mean,
        scalars,
        settings_in,
        steps_to_target,
    )
    from swift.runlog.run_directory import NullRunDirectory, RunDirectory, sync_record
    from swift.runlog.trackers import TRACKERS

_MODULES = {
    "swift.runlog.expert_counts": ["CLASS_COUNTS", "ClassCounts"],
    "swift.runlog.files": [
        "EVENTS",
        "METRICS",
        "Metrics",
        "lines_from_end",
        "parse_object",
        "ranges_of",
        "ranges_text",
    ],
    "swift.runlog.lease": [
        "Lease",
        "acquire_lease",
        "last_heartbeat",
        "remove_lease",
        "this_process",
        "writes_checkpoints",
    ],
    "swift.runlog.observers": ["Observer"],
    "swift.runlog.reading": [
        "CONFIG",
        "Run",
        "SUMMARY",
        "changed_settings",
        "check_is_run",
        "check_new_run",
        "check_same_run",
        "is_run",
        "measure",
        "ratio",
        "read_run",
        "running_mean",
        "scalars",
        "settings_in",
        "steps_to_target",
    ],
    "swift.runlog.run_directory": ["RunDirectory", "NullRunDirectory", "sync_record"],
    "swift.runlog.trackers": ["TRACKERS"],
}
__all__ = [
    "CLASS_COUNTS",
    "CONFIG",
    "EVENTS",
    "METRICS",
    "SUMMARY",
    "TRACKERS",
    "ClassCounts",
    "Lease",
    "Metrics",
    "NullRunDirectory",
    "Observer",
    "Run",
    "RunDirectory",
    "acquire_lease",
    "changed_settings",
    "check_is_run",
    "check_new_run",
    "check_same_run",
    "is_run",
    "last_heartbeat",
    "lines_from_end",
    "measure",
    "parse_object",
    "ranges_of",
    "ranges_text",
    "ratio",
    "read_run",
    "remove_lease",
    "running_mean",
    "scalars",
    "settings_in",
    "steps_to_target",
    "sync_record",
    "this_process",
    "writes_checkpoints",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
