"""Picture of a simulation, drawn from its JSON document alone: goodput over time, and where the time went."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from swift.tools.report.sections.axes import DPI, draw_bars, new_figure, put_legend, put_title
from swift.tools.report.sections.palette import RUN_COLORS

_IDEAL = "#999999"
_COLORS = (*RUN_COLORS, "#7f3b08")
"""Colours of the strategies other than the ideal."""


def draw_simulation(facts: Mapping[str, Any]) -> Figure:
    """Draws goodput over time, a line for each strategy, above bars of where the time of each went.

    Args:
        facts: JSON document of ``swift simulate --format json``.
    """
    rows = facts["strategies"]
    figure, (lines, bars) = new_figure(height=4.6 + 0.3 * len(rows), num_rows=2, shares_x=False, width=6.0)
    others = [row["name"] for row in rows if row["name"] != "ideal"]
    color_of = {"ideal": _IDEAL, **{name: _COLORS[index % len(_COLORS)] for index, name in enumerate(others)}}
    _draw_goodput(lines, facts["hours"], rows, color_of)
    draw_bars(bars, [(row["name"], row["spent_s"] or "out of memory") for row in rows])
    put_legend(figure, [(row["name"], color_of[row["name"]]) for row in rows if row["spent_s"]])
    return figure


def simulation_file(facts: Mapping[str, Any], suffix: Literal["svg", "png"] = "svg") -> bytes:
    """Renders the picture as the content of a file, identical for identical documents."""
    file = io.BytesIO()
    # Otherwise the ids in an SVG are random, and it contains the current time.
    metadata = {"Date": None} if suffix == "svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "swift"}):
        draw_simulation(facts).savefig(file, format=suffix, dpi=DPI, metadata=metadata)
    return file.getvalue()


def _draw_goodput(
    axes: Axes, hours: Sequence[float], rows: Sequence[Mapping[str, Any]], color_of: Mapping[str, str]
) -> None:
    for row in rows:
        if row["goodput"] is not None:
            steps = axes.stairs(row["goodput"], hours, baseline=None, color=color_of[row["name"]], linewidth=1.4)
            steps.set_gid(f"goodput-{row['name']}")
    axes.set_ylim(0.0, 1.05)
    axes.set_ylabel("goodput")
    axes.set_xlabel("hours")
    put_title(axes, "iterations that are kept, over those without a failure")
