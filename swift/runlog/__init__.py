"""The record of a run: a directory, written while the run trains and read back later.

``analysis`` derives from it the history of the run, its incidents, the presence of workers and the use of time.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.runlog.analysis.history import History, Stretch, history_of, names_in, number_in, stretches_of
    from swift.runlog.analysis.incidents import Incident, incidents_of
    from swift.runlog.analysis.measures import measure, ratio, running_mean, scalars, steps_to_target
    from swift.runlog.analysis.time_breakdown import time_by_cause
    from swift.runlog.analysis.worker_presence import Presence, presences_of
    from swift.runlog.class_counts.layout import CLASS_COUNTS
    from swift.runlog.class_counts.reader import ClassCounts
    from swift.runlog.events import EVENTS
    from swift.runlog.json_lines import lines_from_end, parse_object
    from swift.runlog.lock.owners import this_process
    from swift.runlog.lock.run_lock import Lease, acquire_lease, last_beat, remove_lease, writes_checkpoints
    from swift.runlog.metrics import METRICS, Metrics, ranges_of, ranges_text
    from swift.runlog.observer import Observer
    from swift.runlog.reading import (
        CONFIG,
        SUMMARY,
        Run,
        changed_settings,
        check_is_run,
        check_new_run,
        check_same_run,
        is_run,
        read_run,
        settings_in,
    )
    from swift.runlog.run_directory import RunDirectory, sync_record
    from swift.runlog.silent_directory import SilentDirectory
    from swift.runlog.trackers import TRACKERS

_MODULES = {
    "swift.runlog.analysis.history": ["History", "Stretch", "history_of", "names_in", "number_in", "stretches_of"],
    "swift.runlog.analysis.incidents": ["Incident", "incidents_of"],
    "swift.runlog.analysis.measures": ["measure", "ratio", "running_mean", "scalars", "steps_to_target"],
    "swift.runlog.analysis.time_breakdown": ["time_by_cause"],
    "swift.runlog.analysis.worker_presence": ["Presence", "presences_of"],
    "swift.runlog.class_counts.layout": ["CLASS_COUNTS"],
    "swift.runlog.class_counts.reader": ["ClassCounts"],
    "swift.runlog.events": ["EVENTS"],
    "swift.runlog.json_lines": ["lines_from_end", "parse_object"],
    "swift.runlog.lock.owners": ["this_process"],
    "swift.runlog.lock.run_lock": ["Lease", "acquire_lease", "last_beat", "remove_lease", "writes_checkpoints"],
    "swift.runlog.metrics": ["METRICS", "Metrics", "ranges_of", "ranges_text"],
    "swift.runlog.observer": ["Observer"],
    "swift.runlog.reading": [
        "CONFIG",
        "Run",
        "SUMMARY",
        "changed_settings",
        "check_is_run",
        "check_new_run",
        "check_same_run",
        "is_run",
        "read_run",
        "settings_in",
    ],
    "swift.runlog.run_directory": ["RunDirectory", "sync_record"],
    "swift.runlog.silent_directory": ["SilentDirectory"],
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
    "History",
    "Incident",
    "Lease",
    "Metrics",
    "Observer",
    "Presence",
    "Run",
    "RunDirectory",
    "SilentDirectory",
    "Stretch",
    "acquire_lease",
    "changed_settings",
    "check_is_run",
    "check_new_run",
    "check_same_run",
    "history_of",
    "incidents_of",
    "is_run",
    "last_beat",
    "lines_from_end",
    "measure",
    "names_in",
    "number_in",
    "parse_object",
    "presences_of",
    "ranges_of",
    "ranges_text",
    "ratio",
    "read_run",
    "remove_lease",
    "running_mean",
    "scalars",
    "settings_in",
    "steps_to_target",
    "stretches_of",
    "sync_record",
    "this_process",
    "time_by_cause",
    "writes_checkpoints",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
