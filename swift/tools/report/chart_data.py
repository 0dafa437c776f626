"""Charts of a page as data for its script, which redraws them as the reader chooses.

Shape suffixes: T steps, N runs, B bins of steps.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from swift.runlog.analysis.history import history_of
from swift.runlog.analysis.measures import ratio, scalars
from swift.runlog.reading import Run
from swift.tools.palette import variable
from swift.tools.report.sections.curves import Band, Chart, Curve
from swift.tools.report.sections.layers import LayerMaps
from swift.tools.report.sections.series import bins_of, points_of_a_line
from swift.tools.report.together import RunStyle

NUM_BINS = 1000
"""Largest number of points of a line of few runs; in a longer run, a point is the mean of consecutive steps."""
DIGITS = 6
DASHES = {"-": "", "--": "7 4", ":": "2 3", "-.": "8 3 2 3"}

Axes = Mapping[str, np.ndarray]
"""Positions of a run's steps on each axis that its record has: ``step``, ``tokens``, ``time`` in seconds."""


def page_data(
    runs: Sequence[Run], styles: Sequence[RunStyle], charts: Mapping[str, Chart], maps: Mapping[str, LayerMaps]
) -> str:
    """Writes the data that the script needs as JSON, without characters that are special in HTML.

    Returns:
        A JSON object with these members:

        - ``runs``: for each run its ``label``, ``color`` (a CSS variable), ``dash``, and ``x``, the positions of its
          points by axis.
        - ``charts``, by the pictures' names: ``ylabel``, ``top``, ``fromZero``, ``exact``, ``levels``; ``lines``, each
          with its ``run``, and ``mean``, ``low`` and ``high`` of each point (the latter two only where a point stands
          for several steps); ``rings`` and ``marks``, each with its ``run`` and positions ``x`` by axis; ``bands`` and
          ``ringBands``, groups of seeds, each with its ``name``, ``color`` and ``dash``, positions ``x`` by axis, and
          ``members``: of each the ``run``, and ``mean``, its points.
        - ``maps``, by the pictures' names: first and last of ``steps``; the number of ``bins`` that are drawn, and how
          many consecutive ones are ``merged``; ``tokens`` and ``replicas`` by bin and expert, in tenths of a percent.
    """
    axes, num_bins = [_axes(run) for run in runs], points_of_a_line(len(runs), NUM_BINS)
    document = {
        "runs": [
            {
                "label": style.label,
                "color": variable(style.color),
                "dash": DASHES[style.line],
                "x": {name: _numbers(_binned(at_T, num_bins)[0]) for name, at_T in axes_of_run.items()},
            }
            for style, axes_of_run in zip(styles, axes, strict=True)
        ],
        "charts": {name: _chart(chart, axes, num_bins) for name, chart in charts.items()},
        "maps": {name: _maps(one) for name, one in maps.items()},
    }
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _axes(run: Run) -> Axes:
    steps_T, tokens_T = run.metrics.steps_T.astype(float), scalars(run, "tokens")
    axes = {"step": steps_T}
    if tokens_T.size and np.isfinite(tokens_T).all():
        # Steps without a record are taken to have trained as many tokens as the next recorded one.
        axes["tokens"] = np.cumsum(tokens_T * np.diff(steps_T, prepend=0.0))
    seconds_T = history_of(run).step_s_T
    if seconds_T.size and np.isfinite(seconds_T).all():
        axes["time"] = seconds_T
    return axes


def _chart(chart: Chart, axes: Sequence[Axes], num_bins: int) -> dict[str, Any]:
    def points(values_T: np.ndarray) -> np.ndarray:
        return _binned(values_T, num_bins)[0]

    return {
        "ylabel": chart.ylabel,
        "top": chart.top,
        "fromZero": chart.from_zero,
        "exact": chart.is_exact,
        "levels": [*chart.levels],
        "lines": [_line(curve, num_bins) for curve in chart.curves],
        "bands": [_band(band, axes, binned=points) for band in chart.bands],
        "rings": [_ring(curve, axes[curve.index]) for curve in chart.rings],
        "ringBands": [_band(band, axes, binned=np.asarray) for band in map(_known, chart.ring_bands)],
        "marks": [{"run": 0, "x": _at(axes[0], np.searchsorted(axes[0]["step"], chart.marks))}] if chart.marks else [],
    }


def _maps(maps: LayerMaps) -> dict[str, Any]:
    def tenths(shares_BE: np.ndarray) -> list[list[int | None]]:
        return [[round(10 * one) if np.isfinite(one) else None for one in shares_E] for shares_E in shares_BE.tolist()]

    steps = [maps.first_step, maps.last_step]
    bins = {"bins": maps.num_bins, "merged": maps.num_merged}
    return {"steps": steps, **bins, "tokens": tenths(maps.tokens_BE), "replicas": tenths(maps.replicas_BE)}


def _line(curve: Curve, num_bins: int) -> dict[str, Any]:
    mean_B, low_B, high_B = _binned(curve.values_T, num_bins)
    line: dict[str, Any] = {"run": curve.index, "mean": _numbers(mean_B)}
    return line | ({"low": _numbers(low_B), "high": _numbers(high_B)} if len(mean_B) < len(curve.values_T) else {})


def _band(band: Band, axes: Sequence[Axes], binned: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
    """Positions of steps on every axis, the mean of those in the runs."""
    of_members = [axes[index] for index in band.members]
    names = [name for name in of_members[0] if all(name in one for one in of_members)]
    x = {}
    for name in names:
        at_NT = [one[name][np.isin(one["step"], band.steps_T)] for one in of_members]
        x[name] = _numbers(binned(np.mean(at_NT, axis=0)))
    members = [
        {"run": index, "mean": _numbers(binned(values_T))}
        for index, values_T in zip(band.members, band.values_NT, strict=True)
    ]
    return {"name": band.name, "color": variable(band.color), "dash": DASHES[band.style], "x": x, "members": members}


def _known(band: Band) -> Band:
    """Keeps the steps at which every run has a value, as rings are few."""
    is_known_T = np.isfinite(band.values_NT).all(axis=0)
    return replace(band, steps_T=band.steps_T[is_known_T], values_NT=band.values_NT[:, is_known_T])


def _ring(curve: Curve, axes: Axes) -> dict[str, Any]:
    known = np.flatnonzero(np.isfinite(curve.values_T))
    return {"run": curve.index, "x": _at(axes, known), "values": _numbers(curve.values_T[known])}


def _at(axes: Axes, indices: np.ndarray) -> dict[str, list[float | None]]:
    """Positions of some steps on each axis; the last step stands for later ones."""
    return {name: _numbers(at_T[np.minimum(indices, len(at_T) - 1)]) for name, at_T in axes.items()}


def _binned(values_T: np.ndarray, num_bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, minimum and maximum over the known values of each bin, float64[B]; NaN where none is known."""
    if not values_T.size:
        return values_T, values_T, values_T
    bin_T, known_T = bins_of(len(values_T), num_bins), np.isfinite(values_T)
    starts = np.searchsorted(bin_T, np.arange(bin_T[-1] + 1))
    sums_B = np.add.reduceat(np.where(known_T, values_T, 0.0), starts)
    mean_B = ratio(sums_B, np.add.reduceat(known_T.astype(float), starts))
    return mean_B, np.fmin.reduceat(values_T, starts), np.fmax.reduceat(values_T, starts)


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]
