"""The pictures themselves: Matplotlib's objects, never pyplot, so that nothing global is touched.

Shape suffixes: T steps, B bins of steps, L MoE layers, E expert classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from swift.record import ratio
from swift.report.palette import CAUSE_COLORS, CLASS_COLORS, GRID, GROUND, INK, MOMENT_COLORS
from swift.report.series import bin_steps, shares, smooth, thin

FONT_SIZE = 10.5
DPI = 160
MAX_LABEL = 40
LETTERS_PER_INCH = 12
MAX_LAYER_LABELS = 8


@dataclass(frozen=True)
class Curve:
    """One run's line in a picture of several runs: values_T, NaN where unknown, over steps_T."""

    label: str
    color: str
    steps_T: np.ndarray
    values_T: np.ndarray


def draw_curves(
    ylabel: str,
    curves: Sequence[Curve],
    rings: Sequence[Curve] = (),
    levels: Sequence[float] = (),
    top: float | None = None,
    marks: Sequence[int] = (),
) -> Figure:
    """Draws lines over the steps, raw values faint and smoothed ones strong.

    Args:
        ylabel: what is shown, and its unit.
        curves: the lines; the order of the legend.
        rings: values that only some steps have, drawn as rings.
        levels: target values, marked by dotted lines.
        top: the largest value that there can be, if there is one.
        marks: steps at which something failed, marked by triangles at the upper edge.
    """
    figure, (axes,) = new_figure(height=3.4)
    for curve in curves:
        points = thin(curve.values_T)
        axes.plot(curve.steps_T[points], curve.values_T[points], color=curve.color, alpha=0.22, linewidth=0.8)
    for curve in curves:
        smooth_T = smooth(curve.values_T)
        points = thin(smooth_T)
        marker = "o" if len(points) == 1 else None
        axes.plot(curve.steps_T[points], smooth_T[points], color=curve.color, linewidth=2.0, marker=marker)
    _draw_rings(axes, rings)
    _draw_levels(axes, levels)
    if marks:
        at = {"marker": "v", "markersize": 7, "linestyle": "none", "clip_on": False}
        axes.plot(marks, [1.0] * len(marks), transform=axes.get_xaxis_transform(), color=MOMENT_COLORS["failure"], **at)
    if top is not None:
        low = min(np.nanmin(curve.values_T) for curve in curves)
        axes.set_ylim(max(0.0, low - 0.06 * (top - low) - 0.2), top + 0.04 * (top - low) + 0.2)
    axes.set_ylabel(ylabel)
    axes.set_xlabel("step")
    put_legend(figure, [(curve.label, curve.color) for curve in curves])
    return figure


def _draw_rings(axes: Axes, rings: Sequence[Curve]) -> None:
    for curve in rings:
        known_T = np.isfinite(curve.values_T)
        axes.plot(
            curve.steps_T[known_T],
            curve.values_T[known_T],
            "o",
            markersize=5,
            markerfacecolor=GROUND,
            markeredgecolor=curve.color,
            markeredgewidth=1.4,
        )


def _draw_levels(axes: Axes, levels: Sequence[float]) -> None:
    for level in levels:
        axes.axhline(level, color=INK, linewidth=1.2, linestyle=":")
        right = (1.0, level)
        axes.annotate(
            f"target {level:g}",
            right,
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=FONT_SIZE - 1,
            color=INK,
        )


def draw_drops(steps_T: np.ndarray, dropped_TLE: np.ndarray, popularity_TLE: np.ndarray) -> Figure:
    """Draws the smoothed share of tokens that each MoE layer drops; deeper layers are greener."""
    num_layers = popularity_TLE.shape[1]
    drops_TL = 100 * ratio(dropped_TLE.sum(axis=-1), popularity_TLE.sum(axis=-1))
    colors = [colormaps["viridis"](0.3 + 0.55 * layer / max(1, num_layers - 1)) for layer in range(num_layers)]
    figure, (axes,) = new_figure(height=3.0)
    for layer, color in enumerate(colors):
        smooth_T = smooth(drops_TL[:, layer])
        points = thin(smooth_T)
        marker = "o" if len(points) == 1 else None
        axes.plot(steps_T[points], smooth_T[points], color=color, linewidth=1.6, marker=marker)
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("tokens dropped (%)")
    axes.set_xlabel("step")
    shown = sorted(set(np.linspace(0, num_layers - 1, min(num_layers, MAX_LAYER_LABELS)).astype(int).tolist()))
    put_legend(figure, [(f"layer {layer}", colors[layer]) for layer in shown])
    return figure


def draw_layer(layer: int, steps_T: np.ndarray, popularity_TE: np.ndarray, replicas_TE: np.ndarray) -> Figure:
    """Draws how the replicas of one MoE layer go with the popularity of its expert classes.

    Above, the classes whose share of tokens varies most, as lines: tokens thin, replicas thick. Below, all classes:
    a heat map of shares of tokens, and one of shares of replicas in the same colours.
    """
    tokens_BE, replicas_BE = (100 * shares(bin_steps(counts)) for counts in (popularity_TE, replicas_TE))
    figure, (lines, *maps) = new_figure(height=6.6, num_rows=3)
    put_title(lines, f"layer {layer}, the classes that vary most: tokens thin, replicas thick")
    _draw_classes(lines, np.linspace(steps_T[0], steps_T[-1], len(tokens_BE)), tokens_BE, replicas_BE)
    classes = _varying_classes(tokens_BE)
    put_legend(figure, [(f"class {expert}", color) for expert, color in zip(classes, CLASS_COLORS, strict=False)])
    largest = max(np.nanmax(both_BE, initial=1.0) for both_BE in (tokens_BE, replicas_BE))
    # Most classes have a small share: the square root leaves them room in the colours.
    norm = PowerNorm(0.5, vmin=0.0, vmax=largest)
    extent = (steps_T[0] - 0.5, steps_T[-1] + 0.5, tokens_BE.shape[1] - 0.5, -0.5)
    for axes, shares_BE, title in zip(maps, (tokens_BE, replicas_BE), ("tokens", "replicas"), strict=True):
        image = axes.imshow(shares_BE.T, aspect="auto", norm=norm, interpolation="nearest", extent=extent)
        put_title(axes, f"layer {layer}, all classes: share of {title}")
        axes.set_ylabel("expert class")
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        axes.grid(visible=False)
    maps[-1].set_xlabel("step")
    bar = figure.colorbar(image, ax=maps, pad=0.02, aspect=30)
    bar.set_label("share in the layer (%)", fontsize=FONT_SIZE, color=INK)
    bar.ax.tick_params(colors=INK, labelsize=FONT_SIZE - 1)
    return figure


def _draw_classes(axes: Axes, steps_B: np.ndarray, tokens_BE: np.ndarray, replicas_BE: np.ndarray) -> None:
    for expert, color in zip(_varying_classes(tokens_BE), CLASS_COLORS, strict=False):
        markers = ("o", "s") if len(steps_B) == 1 else (None, None)
        axes.plot(steps_B, tokens_BE[:, expert], color=color, linewidth=0.8, alpha=0.6, marker=markers[0])
        axes.plot(steps_B, replicas_BE[:, expert], color=color, linewidth=2.0, drawstyle="steps-mid", marker=markers[1])
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("share (%)")


def draw_bars(axes: Axes, rows: Sequence[tuple[str, Mapping[str, float] | str]]) -> None:
    """Draws where time went: a bar for each row, of which each cause has its share.

    Args:
        axes: to draw on.
        rows: (name, seconds by cause, or why there are none).
    """
    for y, (_, spent_s) in enumerate(rows):
        if isinstance(spent_s, str):
            axes.text(1.0, y, spent_s, va="center", fontsize=FONT_SIZE - 1, color=INK)
            continue
        left, total = 0.0, sum(spent_s.values())
        for cause, seconds in spent_s.items():
            share = 100 * seconds / total if total else 0.0
            axes.barh(y, share, left=left, color=CAUSE_COLORS[cause], edgecolor=GROUND, linewidth=0.4, height=0.7)
            left += share
    axes.set_yticks(range(len(rows)), [drawable(name) for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the time (%)")
    all_spent_s = [spent_s for _, spent_s in rows if not isinstance(spent_s, str)]
    seen = [cause for cause in CAUSE_COLORS if any(spent_s.get(cause, 0.0) > 0 for spent_s in all_spent_s)]
    handles = [Patch(facecolor=CAUSE_COLORS[cause], label=cause.replace("_", " ")) for cause in seen]
    anchor = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22)}
    legend = axes.legend(handles=handles, **anchor, ncols=4, frameon=False, fontsize=FONT_SIZE - 1)
    for text in legend.get_texts():
        text.set_color(INK)


def _varying_classes(tokens_BE: np.ndarray) -> list[int]:
    """The classes with the widest range of shares, as many as have a colour, in their own order."""
    range_E = np.nanmax(tokens_BE, axis=0, initial=0.0) - np.nanmin(tokens_BE, axis=0, initial=100.0)
    return sorted(np.argsort(-range_E, kind="stable")[: len(CLASS_COLORS)].tolist())


def new_figure(
    height: float, num_rows: int = 1, *, shares_x: bool = True, width: float = 4.8, heights: Sequence[float] = ()
) -> tuple[Figure, list[Axes]]:
    """A figure in the style of all, and its axes from top to bottom, which share the x axis or not.

    Args:
        height: of the figure, in inches; a phone shows five of them side by side in letters that can be read.
        num_rows: how many axes.
        shares_x: whether all have one x axis.
        width: of the figure, in inches.
        heights: of the axes, by which the height is divided; all are alike where there are none.
    """
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=GROUND)
    ratios = {"height_ratios": heights} if heights else {}
    rows = figure.subplots(num_rows, 1, sharex=shares_x, squeeze=False, **ratios)[:, 0]
    for axes in rows:
        axes.set_facecolor(GROUND)
        axes.grid(visible=True, color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        axes.tick_params(colors=INK, labelsize=FONT_SIZE - 1)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set(fontsize=FONT_SIZE, color=INK)
    return figure, list(rows)


def put_title(axes: Axes, text: str) -> None:
    """Puts a title over axes."""
    axes.set_title(text, fontsize=FONT_SIZE, color=INK, loc="left")


def put_legend(figure: Figure, entries: Sequence[tuple[str, Any]]) -> None:
    """Puts the legend above the axes, where it hides nothing; a name is shown as it is, never as mathematics."""
    handles = [Line2D([], [], color=color, linewidth=2.5) for _, color in entries]
    labels = [drawable(label) for label, _ in entries]
    num_columns = max(1, min(4, int(LETTERS_PER_INCH * figure.get_figwidth()) // (max(map(len, labels)) + 6)))
    # The labels are set afterwards, for a legend leaves out those with a leading underscore.
    legend = figure.legend(
        handles, ["."] * len(labels), loc="outside upper left", ncols=num_columns, frameon=False, handlelength=1.2
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set(text=label, parse_math=False, fontsize=FONT_SIZE, color=INK)


def drawable(label: str) -> str:
    """A label in characters that the font has, not longer than a legend can hold."""
    glyphs = get_font(findfont("DejaVu Sans")).get_charmap()
    label = "".join(character if ord(character) in glyphs else "?" for character in " ".join(label.split()))
    return label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
