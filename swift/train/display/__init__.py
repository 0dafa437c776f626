"""Progress of a run, for people: a display on a terminal, lines in a log, and the time left."""

from swift.train.display.progress import ProgressDisplay, Series, describe, progress_lines, saved_text
from swift.train.display.reconfiguration_texts import (
    changed_names,
    changed_text,
    cost_text,
    rank_names,
    worker_names,
)
from swift.train.display.step_timer import StepTimer, format_duration
from swift.train.display.terminal import Terminal

__all__ = [
    "ProgressDisplay",
    "Series",
    "StepTimer",
    "Terminal",
    "changed_names",
    "changed_text",
    "cost_text",
    "describe",
    "format_duration",
    "progress_lines",
    "rank_names",
    "saved_text",
    "worker_names",
]
