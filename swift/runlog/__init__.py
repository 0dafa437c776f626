"""The record of a run: a directory that is written while the run trains, and read back later.

``run_directory`` writes it. Metrics and events are JSON lines, see ``files``; counts by expert class are binary, see
``expert_counts``. ``observers`` and ``trackers`` receive every record as it is written. ``lease`` ensures that one
process at a time owns the directory, and ``reading`` reads it back.

``swift.report.history`` derives the run's history from the record: incidents, the presence of workers, the use of time.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.runlog.expert_counts import ClassCounts
    from swift.runlog.files import METRICS, Metrics
    from swift.runlog.lease import acquire_lease
    from swift.runlog.observers import Observer
    from swift.runlog.reading import Run, is_run, measure, read_run, running_mean, scalars, settings_in, steps_to_target
    from swift.runlog.run_directory import RunDirectory
    from swift.runlog.trackers import TRACKERS

_MODULES = {
    "swift.runlog.expert_counts": ["ClassCounts"],
    "swift.runlog.files": ["METRICS", "Metrics"],
    "swift.runlog.lease": ["acquire_lease"],
    "swift.runlog.observers": ["Observer"],
    "swift.runlog.reading": [
        "Run",
        "is_run",
        "measure",
        "read_run",
        "running_mean",
        "scalars",
        "settings_in",
        "steps_to_target",
    ],
    "swift.runlog.run_directory": ["RunDirectory"],
    "swift.runlog.trackers": ["TRACKERS"],
}
__all__ = [
    "METRICS",
    "TRACKERS",
    "ClassCounts",
    "Metrics",
    "Observer",
    "Run",
    "RunDirectory",
    "acquire_lease",
    "is_run",
    "measure",
    "read_run",
    "running_mean",
    "scalars",
    "settings_in",
    "steps_to_target",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
