"""Draws expert ranks' loads, with one panel per layer, and simulations.

A simulation is drawn from its JSON document alone, with its goodput over time and the time by cause.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from swift.draw.charts import draw_bars, new_figure, put_legend, put_title
from swift.draw.style import INK, POLICY_COLORS, STRATEGY_COLORS, colors_of, figure_file

_MOST_LAYERS = 24


def rank_loads_file(loads: Mapping[str, Float[np.ndarray, "L N"]], suffix: Literal["svg", "png"] = "svg") -> bytes:
    """Draws each rank's load relative to the mean, in descending order, and returns the content of a file.

    Args:
        loads: loads of the ranks, by name of a policy or token split.
        suffix: format of the file.
    """
    num_layers = min(len(next(iter(loads.values()))), _MOST_LAYERS)
    colors = {name: POLICY_COLORS.get(name, INK) for name in loads}
    figure, panels = new_figure(height=0.9 + 1.7 * num_layers, num_rows=num_layers)
    for layer, axes in enumerate(panels):
        for name, load_LN in loads.items():
            load_N = np.sort(load_LN[layer])[::-1]
            edges = np.arange(load_N.size + 1)
            axes.stairs(load_N / (load_N.mean() or 1), edges, baseline=None, color=colors[name], linewidth=1.8)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("load / mean")
        put_title(axes, f"layer {layer}")
    panels[-1].set_xlabel("ranks, the fullest first")
    put_legend(figure, list(colors.items()))
    return figure_file(figure, suffix)


def draw_simulation(facts: Mapping[str, Any]) -> Figure:
    """Draws goodput over time, one line per strategy, above bars that show where each strategy's time went.

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
    """Draws a simulation with ``draw_simulation`` and returns the content of a file in this format."""
    return figure_file(draw_simulation(facts), suffix)


def _draw_goodput(
    axes: Axes, hours: Sequence[float], rows: Sequence[Mapping[str, Any]], color_of: Mapping[str, str]
) -> None:
    """Draws each strategy's goodput as a line of moving averages over faint raw values."""
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
    """Computes the centered moving mean over about a tenth of the bins; the window is truncated at the ends."""
    window = np.ones(max(1, len(values_B) // 10) | 1)
    sums, numbers = (np.convolve(ones_B, window) for ones_B in (values_B, np.ones(len(values_B))))
    half = len(window) // 2
    return (sums / numbers)[half : half + len(values_B)]
