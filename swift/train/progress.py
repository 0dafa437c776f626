"""The progress of a run: a live display on a terminal, a few plain lines in a log. No JAX here."""

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

NUM_PLAIN_LINES = 10
NUM_TIMED_UPDATES = 50
MAX_TITLE, MAX_WIDTH = 24, 100


class ProgressDisplay:
    """Display of a run's progress on stderr, which leaves stdout clean; a context manager.

    On a terminal a bar and the newest metrics are redrawn in place; elsewhere a plain line is printed after the first
    step, about every 10 % of the steps, and after the last one. The terminal is restored however the block is left.

    Args:
        title: title, such as the name of the experiment.
        num_steps: last step of the run.
        first_step: next step, from 1; above 1 in a resumed run.
        console: console to write to; stderr unless given.
    """

    def __init__(self, title: str, num_steps: int, first_step: int, console: Console | None = None):
        self._title, self._num_steps, self._step = title, num_steps, first_step - 1
        self._console = console or Console(stderr=True)
        self._num_lines = 0
        self._metrics: Mapping[str, Any] = {}
        self._shows_saved = False
        self._newest: int | None = None
        self._updates: deque[tuple[int, float]] = deque(maxlen=NUM_TIMED_UPDATES)
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # With stdout redirected, its text would go to stderr.
            self._live = Live(get_renderable=self._draw, console=self._console, redirect_stdout=False)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Shows the newest step.

        Args:
            metrics: as in ``metrics.jsonl``: ``step``, and of ``loss``, ``tokens_per_s``, ``drop_share`` and
                ``load_imbalance`` those that are known; for a pipeline ``live_workers``, ``bubble_share`` and
                ``period_ratio``: the planned period over that without failures.
        """
        num_lines_due = int(metrics["step"]) * NUM_PLAIN_LINES // self._num_steps
        is_first = not self._updates
        self._step, self._metrics = int(metrics["step"]), metrics
        self._updates.append((self._step, time.monotonic()))
        if self._live is None and (is_first or num_lines_due > self._num_lines):
            self._num_lines = num_lines_due
            parts = [f"{self._title}: step {self._counter()}", *describe(metrics), self._saved(), self._time_left()]
            self._print("  ".join(part for part in parts if part))

    def saved(self, newest: int | None) -> None:
        """Sets the step of the newest checkpoint, whose age is shown from the next step on; None: there is none yet."""
        self._shows_saved, self._newest = True, newest

    def note(self, text: str) -> None:
        """Prints a permanent line above the live display."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True, highlight=False)

    def _saved(self) -> str:
        return saved_text(self._step, self._newest) if self._shows_saved else ""

    def _counter(self) -> str:
        return f"{self._step:,}/{self._num_steps:,}"

    def _time_left(self) -> str:
        """Estimates the remaining time from the latest steps without the first, which compiles."""
        if len(self._updates) < 2:
            return ""
        (first_step, start), (last_step, end) = self._updates[0], self._updates[-1]
        seconds = (end - start) / (last_step - first_step) * (self._num_steps - last_step)
        return f"{format_duration(seconds)} left"

    def _draw(self) -> RenderableType:
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True, max_width=MAX_TITLE, overflow="ellipsis")
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True)
        bar = ProgressBar(total=self._num_steps, completed=self._step)
        line.add_row(Text(self._title, style="bold"), bar, Text(self._counter()), Text(self._time_left()))
        metrics = "waiting for the first step, which compiles"
        if self._updates:
            metrics = "  ".join(part for part in (self._saved(), *describe(self._metrics)) if part)
        return Constrain(Group(line, Text(metrics, no_wrap=True, overflow="ellipsis")), MAX_WIDTH)


def describe(metrics: Mapping[str, Any]) -> list[str]:
    """Formats the metrics that a reader watches, each as a short text; missing ones are left out."""
    formats = {
        "loss": lambda value: f"loss {value:.3f}",
        "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
        "drop_share": lambda value: f"{100 * value:.1f} % dropped",
        "load_imbalance": lambda value: f"imbalance {value:.2f}",
        "bubble_share": lambda value: f"{metrics['live_workers']} workers live, bubble {100 * value:.0f} %",
        "period_ratio": lambda value: f"period {value:.2f} x",
    }
    return [show(metrics[name]) for name, show in formats.items() if metrics.get(name) is not None]


def saved_text(step: int, newest: int | None) -> str:
    """Formats the age of the newest checkpoint.

    >>> saved_text(7, None), saved_text(8, 8), saved_text(20, 8)
    ('no checkpoint yet', 'checkpoint of this iteration', 'checkpoint 12 iterations old')
    """
    if newest is None:
        return "no checkpoint yet"
    age = step - newest
    return f"checkpoint {age:,} iteration{'s' * (age > 1)} old" if age > 0 else "checkpoint of this iteration"


def format_duration(seconds: float) -> str:
    """Formats a duration as h:mm:ss, or m:ss under an hour."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"
