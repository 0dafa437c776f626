"""The record of a run: a directory, written while the run trains and read back later.

``analysis`` derives from it the history of the run, its incidents, the presence of workers and the use of time.
"""

from swift.runlog.analysis import (
    History,
    Incident,
    Presence,
    Stretch,
    history_of,
    incidents_of,
    measure,
    names_in,
    number_in,
    presences_of,
    ratio,
    running_mean,
    scalars,
    steps_to_target,
    stretches_of,
    time_by_cause,
)
from swift.runlog.class_counts import CLASS_COUNTS, ClassCounts
from swift.runlog.events import EVENTS
from swift.runlog.json_lines import lines_from_end, parse_object
from swift.runlog.lock import Lease, acquire_lease, last_beat, remove_lease, this_process, writes_checkpoints
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
