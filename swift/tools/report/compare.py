"""Comparison of several runs in numbers, as in the paper's tables."""

from collections.abc import Callable, Sequence
from typing import Any

from swift.errors import SettingError, printable
from swift.runlog.analysis.measures import measure
from swift.runlog.reading import Run
from swift.terminal_table import TerminalTable

COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "name": ("run", str),
    "placement": ("placement", str),
    "final_loss": ("final loss (mean of last 10)", "{:.3f}".format),
    "dropped_percent": ("tokens dropped (%)", "{:.2f}".format),
    "steps_to_target": ("steps to target", "{:,}".format),
    "median_step_ms": ("median step (ms)", "{:,.1f}".format),
    "validation_loss": ("validation loss", "{:.3f}".format),
}
"""Columns of a comparison: (heading, function that formats a value) by key."""


def comparison_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Makes one row per run.

    Returns:
        For each run its ``name``, unique among the runs, its ``placement`` policy, and the measures of
        :func:`swift.runlog.measure`.

    Raises:
        SettingError: the metrics of a run are damaged.
    """
    rows = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        summary = run.summary or {}
        facts = {"name": label, "placement": policy_of(run)}
        rows.append(facts | measure(run, summary.get("target_loss")))
    return rows


def comparison_table(runs: Sequence[Run]) -> TerminalTable:
    """Makes a table of :func:`comparison_rows` for a terminal; '-' stands for a missing value."""
    table = TerminalTable([heading for heading, _ in COLUMNS.values()], texts=("run", "placement"))
    for row in comparison_rows(runs):
        table.add_row(*cells(row))
    return table


def cells(row: dict[str, Any]) -> list[str]:
    """Formats a row of :func:`comparison_rows`, in the order of ``COLUMNS``; control characters are escaped."""
    return ["-" if row[key] is None else printable(show(row[key])) for key, (_, show) in COLUMNS.items()]


def policy_of(run: Run) -> str | None:
    """Returns the name of a run's placement policy: from its summary, or from its configuration while it has none.

    A policy of the user's own is not imported; it goes by the name of its class. None if the run names no policy.
    """
    named = (run.summary or {}).get("placement")
    if isinstance(named, str):
        return named
    # Imported here, since these load JAX and the trainer, which a report on finished runs does not need.
    from swift.experts.placement.flexmoe import FlexMoE
    from swift.experts.placement.minmax import MinMax
    from swift.experts.placement.packed import Packed
    from swift.experts.placement.static import Static
    from swift.experts.placement.symi import Symi
    from swift.train.settings.stored_config import OF_RUN, StoredObject, UnreadableConfig, made, read_config

    policies = {kind.__name__: kind for kind in (FlexMoE, MinMax, Packed, Static, Symi)}
    try:
        part = read_config(run.path, OF_RUN).settings.get("placement")
        if not isinstance(part, StoredObject):
            return None
        own = None if part.module else policies.get(part.kind)
        return part.kind if own is None else made(part, lambda _: own).name
    except (UnreadableConfig, SettingError):
        return None


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Labels the runs by name, with their directories if several share a name; control characters are escaped."""
    names = [run.name for run in runs]
    return [
        printable(name if names.count(name) == 1 else f"{name} ({run.path})")
        for run, name in zip(runs, names, strict=True)
    ]
