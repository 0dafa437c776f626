"""Reports of a run to its directory and to the terminal; callers do not wait for writes."""

import time
from collections.abc import Sequence
from typing import Any

from swift.elastic.membership.commands import Command
from swift.elastic.membership.events import Event
from swift.elastic.membership.members import Process
from swift.elastic.membership.state_machine import Membership
from swift.elastic.reporting.background_calls import BackgroundCalls
from swift.elastic.reporting.display import Display
from swift.elastic.reporting.journal import Journal, Note
from swift.runlog.metrics import ranges_text
from swift.runlog.run_directory import RunDirectory


class Reporter:
    """The one writer of a run's record while processes run.

    Args:
        journal: journal of the run.
        display: display of the run.
        directory: open run directory.
        background: calls that write, in order.
        written: last iteration whose metrics are written, or about to be.

    Attributes:
        on_file: last iteration whose metrics are in the file.
    """

    def __init__(
        self, journal: Journal, display: Display, directory: RunDirectory, background: BackgroundCalls, written: int
    ):
        self._journal, self._display, self._directory, self.written = journal, display, directory, written
        self._background, self.on_file = background, written
        self._planned = 0  # newest generation whose plan is noted

    def on(self, event: Event, before: Membership, after: Membership, commands: Sequence[Command]) -> None:
        """Notes an event that was reported to the membership."""
        self._write(self._journal.on(event, before, after, commands))

    def fault_injected(self, process: Process, kind: str, time: float) -> None:
        """Notes that a fault of this kind is injected into a process at this time."""
        if kind == "kill":
            self._write(self._journal.kill_injected(process, time))
        else:
            self.note(kind, self.written, f"process {process} is made to {kind}", process=str(process))

    def record(self, record: dict[str, Any]) -> None:
        """Writes the record of an iteration, unless it was written before."""
        self._journal.record(record["step"])
        if record["step"] > self.written:
            if record["step"] > self.written + 1:
                missing = range(self.written + 1, record["step"])
                text = f"iterations without a record: {ranges_text([missing])}; the members died before reporting them"
                self.note("not_recorded", self.written, text, first=missing[0], last=missing[-1])
            self.written = record["step"]
            self._background.call(self._log_step, record)
            self._background.call(self._display.record, record)

    def _log_step(self, record: dict[str, Any]) -> None:
        """Writes a record, in the thread that writes."""
        self._directory.log_step(record)
        self.on_file = record["step"]

    def plan(self, number: int, facts: dict[str, Any]) -> None:
        """Notes the plan of a generation, once."""
        if number > self._planned:
            self._planned = number
            self.note("plan", self.written, None, epoch=number, **facts)

    def note(self, event: str, step: int, text: str | None, **fields: Any) -> None:
        """Notes another event."""
        self._write([Note(event, step, fields, text)])

    def show_line(self, text: str) -> None:
        """Shows a line on the terminal only."""
        self._background.call(self._display.note, text, time.monotonic())

    def show(self, membership: Membership) -> None:
        """Shows the state of each process."""
        self._display.update(membership, time.monotonic())

    def saved(self, newest: int | None) -> None:
        """Shows the iteration of the newest checkpoint; None: there is none yet."""
        self._display.saved(newest)

    def goodput(self) -> dict[str, Any]:
        """Breaks down the time so far."""
        return self._journal.goodput(time.monotonic())

    def check(self) -> None:
        """Raises RunError if the run's directory is known to belong to another run; accesses no file for that."""
        self._directory.check(may_look=False)

    def raise_failed(self) -> None:
        """Raises the error of the record, if it could not be written."""
        self._background.raise_failed()

    def _write(self, notes: Sequence[Note]) -> None:
        for note in notes:
            self._background.call(self._directory.log_event, note.event, note.step, **note.fields)
            if note.text is not None:
                self._background.call(self._display.note, note.text, time.monotonic())
