"""Progress display of a run: a live bar on a terminal, a few plain lines in a log. Does not import JAX.

``ProgressDisplay`` shows a run on a ``Terminal``, which is redrawn in place even while libraries write to stderr.
``StepTimer`` estimates the remaining time, and decides which iterations get a line in a log. Separate functions format
the texts about the newest iteration and checkpoint, for use by other displays.
"""

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swift.errors import printable
from swift.output import end_patient, patient_stream

_NUM_PLAIN_LINES = 10
"""Approximate number of lines in the log of a whole run."""
_NUM_TIMED_UPDATES = 50
"""Number of latest iterations from which the remaining time is estimated."""
_LAST_S = 1.0
"""Seconds to wait for a slow reader of stderr to read the last lines."""
_MAX_TITLE, _MAX_WIDTH = 24, 100
"""Maximum widths of the title and of the whole display, in columns."""


@dataclass(frozen=True)
class Series:
    """A run's position in a series of runs.

    Attributes:
        number: number of the run, from 1.
        count: number of runs.
        steps_after: total number of iterations in all later runs.
    """

    number: int
    count: int
    steps_after: int

    @property
    def is_last(self) -> bool:
        """Whether no run of the series is left after this one."""
        return self.steps_after == 0


class ProgressDisplay:
    """Shows a run's progress on stderr, so that stdout stays clean; a context manager.

    On a terminal, a bar and the newest metrics are redrawn in place. Elsewhere, a plain line is printed after the first
    step, about every 10 % of the steps, and after the last one. With ``log_every``, plain lines are also printed on a
    terminal. The terminal is always restored at the end of the block.

    Args:
        title: title, such as the name of the experiment.
        num_steps: last step of the run.
        first_step: next step, from 1; above 1 in a resumed run.
        console: console to write to; None for stderr.
        log_every: iterations between plain lines; None for the default described above.
        series: position of the run in a series, shown in the title and the remaining time; None for a single run.
    """

    def __init__(
        self,
        title: str,
        num_steps: int,
        first_step: int,
        console: Console | None = None,
        *,
        log_every: int | None = None,
        series: Series | None = None,
    ):
        self._title = printable(title if series is None else f"{title} ({series.number} of {series.count})")
        self._num_steps, self._step = num_steps, first_step - 1
        self._terminal = Terminal(self._draw, console)
        self._timer, self._series, self._is_lined = StepTimer(num_steps, log_every), series, log_every is not None
        self._metrics: Mapping[str, Any] = {}
        self._shows_saved = False
        self._newest: int | None = None
        self._stage, self._stage_began = "waiting for the first step", math.nan

    def __enter__(self) -> Self:
        self._terminal.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._terminal.is_transient = kind is not None and not self._metrics  # then only the error message remains
        self._terminal.__exit__(kind, error, traceback)

    def stage(self, text: str, is_sound: bool = False) -> None:
        """Shows the current activity before the first step and, on a terminal, its elapsed time.

        Args:
            text: name of the activity, such as ``reading the data``.
            is_sound: whether all settings have been checked. Until then, no line is printed to a log, so that an
                invalid setting results in only the error message.
        """
        self._stage, self._stage_began = text, time.monotonic()
        if is_sound and not self._terminal.is_live:
            self.note(f"{self._title}: {text}")

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Shows the newest step.

        Args:
            metrics: ``step`` and any of ``loss``, ``tokens_per_s``, ``mfu``, ``drop_fraction`` and ``load_imbalance``,
                as in ``metrics.jsonl``; for a pipeline, also ``live_workers``, ``bubble_share`` and ``period_ratio``,
                which is the planned period relative to a period without failures.
        """
        self._step, self._metrics = int(metrics["step"]), metrics
        is_due = self._timer.passed(self._step, time.monotonic())
        if is_due and (self._is_lined or not self._terminal.is_live):
            parts = [f"{self._title}: step {self._counter()}", *describe(metrics), self._saved(), self._time_left()]
            self.note("  ".join(part for part in parts if part))

    def saved(self, newest: int | None) -> None:
        """Sets the step of the newest checkpoint, whose age is shown from the next step on; None if there is none."""
        self._shows_saved, self._newest = True, newest

    def note(self, text: str) -> None:
        """Prints a permanent line above the live display."""
        self._terminal.print(text)

    def _saved(self) -> str:
        return saved_text(self._step, self._newest) if self._shows_saved else ""

    def _counter(self) -> str:
        return f"{self._step:,}/{self._num_steps:,}"

    def _time_left(self) -> str:
        left = self._timer.left()
        if not left or self._series is None or not self._series.steps_after:
            return left
        seconds = self._timer.seconds_left(self._series.steps_after)
        return f"{left}, {format_duration(seconds or 0)} in all"

    def _draw(self) -> RenderableType:
        waited_s = time.monotonic() - self._stage_began
        stage = self._stage if math.isnan(waited_s) else f"{self._stage} ({waited_s:.0f} s)"
        parts = [self._saved(), *describe(self._metrics)] if self._metrics else [stage]
        return progress_lines(self._title, self._step, self._num_steps, self._time_left(), parts)


def progress_lines(title: str, step: int, num_steps: int, left: str, parts: Sequence[str]) -> RenderableType:
    """Draws a bar with the step counter and the remaining time, and below it a line about the newest iteration.

    Args:
        title: title of the run.
        step: iterations done.
        num_steps: last step of the run.
        left: text that states the remaining time; empty if unknown.
        parts: short texts about the newest iteration; empty texts are omitted.
    """
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(max_width=_MAX_TITLE)  # the only column that shrinks in a narrow terminal
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True)
    bar = ProgressBar(total=num_steps, completed=step)
    line.add_row(
        Text(title, style="bold", no_wrap=True, overflow="ellipsis"), bar, Text(f"{step:,}/{num_steps:,}"), Text(left)
    )
    texts = list(filter(None, parts)) or ["waiting for the first step, which compiles"]
    return Constrain(Group(line, _Whole(texts)), _MAX_WIDTH)


class _Whole:
    """Short texts on as few lines as possible; lines are broken only between texts."""

    def __init__(self, texts: Sequence[str]):
        self._texts = texts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for text in self._texts:
            longer = f"{line}  {text}" if line else text
            if line and cell_len(longer) > options.max_width:
                yield Text(line)
                longer = text
            line = longer
        yield Text(line)


def describe(metrics: Mapping[str, Any]) -> list[str]:
    """Formats the metrics to show during a run, each as a short text; missing metrics are omitted."""
    formats = {
        "loss": lambda value: f"loss {value:.3f}",
        "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
        "mfu": lambda value: f"MFU {100 * value:.1f} %",
        "input_ms": lambda value: _input_text(value, metrics.get("step_ms")),
        "drop_fraction": lambda value: f"{100 * value:.1f} % dropped",
        "load_imbalance": lambda value: f"imbalance {value:.2f}",
        "bubble_share": lambda value: f"{_live_text(metrics.get('live_workers'))}bubble {100 * value:.0f} %",
        "period_ratio": lambda value: f"period {value:.2f} x",
    }
    return list(filter(None, (show(metrics[name]) for name, show in formats.items() if metrics.get(name) is not None)))


def _live_text(live_workers: int | None) -> str:
    return "" if live_workers is None else f"{live_workers} workers live, "


def _input_text(input_ms: float, step_ms: float | None) -> str:
    """Formats the share of an iteration that is spent reading batches; empty if it is at most 1 %.

    >>> _input_text(30.0, 200.0), _input_text(1.0, 200.0)
    ('input 15 %', '')
    """
    return f"input {100 * input_ms / step_ms:.0f} %" if step_ms and input_ms > 0.01 * step_ms else ""


def saved_text(step: int, newest: int | None) -> str:
    """Formats the age of the newest checkpoint.

    >>> saved_text(7, None), saved_text(8, 8), saved_text(20, 8)
    ('no checkpoint yet', 'checkpoint of this iteration', 'checkpoint 12 iterations old')
    """
    if newest is None:
        return "no checkpoint yet"
    age = step - newest
    return f"checkpoint {age:,} iteration{'s' * (age > 1)} old" if age > 0 else "checkpoint of this iteration"


class StepTimer:
    """Estimates the remaining time from the latest iterations, and decides which iterations get a line in the log.

    Args:
        num_steps: last step of the run.
        log_every: iterations between lines of a log; None for a line about every 10 % of the run.
    """

    def __init__(self, num_steps: int, log_every: int | None = None):
        self._num_steps, self._log_every, self._num_lines = num_steps, log_every, 0
        self._timed: deque[tuple[int, float]] = deque(maxlen=_NUM_TIMED_UPDATES)

    def passed(self, step: int, time: float) -> bool:
        """Records the end of an iteration; returns whether the log gets a line for it.

        Args:
            step: number of the iteration, from 1.
            time: time at its end, in seconds on any monotonic clock.
        """
        is_first = not self._timed
        self._timed.append((step, time))
        num_due = step * _NUM_PLAIN_LINES // self._num_steps if self._log_every is None else step // self._log_every
        if is_first or step == self._num_steps or num_due > self._num_lines:
            self._num_lines = num_due
            return True
        return False

    def seconds_left(self, more_steps: int = 0) -> float | None:
        """Estimates the remaining time in seconds from the latest steps; returns None if there are not enough steps.

        The first step is ignored, since it includes compilation.

        Args:
            more_steps: number of steps in later runs to include.
        """
        if not self._timed:
            return None
        (first_step, start), (last_step, end) = self._timed[0], self._timed[-1]
        if last_step == first_step:
            return None
        return (end - start) / (last_step - first_step) * (self._num_steps - last_step + more_steps)

    def left(self) -> str:
        """Formats the remaining time of this run; empty if unknown."""
        seconds = self.seconds_left()
        return "" if seconds is None else f"{format_duration(seconds)} left"


def format_duration(seconds: float) -> str:
    """Formats a duration as h:mm:ss, or m:ss under an hour."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


class Terminal:
    """A display that is redrawn in place below permanent lines; if stderr is not a terminal, only lines are printed.

    A context manager that restores the terminal at the end of the block.

    Attributes:
        is_live: whether the display is shown.
        is_transient: whether the display disappears at the end of the block; otherwise its last state remains.

    Args:
        draw: function that draws the display.
        console: console to write to; None for stderr.
        redraws_per_s: number of redraws per second.
        catches_stderr: whether lines that libraries write directly to file descriptor 2 are printed above the display.
            Do not use it in a process that may abort, whose final messages would be lost.
    """

    def __init__(
        self,
        draw: Callable[[], RenderableType],
        console: Console | None = None,
        redraws_per_s: float = 4,
        *,
        catches_stderr: bool = False,
    ):
        self._draw, self._rate = draw, redraws_per_s
        self._catches = catches_stderr
        self._console = console or Console(stderr=True)
        self.is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self.is_transient = False
        self._live: Live | None = None
        self._caught: _CaughtStderr | None = None

    def print(self, text: str) -> None:
        """Prints a permanent line."""
        self._console.print(Text(text), soft_wrap=True, highlight=False)

    def __enter__(self) -> Self:
        if not self.is_live:
            return self
        if self._catches:
            with suppress(OSError):  # stderr is closed
                self._caught = _CaughtStderr(self.print)
                # Rich takes the width from the standard streams, but stderr is a pipe now.
                width = None if os.isatty(0) or os.isatty(1) else self._console.width
                self._console = Console(file=self._caught.original, force_terminal=True, width=width)
                self._caught.begin()
        # By default, Rich redirects stdout to this console, and thus to stderr.
        self._live = Live(
            get_renderable=self._draw,
            console=self._console,
            redirect_stdout=False,
            refresh_per_second=self._rate,
        )
        self._live.start()
        self._console.show_cursor()  # a killed process could not restore a hidden cursor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            if self._caught:
                self._caught.end()  # first, so that its last lines appear above the display
            self._live.transient = self.is_transient
            self._live.stop()
            self._live = None
        if self._caught:
            self._console = Console(stderr=True)
            self._caught.close()
            self._caught = None


class _CaughtStderr:
    """Redirects file descriptor 2, and passes its lines to a function.

    Attributes:
        original: stream to the previous target of stderr.
    """

    def __init__(self, tell: Callable[[str], None]):
        sys.stderr.flush()
        self.original = patient_stream(os.dup(2))
        self._tell = tell

    def begin(self) -> None:
        """Starts to redirect stderr; the function that receives the lines must not write to stderr itself."""
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(writer)
        self._thread = threading.Thread(target=self._follow, args=(reader,), name="stderr", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Restores stderr, after all its lines have been passed on."""
        os.dup2(self.original.fileno(), 2)  # closes the last writer, so that the thread ends
        self._thread.join(timeout=1)  # a child process may still hold the pipe open

    def close(self) -> None:
        """Closes the original stream, unless it is still waiting for its reader."""
        if end_patient(self.original, _LAST_S):
            os.close(self.original.fileno())

    def _follow(self, reader: int) -> None:
        with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._tell(line.rstrip("\n"))
