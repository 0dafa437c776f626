"""Gantt chart in characters, legible with and without colours.

N: columns of the whole time axis, n: ops of a row.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from rich.text import Text

from swift.schedules.measures import makespan
from swift.schedules.ops import Kind
from swift.schedules.problem import Problem
from swift.schedules.schedule import Schedule
from swift.tools.draw.rows import KIND_NAMES, Row, chunk_letter, left_out, rows_of, shown_workers

MAX_LINES = 72
"""Limit on the rows of workers in all panels together."""
MIN_COLUMNS = 16
IDLE, MARK, FILL, DOWN = "·", "│", "─", "x"
ASCII = str.maketrans({IDLE: ".", MARK: "|", FILL: "-"})
COLORS = {
    Kind.F: ("#a6cee3", "#d3e7f1"),
    Kind.B: ("#e08214", "#fdb863"),
    Kind.W: ("#542788", "#8073ac"),
    Kind.U: ("#555555", "#888888"),
}
"""Colours of even and odd iterations."""
ON_COLOR = {Kind.F: "#000000", Kind.B: "#000000", Kind.W: "#ffffff", Kind.U: "#ffffff"}
REROUTED_COLORS = {Kind.F: "#a6cee3", Kind.B: "#fdb863", Kind.W: "#c8bbe8"}
_ODD, _REROUTED, _NUM_STYLES = 4, 8, 16
_IDLE_STYLE, _MARK_STYLE, _DOWN_STYLE = range(_NUM_STYLES, _NUM_STYLES + 3)


@dataclass(frozen=True)
class _Axis:
    """Time axis of ``scale`` columns per unit of time, divided into panels of ``width`` columns."""

    scale: float
    width: int
    num_panels: int

    def column(self, time: np.ndarray) -> np.ndarray:
        """Rounds times to columns; the small offset rounds halves consistently."""
        return np.floor(time * self.scale + 0.5 + 1e-6).astype(int)


def draw_chart(schedule: Schedule, width: int, *, ascii_only: bool = False) -> Text:
    """Draws one row per worker and one or more characters per op; a long chart continues in panels below.

    An op is its letter and, where all ops of its kind have room, its micro-batch. The letter is lower-case if the
    micro-batch is another pipeline's. If the whole chart would be too long, several ops share a column.

    Args:
        schedule: schedule to draw; of more than 64 workers some are shown, with a note on how many are left out.
        width: width of the terminal, in columns.
        ascii_only: True for a terminal without other characters.
    """
    workers = shown_workers(schedule.problem)
    rows = rows_of(schedule, workers)
    names = max(len("time"), *(len(row.title) for row in rows)) + 1
    axis = _fit(schedule, len(rows), max(MIN_COLUMNS, width - names))
    cells = [_paint(row, axis, schedule.problem) for row in rows]
    lines: list[Text] = []
    used = set(np.unique([styles_N for _, styles_N in cells]).tolist())
    for panel in range(axis.num_panels):
        columns = slice(panel * axis.width, (panel + 1) * axis.width)
        lines.append(Text("time".ljust(names) + _ruler(axis, panel), style="dim"))
        for i, row in enumerate(rows):
            if i and not _are_neighbours(rows[i - 1], row, schedule.problem):
                lines.append(Text("..."))
            letters_N, styles_N = cells[i]
            line = Text(row.title.ljust(names), style="" if row.is_live else "red")
            lines.append(line + _styled(letters_N[columns], styles_N[columns]))
        lines.append(Text())
    chart = Text("\n").join([*lines, *_legend(used), *map(Text, _notes(schedule.problem, axis))])
    if ascii_only:
        chart.plain = chart.plain.translate(ASCII)
    return chart


def _fit(schedule: Schedule, num_rows: int, width: int) -> _Axis:
    """Chooses the widest columns with which the chart is not too long."""
    time, shortest = makespan(schedule), float(schedule.problem.time_4P[: Kind.U].min())
    most = max(1, MAX_LINES // num_rows)
    for columns in sorted({_label_width(schedule.problem), 2, 1}, reverse=True):
        total = time * (columns / shortest)
        if total <= most * width:
            num_panels = math.ceil(total / width)
            return _Axis(columns / shortest, math.ceil(total / num_panels), num_panels)
    return _Axis(most * width / time, width, most)


def _label_width(problem: Problem) -> int:
    most_held = max(len(problem.held_by(worker)) for worker in problem.topology.workers)
    letters = len(chunk_letter(problem.num_chunks - 1)) if most_held > 1 else 0
    return 1 + len(str(problem.most_microbatches - 1)) + letters


def _paint(row: Row, axis: _Axis, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Paints the characters and the styles of a worker's whole time axis."""
    N = axis.width * axis.num_panels
    letters_N, styles_N = np.full(N, IDLE), np.full(N, _IDLE_STYLE)
    if not row.is_live:
        line = f"{DOWN}{DOWN} failed ".ljust(axis.width, DOWN)[: axis.width]
        return np.array(list(line) * axis.num_panels), np.full(N, _DOWN_STYLE)
    style_n = row.kind_n + _ODD * (row.iteration_n % 2) + _REROUTED * (row.rerouted_n & (row.kind_n != Kind.U))
    is_u = row.kind_n == Kind.U
    start_u, end_u = axis.column(row.start_n[is_u]), axis.column(row.end_n[is_u])
    mark_u = end_u[start_u == end_u] - 1
    if _columns(axis, problem) < 1:
        styles_N[:] = _share_columns(row, style_n, axis, N)
        busy = styles_N < _NUM_STYLES
        letters_N[busy] = np.array([_letter(style) for style in range(_NUM_STYLES)])[styles_N[busy]]
        mark_u = np.ceil(row.end_n[is_u] * axis.scale - 1e-6).astype(int)[start_u == end_u] - 1
    else:
        _paint_ops(row, style_n, axis, problem, letters_N, styles_N)
    # An update is preceded by idle time or a W, so a mark there hides at most the end of that W.
    letters_N[mark_u], styles_N[mark_u] = MARK, _MARK_STYLE
    return letters_N, styles_N


def _paint_ops(
    row: Row, style_n: np.ndarray, axis: _Axis, problem: Problem, letters_N: np.ndarray, styles_N: np.ndarray
) -> None:
    first_n, end_n = axis.column(row.start_n), axis.column(row.end_n)
    shortest_4, width = problem.time_4P.min(axis=1).tolist(), _label_width(problem)
    has_room = [axis.scale * shortest * (1 + 1e-9) >= width for shortest in shortest_4]
    for style, kind, name, first, end in zip(
        style_n.tolist(), row.kind_n.tolist(), row.labels, first_n.tolist(), end_n.tolist(), strict=True
    ):
        label = _letter(style) + (name if kind != Kind.U and has_room[kind] else "")
        letters_N[first:end] = list(label.ljust(end - first, FILL)[: end - first])
        styles_N[first:end] = style


def _share_columns(row: Row, style_n: np.ndarray, axis: _Axis, num_columns: int) -> np.ndarray:
    """Chooses a style for every column, so that each style gets columns nearby in proportion to its time.

    Showing what takes longest in each column would misrepresent many short ops: it depends on their alignment.
    """
    edges = np.arange(num_columns + 1) / axis.scale
    share_SN = np.zeros((_NUM_STYLES + 1, num_columns))
    for style in np.unique(style_n):
        ops = style_n == style
        start_n, end_n = row.start_n[ops], row.end_n[ops]
        done = np.concatenate([[0.0], np.cumsum(end_n - start_n)])
        times, sums = np.stack([start_n, end_n], axis=1).ravel(), np.stack([done[:-1], done[1:]], axis=1).ravel()
        share_SN[style] = np.diff(np.interp(edges, times, sums)) * axis.scale
    share_SN[_IDLE_STYLE] = 1.0 - share_SN.sum(axis=0)
    owed_S, styles_N = np.zeros(_NUM_STYLES + 1), np.zeros(num_columns, int)
    for column, share_S in enumerate(share_SN.T):
        owed_S += share_S
        styles_N[column] = np.where(share_S > 1e-6, owed_S, -np.inf).argmax()
        owed_S[styles_N[column]] -= 1.0
    return styles_N


def _letter(style: int) -> str:
    letter = Kind(style % _ODD).name
    return letter.lower() if style >= _REROUTED else letter


def _style(style: int) -> str:
    if style >= _NUM_STYLES:
        return {_IDLE_STYLE: "dim", _MARK_STYLE: "bold", _DOWN_STYLE: "red"}[style]
    kind = Kind(style % _ODD)
    if style >= _REROUTED:
        return f"bold {REROUTED_COLORS[kind]} on #303030"
    return f"{ON_COLOR[kind]} on {COLORS[kind][style // _ODD]}"


def _styled(letters: np.ndarray, styles: np.ndarray) -> Text:
    text, at = Text(), 0
    for style, run in groupby(styles.tolist()):
        end = at + len(list(run))
        text.append("".join(letters[at:end]), _style(style))
        at = end
    return text


def _ruler(axis: _Axis, panel: int) -> str:
    """Formats times above the columns at which they start."""
    first, end = panel * axis.width / axis.scale, (panel + 1) * axis.width / axis.scale
    step = _nice(8 / axis.scale)
    line = ""
    for tick in range(math.ceil(first / step - 1e-9), math.ceil(end / step - 1e-9)):
        column = int(axis.column(np.array(tick * step))) - panel * axis.width
        label = f"{tick * step:g}"
        if column + len(label) <= axis.width:
            line = line.ljust(column) + label
    return line


def _nice(least: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _are_neighbours(above: Row, below: Row, problem: Problem) -> bool:
    (d, p), (e, q) = above.worker, below.worker
    return (e - d) * problem.num_stages + q - p == 1


def _columns(axis: _Axis, problem: Problem) -> float:
    """Columns of the shortest op."""
    return axis.scale * float(problem.time_4P[: Kind.U].min()) * (1 + 1e-9)


def _legend(used_styles: set[int]) -> Iterator[Text]:
    kinds = [part for kind in Kind for part in ((f" {kind.name} ", _style(kind)), f" {KIND_NAMES[kind]}  ")]
    yield Text.assemble(*kinds, (IDLE, _style(_IDLE_STYLE)), " idle")
    rerouted = range(_REROUTED, _REROUTED + Kind.U)
    if used_styles.intersection(range(_REROUTED, _NUM_STYLES)):
        letters = [(f" {_letter(style)} ", _style(style)) for style in rerouted]
        yield Text.assemble(*letters, " the same of another pipeline's micro-batch, re-routed")
    mark = ((f" {MARK} ", _style(_MARK_STYLE)), " U of less than a column; with U")
    ends = "the worker's iteration ends, and the shade changes"
    yield Text.assemble(*(mark if _MARK_STYLE in used_styles else (" With U",)), f" {ends}")


def _notes(problem: Problem, axis: _Axis) -> Iterator[str]:
    columns = f" A unit of time is {axis.scale:.3g} column{'' if axis.scale == 1 else 's'}"
    below = f"; the chart continues below, in {axis.num_panels} panels" if axis.num_panels > 1 else ""
    yield f"{columns}{below}."
    if _columns(axis, problem) < 1:
        yield " Ops are narrower than a column: each kind gets columns in proportion to its time there."
    note = left_out(problem, shown_workers(problem))
    if note:
        yield f" {note}"
