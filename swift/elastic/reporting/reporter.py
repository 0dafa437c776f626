"""Writes the reports on an elastic run to its directory and to the terminal.

``Reporter`` writes the entries of the journal. ``Display`` shows events, progress and, on a terminal, every process.
The calling thread sends heartbeats and must not wait for a file system, so ``BackgroundCalls`` does all writes in one
background thread.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from queue import Queue
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType

from swift.elastic.membership.messages import Command, Event, Process
from swift.elastic.membership.state_machine import Membership
from swift.elastic.membership.status import ProcessState, ProcessStatus
from swift.elastic.reporting.goodput import CAUSES
from swift.elastic.reporting.journal import Journal, JournalEntry
from swift.runlog.files import ranges_text
from swift.runlog.run_directory import RunDirectory
from swift.tasks import start_thread
from swift.terminal_table import TerminalTable
from swift.train.display import StepTimer, Terminal, describe, progress_lines, saved_text

_MAX_REDRAWS_PER_S, _MAX_WAITING = 4, 10_000


class Display:
    """Shows a run's events and progress on stderr, so that stdout stays clean; a context manager.

    On a terminal, a progress bar, the newest iteration and a table of all processes are redrawn in place below the
    lines of the events. Elsewhere, a plain line is printed after the first iteration and about every 10 % of the run.
    The terminal is restored however the ``with`` block is left.

    Args:
        title: name of the run.
        num_steps: last step of the run.
        time: time at which the run began, in seconds; later calls must use the same clock.
        console: console to write to; stderr by default.
        log_every: iterations between two plain lines, which are then also printed on a terminal; None for the behavior
            described above.
    """

    def __init__(
        self, title: str, num_steps: int, time: float, console: Console | None = None, log_every: int | None = None
    ):
        self._title, self._num_steps, self._start, self._now = title, num_steps, time, time
        self._terminal = Terminal(self._draw, console, _MAX_REDRAWS_PER_S, catches_stderr=console is None)
        self._membership: Membership | None = None
        self._metrics: Mapping[str, Any] = {}
        self._timer, self._step = StepTimer(num_steps, log_every), 0
        self._shows_saved = False
        self._newest: int | None = None
        self._is_lined = log_every is not None

    def __enter__(self) -> Self:
        self._terminal.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._terminal.__exit__(kind, error, traceback)

    def note(self, text: str, time: float) -> None:
        """Prints permanent lines about an event, with the seconds from the start of the run to ``time``."""
        self._terminal.print(f"{time - self._start:7.1f} s  {text}")

    def update(self, membership: Membership, time: float) -> None:
        """Shows the states of the processes at ``time``; cheap enough to call after every change."""
        self._membership, self._now = membership, time

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of the newest step, timed by the last ``update``.

        Args:
            metrics: record as in ``metrics.jsonl``; a step may be repeated after a failure.
        """
        self._metrics, step = metrics, int(metrics["step"])
        if step <= self._step:
            return
        self._step = step
        if self._timer.passed(step, self._now) and (self._is_lined or not self._terminal.is_live):
            counter = f"{self._title}: step {step:,}/{self._num_steps:,}"
            self.note("  ".join(filter(None, (counter, *self._values(), self._timer.left()))), self._now)

    def saved(self, newest: int | None) -> None:
        """Sets the iteration of the newest checkpoint (None if there is none yet), whose age is shown from now on."""
        self._shows_saved, self._newest = True, newest

    def _values(self) -> list[str]:
        """Formats the newest step's metrics, and the age of the newest checkpoint."""
        return [*describe(self._metrics), saved_text(self._step, self._newest) if self._shows_saved else ""]

    def _draw(self) -> RenderableType:
        values = self._values() if self._metrics else ["waiting for the first step"]
        elapsed = f"{self._now - self._start:7.1f} s"
        lines = progress_lines(self._title, self._step, self._num_steps, self._timer.left(), [elapsed, *values])
        # The table comes last: if it is taller than the terminal, its end is cut off.
        return lines if self._membership is None else Group(lines, worker_table(self._membership))


def worker_table(membership: Membership) -> TerminalTable:
    """Returns a table with one row per process: identity, state, iteration, generation and restarts."""
    has_ranks = any(process.rank for process in membership.processes)
    places = ("stage", "pipeline", *["rank"] * has_ranks)
    table = TerminalTable([*places, "state", "step", "generation", "restarts"], texts=("state",))
    for process in sorted(membership.processes, key=lambda process: (process.worker[::-1], process.rank)):
        (pipeline, stage), rank = process
        status = membership.statuses[process]
        identity = (stage, pipeline, *[rank] * has_ranks)
        restarts = max(0, status.member.incarnation)
        table.add_row(*map(str, identity), *_state(status, membership), str(restarts))
    return table


def _state(status: ProcessStatus, membership: Membership) -> tuple[str, str, str]:
    """Returns a process's state as a word, its iteration and its generation, with '-' if it has none."""
    word, generation = "killed" if status.is_dying else str(status.state), membership.generation
    word = word.ljust(max(map(len, ProcessState)))  # keeps the width of the table constant
    is_finishing = (
        generation is not None and generation.form.after is not None and status.member in generation.not_formed
    )
    if status.state is ProcessState.LIVE or (is_finishing and status.last_live == membership.last_live):
        return word, str(status.entered or "-"), str(status.last_live)
    return word, "-", str(membership.number) if status.state is ProcessState.FORMING else "-"


def goodput_table(goodput: Mapping[str, Any]) -> RenderableType:
    """Returns tables that show a run's time by cause and its recovery durations by phase.

    Args:
        goodput: result of ``Journal.goodput``.
    """
    time = TerminalTable(("time", "s", "%"), texts=("time",))
    for cause in (*CAUSES, "total"):
        spent_s = goodput[f"{cause}_s"]
        time.add_row(cause, f"{spent_s:,.1f}", f"{100 * spent_s / max(goodput['total_s'], 1e-9):.1f}")
    if not goodput["num_recoveries"]:
        return time
    phases = f"recovery, of {goodput['num_recoveries']}"
    recoveries = TerminalTable((phases, "median (s)", "maximum (s)"), texts=(phases,))
    whole = {"median_s": goodput["recovery_median_s"], "max_s": goodput["recovery_max_s"]}
    for phase, over in [*goodput["recovery_phases"].items(), ("total", whole)]:
        recoveries.add_row(phase.replace("_", " "), f"{over['median_s']:.2f}", f"{over['max_s']:.2f}")
    return Group(time, recoveries)


class BackgroundCalls:
    """Runs calls in a thread, in the order in which they are requested; a context manager.

    Args:
        max_waiting: maximum number of waiting calls; if more are requested, callers block, to bound the memory.
    """

    def __init__(self, max_waiting: int = _MAX_WAITING):
        self._calls: Queue[Callable[[], Any]] = Queue(max_waiting)
        self._error: BaseException | None = None
        start_thread(self._work, name="background")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._calls.join()
        if kind is None:
            self.raise_failed()

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Requests a call; raises the error of an earlier call if one failed."""
        self.raise_failed()
        self._calls.put(lambda: function(*arguments, **named))

    def settle(self) -> None:
        """Waits until all requested calls are done; raises the error of a call if one failed."""
        self._calls.join()
        self.raise_failed()

    def raise_failed(self) -> None:
        """Raises the error of an earlier call, if one failed."""
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                if self._error is None:  # after an error, write no more: a file must not lack a line in the middle
                    call()
            except BaseException as error:  # even SystemExit: if this thread ended, callers would wait forever
                self._error = error
            finally:
                self._calls.task_done()


class Reporter:
    """Writes the metrics and events of a run while its processes run, as their only writer.

    Args:
        journal: journal of the run.
        display: display of the run.
        directory: open run directory.
        background: runs the calls that write, in order, in its thread.
        written: last iteration whose metrics are in the file, or are about to be.

    Attributes:
        on_file: last iteration whose metrics are in the file.
    """

    def __init__(
        self, journal: Journal, display: Display, directory: RunDirectory, background: BackgroundCalls, written: int
    ):
        self._journal, self._display, self._directory, self.written = journal, display, directory, written
        self._background, self.on_file = background, written
        self._planned = 0  # newest generation whose plan is written

    def on(self, event: Event, before: Membership, after: Membership, commands: Sequence[Command]) -> None:
        """Writes the journal entries for an event that was reported to the membership."""
        self._write(self._journal.on(event, before, after, commands))

    def fault_injected(self, process: Process, kind: str, time: float) -> None:
        """Writes the entry for a fault that is injected into a process.

        Args:
            process: process with the fault.
            kind: ``kill``, ``freeze`` or ``hang``.
            time: time of the injection, in seconds.
        """
        if kind == "kill":
            self._write(self._journal.kill_injected(process, time))
        else:
            self.note(kind, self.written, f"process {process} is made to {kind}", process=str(process))

    def record(self, record: dict[str, Any]) -> None:
        """Writes the metrics of an iteration, unless they were written before."""
        self._journal.record(record["step"])
        if record["step"] > self.written:
            if record["step"] > self.written + 1:
                missing = range(self.written + 1, record["step"])
                text = f"iterations without a record: {ranges_text([missing])}; the members died before reporting them"
                self.note("records_missing", self.written, text, first=missing[0], last=missing[-1])
            self.written = record["step"]
            self._background.call(self._log_step, record)
            self._background.call(self._display.record, record)

    def _log_step(self, record: dict[str, Any]) -> None:
        """Writes the metrics of an iteration to the file; runs in the background thread."""
        self._directory.log_step(record)
        self.on_file = record["step"]

    def plan(self, number: int, facts: dict[str, Any]) -> None:
        """Writes the plan of a generation, only once although several members report it."""
        if number > self._planned:
            self._planned = number
            self.note("plan", self.written, None, generation=number, **facts)

    def note(self, event: str, step: int, text: str | None, **fields: Any) -> None:
        """Writes any other event, and shows ``text`` on the terminal unless it is None."""
        self._write([JournalEntry(event, step, fields, text)])

    def show_line(self, text: str) -> None:
        """Shows a line on the terminal only."""
        self._background.call(self._display.note, text, time.monotonic())

    def show(self, membership: Membership) -> None:
        """Shows the current state of each process."""
        self._display.update(membership, time.monotonic())

    def saved(self, newest: int | None) -> None:
        """Sets the iteration of the newest checkpoint, whose age is shown; None if there is none yet."""
        self._display.saved(newest)

    def goodput(self) -> dict[str, Any]:
        """Returns the run's time so far by cause, with recovery statistics; see ``Journal.goodput``."""
        return self._journal.goodput(time.monotonic())

    def check(self) -> None:
        """Raises RunError if the run directory is known to belong to another run; accesses no file."""
        self._directory.check(may_look=False)

    def raise_failed(self) -> None:
        """Raises the error of an earlier write, if one failed."""
        self._background.raise_failed()

    def _write(self, notes: Sequence[JournalEntry]) -> None:
        for note in notes:
            self._background.call(self._directory.log_event, note.event, note.step, **note.fields)
            if note.text is not None:
                self._background.call(self._display.note, note.text, time.monotonic())
