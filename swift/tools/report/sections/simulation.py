"""Picture of a simulation, drawn from its JSON document alone: goodput over time, and where the time went."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from swift.tools.figure_file import figure_file
from swift.tools.palette import STRATEGY_COLORS, colors_of
from swift.tools.report.sections.axes import draw_bars, new_figure, put_legend, put_title


def draw_simulation(facts: Mapping[str, Any]) -> Figure:
    """Draws goodput over time, a line for each strategy, above bars of where the time of each went.

    Args:
        facts: JSON document of ``swift simulate --format json``.
    """
    rows = facts["strategies"]
    figure, (lines, bars) = new_figure(height=4.6 + 0.3 * len(rows), num_rows=2, shares_x=False, width=6.0)
    names = [row["name"] for row in rows]
    color_of = dict(zip(names, colors_of(names, STRATEGY_COLORS), strict=True))
    _draw_goodput(lines, facts["hours"], rows, color_of)
    draw_bars(bars, [(row["name"], row["spent_s"] or "out of memory") for row in rows])
    put_legend(figure, [(row["name"], color_of[row["name"]]) for row in rows if row["spent_s"]])
    return figure


def simulation_file(facts: Mapping[str, Any], suffix: Literal["svg", "png"] = "svg") -> bytes:
    """Renders the picture as the content of a file."""
    return figure_file(draw_simulation(facts), suffix)


def _draw_goodput(
    axes: Axes, hours: Sequence[float], rows: Sequence[Mapping[str, Any]], color_of: Mapping[str, str]
) -> None:
    """Draws moving averages as lines, over the faint values that they average."""
    drawn = [row for row in rows if row["goodput"] is not None]
    middles = (np.asarray(hours[1:]) + np.asarray(hours[:-1])) / 2
    lowest = 1.0
    for row in drawn:
        color = color_of[row["name"]]
        axes.stairs(row["goodput"], hours, baseline=None, color=color, linewidth=0.8, alpha=0.22)
        mean = _moving_mean(np.asarray(row["goodput"], float))
        style = "--" if row["name"] == "ideal" else "-"
        (line,) = axes.plot(middles, mean, color=color, linewidth=1.8, linestyle=style)
        line.set_gid(f"goodput-{row['name']}")
        lowest = min(lowest, float(mean.min()))
    axes.set_ylim(max(0.0, lowest - 0.05), 1.02)
    axes.set_xlim(hours[0], hours[-1])
    axes.set_ylabel("goodput")
    axes.set_xlabel("hours")
    put_title(axes, "iterations that are kept, over those without a failure; faint: each interval")


def _moving_mean(values_B: np.ndarray) -> np.ndarray:
    """Centred mean over a tenth of the bins; near the ends, over those that exist."""
    window = np.ones(max(1, len(values_B) // 10) | 1)
    sums, numbers = (np.convolve(ones_B, window) for ones_B in (values_B, np.ones(len(values_B))))
    half = len(window) // 2
    return (sums / numbers)[half : half + len(values_B)]
