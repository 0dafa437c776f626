"""Gantt chart for a paper, drawn with Matplotlib and legible in grayscale.

Shape suffix: n ops of a row.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from swift.draw.style import OP_COLORS, figure_file
from swift.draw.text import KIND_NAMES, Row, describe, left_out, rows_of, shown_workers
from swift.schedules.bounds import lower_bound
from swift.schedules.problem import Kind
from swift.schedules.schedule import Schedule, iteration_ends, makespan, period

INK, GROUND, DOWN = "#222222", "#ffffff", "#eeeeee"
COLORS = {kind: OP_COLORS[kind.name] for kind in Kind}
_ON_COLOR = {Kind.F: "#232323", Kind.B: "#232323", Kind.W: "#fefefe", Kind.U: "#fefefe"}
"""Text colors on ops, for any background. They are used for nothing else, so that a page does not substitute them."""
_ITERATION_COLORS = (INK, "#b0b0b0")
_FONT_SIZE = 9.0
MIN_WIDTH, MAX_WIDTH, MARGIN = 8.4, 24.0, 0.9
_OP_WIDTH = 0.13
"""Width of the shortest op in inches; it is reduced if the picture would be wider than ``MAX_WIDTH``."""
_LEGEND_WIDTH = 10.5
"""Figure width in inches below which the legend takes two lines."""
_MAX_LABELS = 3000
TOP, HEIGHT, STRIP = 0.36, 0.66, 0.1
"""Distance from an op's top to the row's middle, an op's height, and an iteration line's height, relative to a row."""


def draw_picture(schedule: Schedule) -> Figure:
    """Draws one row per worker, with ops colored by kind; hatches re-routed micro-batches, crosses out failed workers.

    The line under a worker's ops changes its shade with every iteration; a U of zero duration is a black line. Of more
    than 64 workers, only some are shown, with a note on how many are omitted.
    """
    problem = schedule.problem
    workers = shown_workers(problem)
    rows = rows_of(schedule, workers)
    inches = makespan(schedule) / float(problem.time_4P[: Kind.U].min()) * _OP_WIDTH + MARGIN
    width = float(np.clip(inches, MIN_WIDTH, MAX_WIDTH))
    figure = Figure(figsize=(width, 1.5 + min(0.26, 11.0 / len(rows)) * len(rows)), layout="constrained")
    figure.set_facecolor(GROUND)
    axes = figure.subplots()
    for y, row in enumerate(rows):
        if row.is_live:
            _draw_iterations(axes, row, y)
        else:
            _draw_failed(axes, row, y, makespan(schedule))
    for rerouted in (False, True):
        for kind in Kind:
            _draw_ops(axes, rows, kind, rerouted, edge_width=min(0.4, 2.0 * width / inches * _OP_WIDTH))
    num_ops = sum(len(row.kind_n) for row in rows)
    if num_ops <= _MAX_LABELS and inches <= MAX_WIDTH:
        _label_ops(axes, rows)
    _draw_period(axes, schedule)
    _style(axes, schedule, rows)
    _legend(figure, rows)
    return figure


def picture_file(schedule: Schedule, suffix: Literal["svg", "png"] = "svg") -> bytes:
    """Draws a schedule with ``draw_picture`` and returns the content of a file in this format."""
    return figure_file(draw_picture(schedule), suffix)


def _draw_ops(axes: Axes, rows: Sequence[Row], kind: Kind, rerouted: bool, edge_width: float) -> None:
    boxes = []
    for y, row in enumerate(rows):
        ops = (row.kind_n == kind) & ((row.rerouted_n & (kind != Kind.U)) == rerouted)
        boxes.append(_boxes(row.start_n[ops], row.end_n[ops], y - TOP, y - TOP + HEIGHT))
    edge = INK if kind == Kind.U else _ON_COLOR[kind] if rerouted else GROUND
    drawn = PolyCollection(
        list(np.concatenate(boxes)),
        facecolors=COLORS[kind],
        edgecolors=edge,
        linewidths=1.0 if kind == Kind.U else edge_width,
        hatch="/////" if rerouted else None,
        zorder=3 if kind == Kind.U else 2,
    )
    drawn.set_hatch_linewidth(0.5)
    drawn.set_gid(f"ops-{kind.name}" + "-rerouted" * rerouted)
    axes.add_collection(drawn, autolim=False)


def _boxes(start_n: np.ndarray, end_n: np.ndarray, top: float, bottom: float) -> np.ndarray:
    """Computes the corners of the ops' boxes, float64[n, 4, 2]."""
    x = np.stack([start_n, end_n, end_n, start_n], axis=1)
    y = np.broadcast_to([top, top, bottom, bottom], x.shape)
    return np.stack([x, y], axis=2)


def _draw_iterations(axes: Axes, row: Row, y: int) -> None:
    iterations = np.unique(row.iteration_n)
    spans = [(row.start_n[ops].min(), row.end_n[ops].max()) for ops in (row.iteration_n == k for k in iterations)]
    top = y - TOP + HEIGHT + 0.04
    colors = [_ITERATION_COLORS[k % 2] for k in iterations]
    start_n, end_n = np.array(spans).T
    lines = PolyCollection(list(_boxes(start_n, end_n, top, top + STRIP)), facecolors=colors, linewidths=0)
    lines.set_gid(f"iterations-{row.name}")
    axes.add_collection(lines, autolim=False)


def _draw_failed(axes: Axes, row: Row, y: int, end: float) -> None:
    box = _boxes(np.zeros(1), np.array([end]), y - TOP, y - TOP + HEIGHT)
    crossed = PolyCollection(list(box), facecolors=DOWN, edgecolors="#aaaaaa", linewidths=0.4, hatch="xx")
    crossed.set_hatch_linewidth(0.4)
    crossed.set_gid(f"failed-{row.name}")
    axes.add_collection(crossed, autolim=False)
    text = axes.text(end / 2, y, "failed", ha="center", va="center", fontsize=_FONT_SIZE, color=INK)
    text.set_path_effects([withStroke(linewidth=6, foreground=DOWN)])


def _label_ops(axes: Axes, rows: Sequence[Row]) -> None:
    for y, row in enumerate(rows):
        for kind, label, rerouted, start, end in zip(
            row.kind_n, row.labels, row.rerouted_n, row.start_n, row.end_n, strict=True
        ):
            if kind == Kind.U:
                continue
            middle = ((start + end) / 2, y - TOP + HEIGHT / 2 + 0.02)
            text = axes.text(
                *middle, label, ha="center", va="center_baseline", fontsize=_FONT_SIZE - 3, color=_ON_COLOR[kind]
            )
            if rerouted:
                text.set_path_effects([withStroke(linewidth=2.4, foreground=COLORS[kind])])


def _draw_period(axes: Axes, schedule: Schedule) -> None:
    """Draws an arrow above the chart, from the first iteration's end to the second's."""
    ends = iteration_ends(schedule)
    if len(ends) < 2:
        return
    for end in ends[:2]:
        axes.axvline(end, color=INK, linewidth=0.6, linestyle=(0, (2, 3)), zorder=1)
    arrow = {"arrowstyle": "<->", "color": INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (ends[0], -0.8), (ends[1], -0.8), arrowprops=arrow)
    text = f"period {period(schedule):.6g} (bound {lower_bound(schedule.problem):.6g})"
    axes.text((ends[0] + ends[1]) / 2, -0.9, text, ha="center", va="bottom", fontsize=_FONT_SIZE, color=INK)


def _style(axes: Axes, schedule: Schedule, rows: Sequence[Row]) -> None:
    problem = schedule.problem
    axes.set_xlim(0, makespan(schedule) * 1.002)
    axes.set_ylim(len(rows) - 0.5, -1.7 if problem.num_iterations > 1 else -0.7)
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    axes.set_xlabel("time (in the unit of the costs)", fontsize=_FONT_SIZE, color=INK)
    axes.set_ylabel("worker (pipeline:stage)", fontsize=_FONT_SIZE, color=INK)
    axes.tick_params(colors=INK, labelsize=_FONT_SIZE - 1)
    axes.tick_params(axis="y", length=0, labelsize=_FONT_SIZE - 1 if len(rows) <= 40 else _FONT_SIZE - 3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(INK)
    # Draw a line between pipelines.
    for y in range(1, len(rows)):
        if rows[y].worker[0] != rows[y - 1].worker[0]:
            axes.axhline(y - 0.5, color="#cccccc", linewidth=0.6, zorder=0)
    title = f"{schedule.solver}: {describe(problem)}"
    if any(map(problem.runs_of, problem.live_workers)):
        axes.set_ylabel("worker (pipeline:stage) and its blocks", fontsize=_FONT_SIZE, color=INK)
    note = left_out(problem, [row.worker for row in rows])
    axes.set_title("\n".join([title, note] if note else [title]), fontsize=_FONT_SIZE, color=INK, loc="left")


def _legend(figure: Figure, rows: Sequence[Row]) -> None:
    handles = [Patch(facecolor=COLORS[kind], label=f"{kind.name} {KIND_NAMES[kind]}") for kind in Kind]
    if any(row.rerouted_n.any() for row in rows):
        handles.append(
            Patch(
                facecolor=COLORS[Kind.F],
                edgecolor=_ON_COLOR[Kind.F],
                hatch="/////",
                linewidth=0.4,
                label="re-routed micro-batch",
            )
        )
    iterations = {int(k) for row in rows for k in row.iteration_n}
    shades = tuple(Line2D([], [], color=color, linewidth=3.0) for color in _ITERATION_COLORS[: len(iterations)])
    labels = [str(handle.get_label()) for handle in handles]
    legend = figure.legend(
        handles=[*handles, shades],
        labels=[*labels, "underline: an iteration" if len(shades) == 1 else "underline: iterations in turn"],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside upper left",
        ncols=(len(handles) + 2) // 2 if figure.get_figwidth() < _LEGEND_WIDTH else len(handles) + 1,
        frameon=False,
        fontsize=_FONT_SIZE,
    )
    for text in legend.get_texts():
        text.set_color(INK)
