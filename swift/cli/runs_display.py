"""Progress of several runs that are processes: a bar for all and a line for each on a terminal, few lines in a log."""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.text import Text

from swift.errors import printable
from swift.runlog.files import METRICS, lines_from_end, parse_object
from swift.train.display import StepTimer, Terminal, describe, progress_lines

_MOST_LINES = 10
"""Most runs that have a line of their own on a terminal."""
_READ_S = 1.0
"""Seconds between two looks at the record of a run."""


class RunsDisplay:
    """Shows the progress of all runs of a comparison on stderr, from their records; a context manager.

    Args:
        top: directory of the comparison, which has a directory for each run.
        num_steps: number of iterations of each run by name.
        remaining: names of the runs that have not ended yet.

    Attributes:
        has_begun: whether some run has made a step.
    """

    def __init__(self, top: Path, num_steps: Mapping[str, int], remaining: Collection[str]):
        self._top, self._num_steps = top, num_steps
        self._steps = {name: 0 if name in remaining else count for name, count in num_steps.items()}
        for name in remaining:
            self._begin_at_newest(name)
        self._num_ended, self._newest = len(num_steps) - len(remaining), dict[str, Mapping[str, Any]]()
        self._running: dict[str, float] = {}
        self._read_at: dict[str, float] = {}
        self._timer = StepTimer(sum(num_steps.values()))
        self._terminal = Terminal(self._draw)
        self.has_begun = self._num_ended > 0

    def __enter__(self) -> Self:
        self._terminal.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._terminal.is_transient = True
        self._terminal.__exit__(kind, error, traceback)

    def note(self, text: str) -> None:
        """Prints a permanent line."""
        self._terminal.print(printable(text))

    def begin(self, num_jobs: int) -> None:
        """Shows how many runs there are, and where."""
        count = len(self._num_steps)
        already = f", {self._num_ended} of which have ended already" if self._num_ended else ""
        self.note(
            f"{count} run{'s' * (count > 1)}{already}, {num_jobs} at a time; the output of each: {self._top}/NAME.log"
        )

    def started(self, name: str) -> None:
        """Shows a run that has been started."""
        self._running[name] = time.monotonic()
        self._begin_at_newest(name)  # what was there may have been put aside
        if not self._terminal.is_live:
            self.note(f"{name}: started")

    def follow(self, name: str) -> None:
        """Reads a run's newest record, at most once a second."""
        now = time.monotonic()
        if now - self._read_at.get(name, -_READ_S) < _READ_S:
            return
        self._read_at[name] = now
        self._read(name)

    def ended(self, name: str, reason: str) -> None:
        """Shows that a run has ended: completely, or with the reason why it has failed."""
        self._read(name)
        self._running.pop(name, None)
        self._num_ended += 1
        self._steps[name] = self._num_steps[name]
        loss = self._newest.get(name, {}).get("loss")
        outcome = f"failed: {reason}" if reason else "ended" + (f", loss {loss:.3f}" if loss is not None else "")
        self.note(f"{name}: {outcome} ({self._num_ended} of {len(self._num_steps)})")

    def stopped(self) -> None:
        """Shows that all runs have been stopped."""
        self.note(
            f"stopped; {self._num_ended} of {len(self._num_steps)} runs have ended; --resume continues in {self._top}"
        )

    def _newest_record(self, name: str) -> Mapping[str, Any] | None:
        path = self._top / name / METRICS
        try:
            record = parse_object(next((line for _, line in lines_from_end(path)), b""))
        except OSError:  # the run has not begun, or a file system does not answer: the display does without
            return None
        return record if record is not None and type(record.get("step")) is int else None

    def _begin_at_newest(self, name: str) -> None:
        """Counts the steps of earlier invocations, which the remaining time does not include."""
        self._steps[name] = (self._newest_record(name) or {"step": 0})["step"]

    def _read(self, name: str) -> None:
        record = self._newest_record(name)
        if record is None or record["step"] == self._steps[name]:
            return
        self._newest[name], self._steps[name], self.has_begun = record, int(record["step"]), True
        if self._timer.passed(sum(self._steps.values()), time.monotonic()) and not self._terminal.is_live:
            texts = [f"{name}: step {self._steps[name]:,}/{self._num_steps[name]:,}", *describe(record)]
            self.note("  ".join([*texts, *filter(None, [self._left()])]))

    def _left(self) -> str:
        left = self._timer.left()
        return f"{left} in all" if left else ""

    def _draw(self) -> RenderableType:
        num_steps, count = sum(self._num_steps.values()), len(self._num_steps)
        texts = [f"{self._num_ended} of {count} runs have ended"]
        lines: list[RenderableType] = [
            progress_lines(printable(self._top.name), sum(self._steps.values()), num_steps, self._timer.left(), texts)
        ]
        names = list(self._running)
        lines += [Text(self._line(name), no_wrap=True, overflow="ellipsis") for name in names[:_MOST_LINES]]
        lines += [Text(f"and {len(names) - _MOST_LINES} more")] * (len(names) > _MOST_LINES)
        return Group(*lines)

    def _line(self, name: str) -> str:
        if name not in self._newest:
            return f"starting ({time.monotonic() - self._running[name]:.0f} s)  {printable(name)}"
        step = f"step {self._steps[name]:,}/{self._num_steps[name]:,}"
        return "  ".join([step, *describe(self._newest[name])[:1], printable(name)])
