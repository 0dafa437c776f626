"""The record of a run: its directory, written while it trains and read back, and what its metrics come to."""

from swift.record.class_counts import CLASS_COUNTS, ClassCounts
from swift.record.events import EVENTS
from swift.record.history import History, Stretch, history_of, names_in, number_in, stretches_of
from swift.record.lines import lines_from_end, parse_object
from swift.record.measures import measure, ratio, running_mean, scalars, steps_to_target
from swift.record.metrics import METRICS, Metrics, ranges_of, ranges_text
from swift.record.moments import Moment, moments_of
from swift.record.places import Presence, presences_of
from swift.record.run_directory import (
    CONFIG,
    SUMMARY,
    Run,
    RunDirectory,
    check_is_run,
    check_new_run,
    check_same_run,
    read_run,
    sync_record,
)
from swift.record.run_lock import Lease, take, writes_checkpoints
from swift.record.spending import CAUSES, spending_of

__all__ = [
    "CAUSES",
    "CLASS_COUNTS",
    "CONFIG",
    "EVENTS",
    "METRICS",
    "SUMMARY",
    "ClassCounts",
    "History",
    "Lease",
    "Metrics",
    "Moment",
    "Presence",
    "Run",
    "RunDirectory",
    "Stretch",
    "check_is_run",
    "check_new_run",
    "check_same_run",
    "history_of",
    "lines_from_end",
    "measure",
    "moments_of",
    "names_in",
    "number_in",
    "parse_object",
    "presences_of",
    "ranges_of",
    "ranges_text",
    "ratio",
    "read_run",
    "running_mean",
    "scalars",
    "spending_of",
    "steps_to_target",
    "stretches_of",
    "sync_record",
    "take",
    "writes_checkpoints",
]
