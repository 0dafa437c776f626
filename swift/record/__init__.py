"""The record of a run: its directory, written while it trains and read back, and what its metrics come to."""

from swift.record.history import History, Stretch, history_of, names_in, number_in, stretches_of
from swift.record.measures import measure, ratio, running_mean, scalars, steps_to_target
from swift.record.moments import Moment, moments_of
from swift.record.places import Presence, presences_of
from swift.record.run_directory import (
    CONFIG,
    EVENTS,
    METRICS,
    SUMMARY,
    Run,
    RunDirectory,
    check_is_run,
    check_new_run,
    check_same_run,
    read_run,
)
from swift.record.run_lock import Lease, take, writes_checkpoints
from swift.record.spending import CAUSES, spending_of

__all__ = [
    "CAUSES",
    "CONFIG",
    "EVENTS",
    "METRICS",
    "SUMMARY",
    "History",
    "Lease",
    "Moment",
    "Presence",
    "Run",
    "RunDirectory",
    "Stretch",
    "check_is_run",
    "check_new_run",
    "check_same_run",
    "history_of",
    "measure",
    "moments_of",
    "names_in",
    "number_in",
    "presences_of",
    "ratio",
    "read_run",
    "running_mean",
    "scalars",
    "spending_of",
    "steps_to_target",
    "stretches_of",
    "take",
    "writes_checkpoints",
]
