"""A picture of a simulation, drawn from its JSON document alone: goodput over time, and where all the time went."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from swift.report.draw import FONT_SIZE, GROUND, INK, new_figure, put_legend, put_title
from swift.report.figures import DPI, RUN_COLORS

CAUSE_COLORS = {
    "useful": "#009e73",
    "slowdown": "#a6d9c7",
    "saving": "#56b4e9",
    "detection": "#8c6d00",
    "reconfiguration": "#d55e00",
    "lost": "#cc79a7",
    "waiting": "#bbbbbb",
    "out_of_memory": "#333333",
}
_IDEAL = "#999999"
_COLORS = (*RUN_COLORS, "#7f3b08")
"""Of the strategies but for the ideal."""


def draw_simulation(facts: Mapping[str, Any]) -> Figure:
    """Draws goodput over time, a line for each strategy, over bars of where the time of each went.

    Args:
        facts: the document of ``swift simulate --format json``.
    """
    rows = facts["strategies"]
    figure, (lines, bars) = new_figure(height=4.6 + 0.3 * len(rows), num_rows=2, shares_x=False)
    others = [row["name"] for row in rows if row["name"] != "ideal"]
    color_of = {"ideal": _IDEAL, **{name: _COLORS[index % len(_COLORS)] for index, name in enumerate(others)}}
    _draw_goodput(lines, facts["hours"], rows, color_of)
    _draw_causes(bars, rows)
    put_legend(figure, [(row["name"], color_of[row["name"]]) for row in rows if row["spent_s"]])
    return figure


def simulation_file(facts: Mapping[str, Any], suffix: Literal["svg", "png"] = "svg") -> bytes:
    """The picture as a file's content, the same for the same document."""
    file = io.BytesIO()
    # Else the names of an SVG's parts are random, and it bears the time of day.
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


def _draw_causes(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for y, row in enumerate(rows):
        if row["spent_s"] is None:
            axes.text(1.0, y, "out of memory", va="center", fontsize=FONT_SIZE - 1, color=INK)
            continue
        left, total = 0.0, sum(row["spent_s"].values())
        for cause, seconds in row["spent_s"].items():
            share = 100 * seconds / total
            axes.barh(y, share, left=left, color=CAUSE_COLORS[cause], edgecolor=GROUND, linewidth=0.4, height=0.7)
            left += share
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the time (%)")
    seen = [cause for cause in CAUSE_COLORS if any(row["spent_s"] and row["spent_s"][cause] > 0 for row in rows)]
    handles = [Patch(facecolor=CAUSE_COLORS[cause], label=cause.replace("_", " ")) for cause in seen]
    legend = axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, frameon=False, fontsize=FONT_SIZE - 1
    )
    for text in legend.get_texts():
        text.set_color(INK)
