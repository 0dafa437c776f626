"""Evaluation: questions with known answers, and what models make of them, in numbers that have intervals.

``tasks`` are the questions and ``task_files`` reads them; ``intervals`` are those of shares and of their differences;
``results`` holds what models answered, and ``documents`` keeps that in files. ``asking`` puts the questions to an
engine, and ``harness`` lets lm-eval do so.
"""

from swift.evaluate.documents import (
    DIRECTORY,
    document_of,
    read_evaluations,
    stored_evaluations,
    write_evaluations,
)
from swift.evaluate.intervals import Interval, difference_interval, share_interval
from swift.evaluate.results import Difference, Evaluation, Judgement, Score, differences
from swift.evaluate.task_files import TaskFile, read_tasks
from swift.evaluate.tasks import Completion, Question, Selection, is_match

__all__ = [
    "DIRECTORY",
    "Completion",
    "Difference",
    "Evaluation",
    "Interval",
    "Judgement",
    "Question",
    "Score",
    "Selection",
    "TaskFile",
    "difference_interval",
    "differences",
    "document_of",
    "is_match",
    "read_evaluations",
    "read_tasks",
    "share_interval",
    "stored_evaluations",
    "write_evaluations",
]
