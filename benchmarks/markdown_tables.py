"""Markdown tables of figures."""

from collections.abc import Iterable
from typing import Any


def markdown(heading: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Formats a Markdown table."""
    cells = list(heading)
    lines = [cells, ["---"] * len(cells), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def percent(share: float | None) -> str:
    """Formats a share as a percentage with one digit."""
    return "-" if share is None else f"{100 * share:.1f} %"


_SETTINGS = {"swift": "reroute, the default", "recycle": "reassign", "adapt": "auto"}
"""Values of ``Experiment.adapt`` that strategies of ``swift simulate`` model."""


def titled(strategy: str) -> str:
    """Returns the name of a strategy, with the matching value of ``Experiment.adapt`` if there is one."""
    return f"{strategy} ({_SETTINGS[strategy]})" if strategy in _SETTINGS else strategy


def by_strategy(heading: list[str], rows: list[tuple[list[Any], dict[str, float | None]]]) -> str:
    """Formats a table whose rows have leading cells, then one ratio per strategy."""
    names = list(dict.fromkeys(name for _, ratios in rows for name in ratios))

    def cell(ratio: float | None) -> str:
        return "cannot run" if ratio is None else f"{ratio:.3f}"

    titles = [*heading, *map(titled, names)]
    return markdown(titles, ([*cells, *(cell(ratios.get(of)) for of in names)] for cells, ratios in rows))
