"""The record of a run: its directory, written while it trains and read back, and what its metrics come to."""

from swift.record.measures import measure, ratio, running_mean, scalars, steps_to_target
from swift.record.run_directory import (
    CONFIG,
    METRICS,
    SUMMARY,
    Run,
    RunDirectory,
    check_new_run,
    check_same_run,
    read_run,
)

__all__ = [
    "CONFIG",
    "METRICS",
    "SUMMARY",
    "Run",
    "RunDirectory",
    "check_new_run",
    "check_same_run",
    "measure",
    "ratio",
    "read_run",
    "running_mean",
    "scalars",
    "steps_to_target",
]
