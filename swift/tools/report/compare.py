"""Several runs side by side, in numbers: what the paper's tables compare."""

from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from swift.runlog import Run, measure

COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "name": ("run", str),
    "placement": ("placement", str),
    "final_loss": ("final loss", "{:.3f}".format),
    "dropped_percent": ("tokens dropped (%)", "{:.2f}".format),
    "steps_to_target": ("steps to target", "{:,}".format),
    "median_step_ms": ("median step (ms)", "{:,.1f}".format),
    "validation_loss": ("validation loss", "{:.3f}".format),
}
"""The columns of a comparison: the heading of each, and how a value is shown."""


def comparison_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per run.

    Returns:
        for each run its ``name``, unique among the runs, its ``placement`` policy, and what
        :func:`swift.runlog.measure` says of it.

    Raises:
        SettingError: the metrics of a run are damaged.
    """
    rows = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        summary = run.summary or {}
        facts = {"name": label, "placement": summary.get("placement")}
        rows.append(facts | measure(run, summary.get("target_loss")))
    return rows


def comparison_table(runs: Sequence[Run]) -> Table:
    """The rows of :func:`comparison_rows` for a terminal; '-' where there is no value."""
    table = Table(box=box.SIMPLE_HEAD)
    for key, (heading, _) in COLUMNS.items():
        justify: JustifyMethod = "left" if key in ("name", "placement") else "right"
        table.add_column(heading, justify=justify, overflow="fold", min_width=max(map(len, heading.split())))
    for row in comparison_rows(runs):
        table.add_row(*(Text(cell) for cell in cells(row)))
    return table


def cells(row: dict[str, Any]) -> list[str]:
    """A row of :func:`comparison_rows` as texts, in the order of ``COLUMNS``."""
    return ["-" if row[key] is None else show(row[key]) for key, (_, show) in COLUMNS.items()]


def run_labels(runs: Sequence[Run]) -> list[str]:
    """The runs' names; where several have one name, with their directories."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({run.path})" for run, name in zip(runs, names, strict=True)]
