"""The progress of a run: a live display on a terminal, a few plain lines in a log. No JAX here."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swift.errors import printable
from swift.train.display.step_timer import StepTimer, format_duration
from swift.train.display.terminal import Terminal

MAX_TITLE, MAX_WIDTH = 24, 100


@dataclass(frozen=True)
class Series:
    """The position of a run in a series of runs.

    Attributes:
        number: number of the run, from 1.
        count: number of runs.
        steps_after: iterations of all later runs together.
    """

    number: int
    count: int
    steps_after: int

    @property
    def is_last(self) -> bool:
        """Whether nothing is left to run after this one."""
        return self.steps_after == 0


class ProgressDisplay:
    """Display of a run's progress on stderr, which leaves stdout clean; a context manager.

    On a terminal a bar and the newest metrics are redrawn in place. Elsewhere a plain line is printed after the first
    step, about every 10 % of the steps, and after the last one; ``log_every`` prints such lines on a terminal, too.
    The terminal is restored however the block is left.

    Args:
        title: title, such as the name of the experiment.
        num_steps: last step of the run.
        first_step: next step, from 1; above 1 in a resumed run.
        console: console to write to; stderr unless given.
        log_every: iterations between two plain lines; None: see above.
        series: position of the run in a series, shown in the title and the time left; None: it is alone.
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
        self._terminal.is_transient = kind is not None and not self._metrics  # then only the line of the error stays
        self._terminal.__exit__(kind, error, traceback)

    def stage(self, text: str, is_sound: bool = False) -> None:
        """Shows what the run does before its first step, and on a terminal for how long.

        Args:
            text: such as ``reads the data``.
            is_sound: whether all settings are checked. Until then a log gets no line, so that a wrong setting leaves
                only the line of its error.
        """
        self._stage, self._stage_began = text, time.monotonic()
        if is_sound and not self._terminal.is_live:
            self.note(f"{self._title}: {text}")

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Shows the newest step.

        Args:
            metrics: as in ``metrics.jsonl``: ``step``, and of ``loss``, ``tokens_per_s``, ``mfu``, ``drop_share`` and
                ``load_imbalance`` those that are known; for a pipeline ``live_workers``, ``bubble_share`` and
                ``period_ratio``: the planned period over that without failures.
        """
        self._step, self._metrics = int(metrics["step"]), metrics
        is_due = self._timer.passed(self._step, time.monotonic())
        if is_due and (self._is_lined or not self._terminal.is_live):
            parts = [f"{self._title}: step {self._counter()}", *describe(metrics), self._saved(), self._time_left()]
            self.note("  ".join(part for part in parts if part))

    def saved(self, newest: int | None) -> None:
        """Sets the step of the newest checkpoint, whose age is shown from the next step on; None: no checkpoint yet."""
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
    """Draws a bar with the counter and the time left, and below it a line on the newest iteration.

    Args:
        title: title of the run.
        step: iterations done.
        num_steps: last step of the run.
        left: text on the time left; empty if unknown.
        parts: short texts on the newest iteration; empty ones are left out.
    """
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(max_width=MAX_TITLE)  # the column that gives way in a narrow terminal
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True)
    bar = ProgressBar(total=num_steps, completed=step)
    line.add_row(
        Text(title, style="bold", no_wrap=True, overflow="ellipsis"), bar, Text(f"{step:,}/{num_steps:,}"), Text(left)
    )
    texts = list(filter(None, parts)) or ["waiting for the first step, which compiles"]
    return Constrain(Group(line, _Whole(texts)), MAX_WIDTH)


class _Whole:
    """Short texts in a line, or in several where one has no room: none is cut or broken that fits."""

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
    """Formats the metrics that people watch, each as a short text; missing ones are left out."""
    formats = {
        "loss": lambda value: f"loss {value:.3f}",
        "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
        "mfu": lambda value: f"MFU {100 * value:.1f} %",
        "input_ms": lambda value: input_text(value, metrics.get("step_ms")),
        "drop_share": lambda value: f"{100 * value:.1f} % dropped",
        "load_imbalance": lambda value: f"imbalance {value:.2f}",
        "bubble_share": lambda value: f"{metrics['live_workers']} workers live, bubble {100 * value:.0f} %",
        "period_ratio": lambda value: f"period {value:.2f} x",
    }
    return list(filter(None, (show(metrics[name]) for name, show in formats.items() if metrics.get(name) is not None)))


def input_text(input_ms: float, step_ms: float | None) -> str:
    """Formats the share of an iteration in which batches are read; empty where it is no more than 1 %.

    >>> input_text(30.0, 200.0), input_text(1.0, 200.0)
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
