"""Charts of runs over their steps, built from Matplotlib's objects without pyplot and its global state.

From simple to composite, the module provides figures, legends and bars in a common style; metrics as arrays, smoothed
and thinned for drawing; curves of several runs; and a run's MoE layers, with dropped tokens and heat maps of popularity
and replicas.

Shape suffixes: T steps, N runs, B bins of steps, R rows read at a time, K kinds of counts, L MoE layers, E experts.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from swift.draw.style import CAUSE_COLORS, EXPERT_COLORS, GRID, GROUND, INK, LAYER_COLORS, MOMENT_COLORS
from swift.runlog.files import ranges_of
from swift.runlog.reading import Run, ratio

FONT_SIZE = 10.5
_MAX_LABEL = 40
_MAX_ENTRIES = 12
"""Maximum number of entries in a legend; if there are more, the last entry gives the number of omitted ones."""
_LETTERS_PER_INCH = 12
_ROW_INCHES, _ROWS_WITHIN = 0.22, 3
"""Height of a legend row in inches, and the number of rows for which figures have room; more rows add height."""

_NUM_POINTS = 1000
"""Maximum number of points in a line."""
_MANY_LINES = 20
"""Number of lines in a picture beyond which each gets fewer points, to bound the size of the file."""

_MAX_LAYER_LABELS = 8


def new_figure(
    height: float, num_rows: int = 1, *, shares_x: bool = True, width: float = 4.8, heights: Sequence[float] = ()
) -> tuple[Figure, list[Axes]]:
    """Creates a figure in the common style, with axes from top to bottom.

    Args:
        height: height of the figure in inches.
        num_rows: number of axes.
        shares_x: whether all axes share an x axis.
        width: width of the figure in inches; about five inches are legible on a phone.
        heights: relative heights of the axes; equal if empty.
    """
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=GROUND)
    rows = figure.subplots(num_rows, 1, sharex=shares_x, squeeze=False, height_ratios=heights or None)[:, 0]
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
    """Puts a left-aligned title above the axes."""
    axes.set_title(text, fontsize=FONT_SIZE, color=INK, loc="left")


def put_legend(figure: Figure, entries: Sequence[tuple[str, Any]], styles: Sequence[Any] = ()) -> None:
    """Puts a legend above the axes, where it does not cover anything. Labels are shown literally, not parsed as math.

    Args:
        figure: figure to add the legend to.
        entries: (label, color) of each entry.
        styles: line style of each entry; solid if empty.
    """
    if len(entries) > _MAX_ENTRIES:
        shown = _MAX_ENTRIES - 1
        entries = [*entries[:shown], (f"and {len(entries) - shown:,} more", "none")]
        styles = [*styles[:shown], "-"] if styles else ()
    handles = [
        Line2D([], [], color=color, linestyle=style, linewidth=2.5)
        for (_, color), style in zip(entries, styles or ["-"] * len(entries), strict=True)
    ]
    labels = [_drawable(label) for label, _ in entries]
    num_columns = max(1, min(4, int(_LETTERS_PER_INCH * figure.get_figwidth()) // (max(map(len, labels)) + 6)))
    num_rows = -(-len(labels) // num_columns)
    figure.set_figheight(figure.get_figheight() + _ROW_INCHES * max(0, num_rows - _ROWS_WITHIN))
    # Labels are set afterwards: Matplotlib omits entries whose label starts with an underscore.
    legend = figure.legend(
        handles, ["."] * len(labels), loc="outside upper left", ncols=num_columns, frameon=False, handlelength=1.2
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set(text=label, parse_math=False, fontsize=FONT_SIZE, color=INK)


def _drawable(label: str) -> str:
    """Replaces characters that are missing in the font, and shortens a label to fit a legend."""
    glyphs = get_font(findfont("DejaVu Sans")).get_charmap()
    label = "".join(character if ord(character) in glyphs else "?" for character in " ".join(label.split()))
    return label if len(label) <= _MAX_LABEL else label[: _MAX_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"


def draw_bars(axes: Axes, rows: Sequence[tuple[str, Mapping[str, float] | str]]) -> None:
    """Draws the time by cause, with one stacked bar per row.

    Args:
        axes: axes to draw on.
        rows: (name, seconds by cause), or (name, reason why the times are missing).
    """
    for y, (_, spent_s) in enumerate(rows):
        if isinstance(spent_s, str):
            axes.text(1.0, y, spent_s, va="center", fontsize=FONT_SIZE - 1, color=INK)
            continue
        offset, total = 0.0, sum(spent_s.values())
        for cause, seconds in spent_s.items():
            share = 100 * seconds / total if total else 0.0
            axes.barh(y, share, left=offset, color=CAUSE_COLORS[cause], edgecolor=GROUND, linewidth=0.4, height=0.7)
            offset += share
    axes.set_yticks(range(len(rows)), [_drawable(name) for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the time (%)")
    all_spent_s = [spent_s for _, spent_s in rows if not isinstance(spent_s, str)]
    seen = [cause for cause in CAUSE_COLORS if any(spent_s.get(cause, 0.0) > 0 for spent_s in all_spent_s)]
    handles = [Patch(facecolor=CAUSE_COLORS[cause], label=cause.replace("_", " ")) for cause in seen]
    figure = axes.get_figure(root=True)
    assert figure is not None
    columns = int(0.75 * figure.get_figwidth())
    legend = figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=FONT_SIZE - 1
    )
    for text in legend.get_texts():
        text.set_color(INK)


@dataclass(frozen=True, kw_only=True)
class ClassSeries:
    """A run's counts by expert, summed over experts or over bins of steps, to limit their size.

    Attributes:
        routed_TL, dropped_TL: tokens per step and layer; both 0 where a step's counts are unknown.
        misplaced_TL: fraction of the replicas that would have to be given to other experts to match the tokens; NaN
            where nothing was routed.
        popularity_BLE, replicas_BLE: sums over the steps of a bin, see ``bins_of``.
        popularity_LE, replicas_LE: sums over all steps.
        unknown: ranges of steps that were recorded without valid counts.
    """

    routed_TL: np.ndarray
    dropped_TL: np.ndarray
    misplaced_TL: np.ndarray
    popularity_BLE: np.ndarray
    replicas_BLE: np.ndarray
    popularity_LE: np.ndarray
    replicas_LE: np.ndarray
    unknown: list[range]


def class_series(run: Run) -> ClassSeries | None:
    """Summarizes the counts by expert, reading a few megabytes at a time; returns None if there are no counts."""
    counts, steps_T = run.metrics.counts, run.metrics.steps_T
    if counts is None or not len(steps_T) or not counts.num_entries:
        return None
    bin_T, (num_layers, num_classes) = bins_of(len(steps_T)), counts.shape
    routed_TL, dropped_TL = (np.zeros((len(steps_T), num_layers)) for _ in range(2))
    misplaced_TL = np.full((len(steps_T), num_layers), np.nan)
    sums_KBLE = np.zeros((2, bin_T[-1] + 1, num_layers, num_classes))
    is_known_T = np.zeros(len(steps_T), bool)
    for steps_R, counts_RKLE in counts.blocks():
        at_R = np.minimum(np.searchsorted(steps_T, steps_R), len(steps_T) - 1)
        has_record_R = steps_T[at_R] == steps_R
        at_R, counts_RKLE = at_R[has_record_R], counts_RKLE[has_record_R].astype(np.float64)
        popularity_RLE, replicas_RLE, dropped_RLE = (counts_RKLE[:, kind] for kind in range(3))
        is_known_T[at_R] = True
        routed_TL[at_R], dropped_TL[at_R] = popularity_RLE.sum(-1), dropped_RLE.sum(-1)
        misplaced_TL[at_R] = np.abs(shares(popularity_RLE) - shares(replicas_RLE)).sum(-1) / 2
        for index in np.unique(bin_T[at_R]):
            in_bin_R = bin_T[at_R] == index
            sums_KBLE[0, index] += popularity_RLE[in_bin_R].sum(0)
            sums_KBLE[1, index] += replicas_RLE[in_bin_R].sum(0)
    (popularity_BLE, replicas_BLE), (popularity_LE, replicas_LE) = sums_KBLE, sums_KBLE.sum(1)
    unknown = ranges_of(steps_T[~is_known_T].tolist())
    return ClassSeries(
        routed_TL=routed_TL,
        dropped_TL=dropped_TL,
        misplaced_TL=misplaced_TL,
        popularity_BLE=popularity_BLE,
        replicas_BLE=replicas_BLE,
        popularity_LE=popularity_LE,
        replicas_LE=replicas_LE,
        unknown=unknown,
    )


def shares(counts: np.ndarray) -> np.ndarray:
    """Divides counts by their sum over the last dimension; NaN where the sum is zero."""
    return ratio(counts, counts.sum(axis=-1, keepdims=True))


def mean_and_range(values_NT: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes the mean, minimum and maximum over the first dimension, for error bars and bands.

    The range is not a confidence interval; with only a few repetitions, it shows no more than what was observed.

    Returns:
        (mean, minimum, maximum), each float64[T]; NaN where one of the values is NaN.
    """
    return values_NT.mean(axis=0), values_NT.min(axis=0), values_NT.max(axis=0)


def smooth(values_T: np.ndarray) -> np.ndarray:
    """Computes the centered moving average over a twentieth of the steps, ignoring NaN; for display only."""
    num_steps = len(values_T)
    steps = np.arange(num_steps)
    # Near the ends, the window narrows symmetrically; a one-sided window would draw a steep start too low.
    half_T = np.minimum(num_steps // 40, np.minimum(steps, num_steps - 1 - steps))
    known_T = np.isfinite(values_T)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known_T, values_T, 0.0))])
    numbers = np.concatenate([[0], np.cumsum(known_T)])
    first, last = steps - half_T, steps + half_T + 1
    return ratio(sums[last] - sums[first], numbers[last] - numbers[first])


def points_of_a_line(num_lines: int, most: int = _NUM_POINTS) -> int:
    """Returns the maximum number of points per line in a picture with ``num_lines`` lines, an even number."""
    return 2 * (most * _MANY_LINES // max(num_lines, _MANY_LINES) // 2)


def thin(values_T: np.ndarray, num_points: int = _NUM_POINTS) -> np.ndarray:
    """Selects points such that a line looks the same: the minimum and maximum in each bin.

    Returns:
        Indices of the points, int[at most num_points], ascending; all indices if there are at most ``num_points``.
    """
    if len(values_T) <= num_points:
        return np.arange(len(values_T))
    edges = np.linspace(0, len(values_T), num_points // 2 + 1).astype(int)
    # Replace NaN so that it is never chosen as the minimum or maximum of a bin with known values.
    low_T, high_T = np.nan_to_num(values_T, nan=np.inf), np.nan_to_num(values_T, nan=-np.inf)
    points = {
        start + offset
        for start, end in itertools.pairwise(edges)
        for offset in (int(low_T[start:end].argmin()), int(high_T[start:end].argmax()))
    }
    return np.array(sorted(points))


def bins_of(num_steps: int, num_bins: int = 300) -> np.ndarray:
    """Assigns consecutive steps to bins of almost equal size, which are a heat map's columns.

    Returns:
        Bin of each step, int[T], ascending from 0; one bin per step if there are at most ``num_bins`` steps.
    """
    if num_steps <= num_bins:
        return np.arange(num_steps)
    edges = np.linspace(0, num_steps, num_bins + 1).astype(int)[:-1]
    return np.searchsorted(edges, np.arange(num_steps), side="right") - 1


@dataclass(frozen=True)
class Curve:
    """A run's line in a picture of several runs.

    Attributes:
        index: index of the run in the report.
        label, color, style: name of the run, its color, and its line style in Matplotlib's notation.
        steps_T: recorded steps.
        values_T: values at these steps, NaN where unknown.
    """

    index: int
    label: str
    color: str
    style: str
    steps_T: np.ndarray
    values_T: np.ndarray


@dataclass(frozen=True)
class Band:
    """Runs that differ only in their seed, drawn as their mean and a band from minimum to maximum.

    Attributes:
        name, color, style: name of the group, its color, and its line style in Matplotlib's notation.
        members: index of each run in the report.
        steps_T: steps that all runs have recorded.
        values_NT: values of each run at these steps, NaN where unknown.
    """

    name: str
    color: str
    style: str
    members: Sequence[int]
    steps_T: np.ndarray
    values_NT: np.ndarray

    @property
    def label(self) -> str:
        """Label for a legend, with the number of runs."""
        return f"{len(self.members)} seeds: {self.name}"


@dataclass(frozen=True)
class Chart:
    """Lines of several runs over the steps, as data for ``draw_curves``.

    Attributes:
        ylabel: label of the y axis: quantity and unit.
        curves: lines, in the order of the legend.
        bands: seed groups; their members are drawn individually only if the reader asks for it.
        rings: values that exist only at some steps, drawn as rings.
        ring_bands: seed groups among the rings.
        levels: target values, drawn as dotted lines.
        top: largest possible value; None if there is no limit.
        is_exact: whether to draw the values without smoothing.
        from_zero: whether the y axis starts at 0.
        marks: steps of failures, drawn as triangles at the upper edge.
    """

    ylabel: str
    curves: Sequence[Curve]
    bands: Sequence[Band] = ()
    rings: Sequence[Curve] = ()
    ring_bands: Sequence[Band] = ()
    levels: Sequence[float] = ()
    top: float | None = None
    is_exact: bool = False
    from_zero: bool = False
    marks: Sequence[int] = ()


def draw_curves(chart: Chart) -> Figure:
    """Draws smoothed lines over the steps, faint raw values if there are few runs, and bands for seed groups."""
    curves, marks, top = _apart(chart.curves, chart.bands), chart.marks, chart.top
    figure, (axes,) = new_figure(height=3.4)
    for band in chart.bands:
        _draw_band(axes, band, is_exact=chart.is_exact)
    num_points = points_of_a_line(len(curves))
    for curve in curves if len(curves) <= _MANY_LINES else ():
        points = thin(curve.values_T)
        axes.plot(curve.steps_T[points], curve.values_T[points], color=curve.color, alpha=0.22, linewidth=0.8)
    for curve in curves:
        smooth_T = curve.values_T if chart.is_exact else smooth(curve.values_T)
        _draw_line(axes, curve, smooth_T, num_points)
    _draw_rings(axes, _apart(chart.rings, chart.ring_bands), chart.ring_bands)
    _draw_levels(axes, chart.levels)
    if marks:
        color, edge = MOMENT_COLORS["failure"], axes.get_xaxis_transform()
        axes.plot(marks, [1.0] * len(marks), "v", markersize=7, color=color, transform=edge, clip_on=False)
    if top is not None:
        low = min(np.nanmin(line.values_T) for line in chart.curves)
        axes.set_ylim(max(0.0, low - 0.06 * (top - low) - 0.2), top + 0.04 * (top - low) + 0.2)
    if chart.from_zero:
        axes.set_ylim(bottom=0.0)
    axes.set_ylabel(chart.ylabel)
    axes.set_xlabel("step")
    lines: list[Curve | Band] = [*chart.bands, *curves]
    put_legend(figure, [(line.label, line.color) for line in lines], [line.style for line in lines])
    return figure


def _apart(curves: Sequence[Curve], bands: Sequence[Band]) -> list[Curve]:
    """Selects the curves of runs that are not in a band."""
    grouped = {index for band in bands for index in band.members}
    return [curve for curve in curves if curve.index not in grouped]


def _draw_band(axes: Axes, band: Band, *, is_exact: bool) -> None:
    """Draws a group's mean and range; each run is smoothed first, so that noise does not widen the band."""
    smooth_NT = band.values_NT if is_exact else np.stack([smooth(values_T) for values_T in band.values_NT])
    mean_T, low_T, high_T = mean_and_range(smooth_NT)
    points = thin(mean_T)
    steps = band.steps_T[points]
    axes.fill_between(steps, low_T[points], high_T[points], color=band.color, alpha=0.2, linewidth=0)
    _draw_line(axes, band, mean_T)


def _draw_line(axes: Axes, line: Curve | Band, values_T: np.ndarray, num_points: int = _NUM_POINTS) -> None:
    points = thin(values_T, num_points)
    marker = "o" if len(points) == 1 else None
    axes.plot(
        line.steps_T[points],
        values_T[points],
        color=line.color,
        linestyle=line.style,
        linewidth=2.0,
        marker=marker,
    )


def _draw_rings(axes: Axes, rings: Sequence[Curve], bands: Sequence[Band]) -> None:
    """Draws rings; for a seed group, draws a ring at the mean and a bar from minimum to maximum."""
    points: list[tuple[Curve | Band, np.ndarray]] = [(curve, curve.values_T) for curve in rings]
    for band in bands:
        mean_T, low_T, high_T = mean_and_range(band.values_NT)
        axes.vlines(band.steps_T, low_T, high_T, color=band.color, linewidth=1.4)
        points.append((band, mean_T))
    for line, values_T in points:
        known_T = np.isfinite(values_T)
        axes.plot(
            line.steps_T[known_T],
            values_T[known_T],
            "o",
            markersize=5,
            markerfacecolor=GROUND,
            markeredgecolor=line.color,
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


@dataclass(frozen=True)
class LayerMaps:
    """Data for a layer's two heat maps.

    Attributes:
        first_step, last_step: first and last step of the maps.
        num_bins: number of bins of steps in the drawn maps.
        num_merged: number of drawn bins per bin of the arrays; the last bin may have fewer.
        tokens_BE, replicas_BE: share of the layer's tokens and replicas by bin and expert, in percent.
    """

    first_step: int
    last_step: int
    num_bins: int
    num_merged: int
    tokens_BE: np.ndarray
    replicas_BE: np.ndarray


def layer_maps(steps_T: np.ndarray, popularity_BE: np.ndarray, replicas_BE: np.ndarray, num_merged: int) -> LayerMaps:
    """Computes the data for a layer's heat maps, merging every ``num_merged`` consecutive bins."""
    starts = np.arange(0, len(popularity_BE), num_merged)
    tokens_BE, held_BE = (100 * shares(np.add.reduceat(one_BE, starts)) for one_BE in (popularity_BE, replicas_BE))
    return LayerMaps(int(steps_T[0]), int(steps_T[-1]), len(popularity_BE), num_merged, tokens_BE, held_BE)


def draw_drops(steps_T: np.ndarray, dropped_TL: np.ndarray, routed_TL: np.ndarray) -> Figure:
    """Draws the smoothed percentage of tokens that each MoE layer drops; deeper layers are greener."""
    num_layers = routed_TL.shape[1]
    drops_TL = 100 * ratio(dropped_TL, routed_TL)
    colors = layer_colors(num_layers)
    figure, (axes,) = new_figure(height=3.0)
    for layer, color in enumerate(colors):
        smooth_T = smooth(drops_TL[:, layer])
        points = thin(smooth_T)
        marker = "o" if len(points) == 1 else None
        axes.plot(steps_T[points], smooth_T[points], color=color, linewidth=1.6, marker=marker)
    axes.set_ylim(0.0, max(1.0, axes.get_ylim()[1]))
    axes.set_ylabel("tokens dropped (%)")
    axes.set_xlabel("step")
    shown = sorted(set(np.linspace(0, num_layers - 1, min(num_layers, _MAX_LAYER_LABELS)).astype(int).tolist()))
    put_legend(figure, [(f"layer {layer}", colors[layer]) for layer in shown])
    return figure


def layer_colors(num_layers: int) -> list[str]:
    """Chooses a color for each layer, evenly spaced along ``LAYER_COLORS``."""
    scale = LinearSegmentedColormap.from_list("layers", LAYER_COLORS)
    return [to_hex(scale(layer / max(1, num_layers - 1))) for layer in range(num_layers)]


def draw_layer(layer: int, steps_T: np.ndarray, popularity_BE: np.ndarray, replicas_BE: np.ndarray) -> Figure:
    """Draws the popularity of a MoE layer's experts and their replicas over the steps.

    The upper chart shows the experts whose share of tokens varies the most, with thin lines for tokens and thick lines
    for replicas. Below are two heat maps with the same color scale, of all experts' shares of tokens and of replicas.
    """
    tokens_BE, replicas_BE = (100 * shares(counts_BE) for counts_BE in (popularity_BE, replicas_BE))
    figure, (lines, *maps) = new_figure(height=6.6, num_rows=3)
    put_title(lines, f"layer {layer}, what varies most: tokens thin, replicas thick")
    _draw_classes(lines, np.linspace(steps_T[0], steps_T[-1], len(tokens_BE)), tokens_BE, replicas_BE)
    classes = _varying_classes(tokens_BE)
    put_legend(figure, [(f"expert {expert}", color) for expert, color in zip(classes, EXPERT_COLORS, strict=False)])
    largest = max(np.nanmax(both_BE, initial=1.0) for both_BE in (tokens_BE, replicas_BE))
    # Most experts have a small share; the square root gives small shares more of the color scale.
    norm = PowerNorm(0.5, vmin=0.0, vmax=largest)
    extent = (steps_T[0] - 0.5, steps_T[-1] + 0.5, tokens_BE.shape[1] - 0.5, -0.5)
    for axes, shares_BE, title in zip(maps, (tokens_BE, replicas_BE), ("tokens", "replicas"), strict=True):
        image = axes.imshow(shares_BE.T, aspect="auto", norm=norm, interpolation="nearest", extent=extent)
        put_title(axes, f"layer {layer}, all experts: share of {title}")
        axes.set_ylabel("expert")
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        axes.grid(visible=False)
    maps[-1].set_xlabel("step")
    bar = figure.colorbar(image, ax=maps, pad=0.02, aspect=30)
    bar.set_label("share in the layer (%)", fontsize=FONT_SIZE, color=INK)
    bar.ax.tick_params(colors=INK, labelsize=FONT_SIZE - 1)
    return figure


def _draw_classes(axes: Axes, steps_B: np.ndarray, tokens_BE: np.ndarray, replicas_BE: np.ndarray) -> None:
    for expert, color in zip(_varying_classes(tokens_BE), EXPERT_COLORS, strict=False):
        markers = ("o", "s") if len(steps_B) == 1 else (None, None)
        axes.plot(steps_B, tokens_BE[:, expert], color=color, linewidth=0.8, alpha=0.6, marker=markers[0])
        axes.plot(steps_B, replicas_BE[:, expert], color=color, linewidth=2.0, drawstyle="steps-mid", marker=markers[1])
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("share (%)")


def _varying_classes(tokens_BE: np.ndarray) -> list[int]:
    """Selects the experts whose share varies the most, as many as there are colors, in ascending order."""
    range_E = np.nanmax(tokens_BE, axis=0, initial=0.0) - np.nanmin(tokens_BE, axis=0, initial=100.0)
    return sorted(np.argsort(-range_E, kind="stable")[: len(EXPERT_COLORS)].tolist())
