"""Charts of several runs over the steps, drawn on Matplotlib's objects without pyplot: no global state is touched.

Shape suffixes: T steps, N runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from swift.tools.palette import GROUND, INK, MOMENT_COLORS
from swift.tools.report.sections.axes import FONT_SIZE, new_figure, put_legend
from swift.tools.report.sections.series import MANY_LINES, NUM_POINTS, mean_and_range, points_of_a_line, smooth, thin


@dataclass(frozen=True)
class Curve:
    """A run's line in a picture of several runs: values_T, NaN where unknown, over steps_T.

    Attributes:
        index: index of the run in the report.
        label, color, style: name of the run, its colour, and its line style as Matplotlib writes it.
    """

    index: int
    label: str
    color: str
    style: str
    steps_T: np.ndarray
    values_T: np.ndarray


@dataclass(frozen=True)
class Band:
    """Runs that differ in their seed alone, drawn as their mean and a band from the smallest to the largest of them.

    Attributes:
        name, color, style: name of the group, its colour, and its line style as Matplotlib writes it.
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
        """Name of the line in a legend, with the number of runs."""
        return f"{len(self.members)} seeds: {self.name}"


@dataclass(frozen=True)
class Chart:
    """Lines of several runs over the steps.

    Attributes:
        ylabel: quantity and unit.
        curves: lines, in the order of the legend.
        bands: groups of seeds; their members are drawn one by one only where the reader asks for it.
        rings: values that only some steps have, drawn as rings.
        ring_bands: groups of seeds among the rings.
        levels: target values, marked by dotted lines.
        top: largest possible value, if there is one.
        is_exact: True if the values are not to be smoothed.
        from_zero: True if the axis of the values begins at 0.
        marks: steps of failures, marked by triangles at the upper edge.
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
    """Draws lines over the steps, smoothed values strong and raw ones of few runs faint; groups of seeds as bands."""
    curves, marks, top = _apart(chart.curves, chart.bands), chart.marks, chart.top
    figure, (axes,) = new_figure(height=3.4)
    for band in chart.bands:
        _draw_band(axes, band, is_exact=chart.is_exact)
    num_points = points_of_a_line(len(curves))
    for curve in curves if len(curves) <= MANY_LINES else ():
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
    """Curves of runs that are in no band."""
    grouped = {index for band in bands for index in band.members}
    return [curve for curve in curves if curve.index not in grouped]


def _draw_band(axes: Axes, band: Band, *, is_exact: bool) -> None:
    """Draws the mean and the range of a group; each run is smoothed first, so that noise does not widen the band."""
    smooth_NT = band.values_NT if is_exact else np.stack([smooth(values_T) for values_T in band.values_NT])
    mean_T, low_T, high_T = mean_and_range(smooth_NT)
    points = thin(mean_T)
    steps = band.steps_T[points]
    axes.fill_between(steps, low_T[points], high_T[points], color=band.color, alpha=0.2, linewidth=0)
    _draw_line(axes, band, mean_T)


def _draw_line(axes: Axes, line: Curve | Band, values_T: np.ndarray, num_points: int = NUM_POINTS) -> None:
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
    """Draws rings; one of several seeds stands at their mean, on a bar from the smallest to the largest value."""
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
