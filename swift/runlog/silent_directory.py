"""The run directory of a process that writes no record, since another process of the run does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift.runlog.run_directory import RunDirectory


class SilentDirectory(RunDirectory):
    """A run directory whose record this process neither opens nor writes.

    Args:
        path: run directory.
    """

    def __init__(self, path: Path):
        self.path = path

    def log_step(self, metrics: Mapping[str, Any]) -> None:
        """Leaves the metrics of a step to the process that records."""

    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """Leaves an event to the process that records."""

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Leaves the summary to the process that records."""

    def close(self) -> None:
        """Closes nothing."""
