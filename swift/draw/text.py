"""A schedule as text: a Gantt chart in characters, legible with and without colors, and the summary above it.

A chart has one row per worker; for a large cluster, only some workers are shown. The summary is generated from the
schedule's JSON document.

Shape suffixes: N columns of the whole time axis, n ops of a row.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from rich.text import Text

from swift.schedules.problem import Kind, Problem
from swift.schedules.schedule import Schedule, makespan
from swift.topology import Worker, worker_name, worker_names

_MAX_ROWS = 64
_MAX_NAMED = 8

KIND_NAMES = {
    Kind.F: "forward",
    Kind.B: "input gradient",
    Kind.W: "weight gradient",
    Kind.U: "update",
}

MAX_LINES = 72
"""Maximum number of worker rows, summed over all panels."""
_MIN_COLUMNS = 16
IDLE, MARK, FILL, DOWN = "·", "│", "─", "x"
_ASCII = str.maketrans({IDLE: ".", MARK: "|", FILL: "-"})
COLORS = {
    Kind.F: ("#a6cee3", "#d3e7f1"),
    Kind.B: ("#e08214", "#fdb863"),
    Kind.W: ("#542788", "#8073ac"),
    Kind.U: ("#555555", "#888888"),
}
"""Background colors by kind, for even and odd iterations."""
_ON_COLOR = {Kind.F: "#000000", Kind.B: "#000000", Kind.W: "#ffffff", Kind.U: "#ffffff"}
_REROUTED_COLORS = {Kind.F: "#a6cee3", Kind.B: "#fdb863", Kind.W: "#c8bbe8"}
_ODD, _REROUTED, _NUM_STYLES = 4, 8, 16
_IDLE_STYLE, _MARK_STYLE, _DOWN_STYLE = range(_NUM_STYLES, _NUM_STYLES + 3)

MAX_COLUMNS, SUMMARY_MAX_LINES, STAGES_PER_LINE = 12, 16, 12


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """A chart row: a worker and its ops, in execution order.

    Attributes:
        worker: worker of the row.
        is_live: False for a failed worker, which has no ops.
        kind_n, iteration_n, microbatch_n: int32[n], as in ``Op``.
        rerouted_n: bool[n], whether the micro-batch belongs to another pipeline.
        start_n, end_n: float64[n], times in the unit of the costs.
        labels: micro-batch of each op, followed by the chunk as a letter from a if the worker holds several chunks.
        blocks: blocks that the worker holds, such as ``0-3 12-15``; empty if unknown.
    """

    worker: Worker
    is_live: bool
    kind_n: np.ndarray
    iteration_n: np.ndarray
    microbatch_n: np.ndarray
    rerouted_n: np.ndarray
    start_n: np.ndarray
    end_n: np.ndarray
    labels: tuple[str, ...]
    blocks: str

    @property
    def title(self) -> str:
        """Name of the worker, with its blocks if known."""
        return f"{self.name} [{self.blocks}]" if self.blocks else self.name

    @property
    def name(self) -> str:
        """Name of the worker, as ``d:p``."""
        return worker_name(self.worker)


def _blocks_name(problem: Problem, worker: Worker) -> str:
    """Formats the ranges of blocks that a worker holds, such as ``0-3 12-15``; empty if unknown."""
    return " ".join(f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in problem.runs_of(worker))


def _microbatch_names(problem: Problem) -> str:
    """Formats the number of micro-batches, per pipeline if they differ."""
    if isinstance(problem.num_microbatches, int):
        return f"{counted(problem.num_microbatches, 'micro-batch')} per pipeline"
    return f"{', '.join(map(str, problem.num_microbatches))} micro-batches"


def _chunk_letter(chunk: int) -> str:
    """Formats a chunk's number as letters: a to z, then aa, ab and so on.

    >>> _chunk_letter(0), _chunk_letter(27)
    ('a', 'ab')
    """
    later, last = divmod(chunk, 26)
    return (_chunk_letter(later - 1) if later else "") + chr(ord("a") + last)


def describe(problem: Problem) -> str:
    """Describes the topology, the number of micro-batches and the failures in one line."""
    parts = (
        f"{counted(problem.num_pipelines, 'pipeline')} x {counted(problem.num_stages, 'stage')}",
        _microbatch_names(problem),
        failures(problem),
    )
    return ", ".join(parts)


def failures(problem: Problem) -> str:
    """Lists the failed workers, or gives their number if there are many."""
    if not problem.failed:
        return "no failure"
    if len(problem.failed) > _MAX_NAMED:
        return f"{len(problem.failed)} workers failed"
    return f"{' '.join(worker_names(problem.failed))} failed"


def counted(number: int, name: str) -> str:
    """Formats a number with a noun, such as ``3 pipelines``."""
    plural = "es" if name.endswith("ch") else "s"
    return f"{number:,} {name}{plural if number != 1 else ''}"


def rows_of(schedule: Schedule, workers: Sequence[Worker]) -> list[Row]:
    """Returns the chart rows of the given workers."""
    return [_row(schedule, worker) for worker in workers]


def shown_workers(problem: Problem) -> list[Worker]:
    """Selects up to ``_MAX_ROWS`` workers, in mesh order: preferably failed workers, then their peers, then others."""
    failed_stages = {p for _, p in problem.failed}
    by_interest = sorted(
        problem.topology.workers, key=lambda worker: (worker not in problem.failed, worker[1] not in failed_stages)
    )
    return sorted(by_interest[:_MAX_ROWS])


def left_out(problem: Problem, workers: Sequence[Worker]) -> str:
    """Describes in a sentence how many workers are omitted and which are shown; empty if all are shown."""
    num_workers = problem.num_pipelines * problem.num_stages
    if len(workers) == num_workers:
        return ""
    which = "failed workers, their peers, then pipeline by pipeline" if problem.failed else "the first pipelines'"
    return f"{num_workers - len(workers):,} of {num_workers:,} workers are left out; shown are {which}."


def _row(schedule: Schedule, worker: Worker) -> Row:
    d, p = worker
    index = d * schedule.problem.num_stages + p
    ops = slice(int(schedule.bounds[index]), int(schedule.bounds[index + 1]))
    has_several = len(schedule.problem.held_by(worker)) > 1
    names = zip(schedule.microbatch[ops].tolist(), schedule.chunk[ops].tolist(), strict=True)
    labels = tuple(f"{m}{_chunk_letter(k) if has_several else ''}" for m, k in names)
    return Row(
        worker=worker,
        is_live=worker not in schedule.problem.failed,
        kind_n=schedule.kind[ops],
        iteration_n=schedule.iteration[ops],
        microbatch_n=schedule.microbatch[ops],
        rerouted_n=schedule.pipeline[ops] != d,
        start_n=schedule.start[ops],
        end_n=schedule.end[ops],
        labels=labels,
        blocks=_blocks_name(schedule.problem, worker) if worker not in schedule.problem.failed else "",
    )


@dataclass(frozen=True)
class _Axis:
    """Time axis with ``scale`` columns per unit of time, divided into panels that are ``width`` columns wide."""

    scale: float
    width: int
    num_panels: int

    def column(self, time: np.ndarray) -> np.ndarray:
        """Rounds times to columns; a small offset makes exact halves round up despite floating-point errors."""
        return np.floor(time * self.scale + 0.5 + 1e-6).astype(int)


def draw_chart(schedule: Schedule, width: int, *, ascii_only: bool = False) -> Text:
    """Draws one row per worker and one or more characters per op; a long chart continues in panels below.

    An op is shown as its letter, followed by its micro-batch if all ops of its kind have room for it. The letter is
    lowercase if the micro-batch belongs to another pipeline. If the chart would be too long, ops share columns.

    Args:
        schedule: schedule to draw; of more than 64 workers, only some are shown, with a note on how many are omitted.
        width: width of the terminal, in columns.
        ascii_only: whether to use only ASCII characters.
    """
    workers = shown_workers(schedule.problem)
    rows = rows_of(schedule, workers)
    names = max(len("time"), *(len(row.title) for row in rows)) + 1
    axis = _fit(schedule, len(rows), max(_MIN_COLUMNS, width - names))
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
        chart.plain = chart.plain.translate(_ASCII)
    return chart


def _fit(schedule: Schedule, num_rows: int, width: int) -> _Axis:
    """Chooses the largest scale with which the chart has at most ``MAX_LINES`` worker rows."""
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
    letters = len(_chunk_letter(problem.num_chunks - 1)) if most_held > 1 else 0
    return 1 + len(str(problem.most_microbatches - 1)) + letters


def _paint(row: Row, axis: _Axis, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Draws a worker's row over the whole time axis; returns (characters, styles), one per column each."""
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
    # An update follows idle time or a W, so the mark hides at most the end of that W.
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
    """Chooses a style for every column, so that nearby columns show each style in proportion to its time.

    Showing the longest op in each column would misrepresent short ops, as the result would depend on their alignment.
    Instead, time that a column does not show is carried over to later columns.
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
    # Error diffusion: each column shows the style with the most time carried over, among those that occur in it.
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
        return f"bold {_REROUTED_COLORS[kind]} on #303030"
    return f"{_ON_COLOR[kind]} on {COLORS[kind][style // _ODD]}"


def _styled(letters: np.ndarray, styles: np.ndarray) -> Text:
    text, at = Text(), 0
    for style, run in groupby(styles.tolist()):
        end = at + len(list(run))
        text.append("".join(letters[at:end]), _style(style))
        at = end
    return text


def _ruler(axis: _Axis, panel: int) -> str:
    """Formats the axis labels of a panel, each time starting at its column."""
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
    """Returns the number of columns that the shortest op takes."""
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


def summarize(problem: Problem, document: Mapping[str, Any]) -> Iterator[str]:
    """Yields the summary lines above the chart.

    Args:
        problem: problem that was planned.
        document: JSON document of the schedule.
    """
    planned = f"in {document['planning_ms']:,.0f} ms" if document["planning_ms"] else "before, found in the store"
    yield describe(problem)
    constraints = ["each W held to its B"] * (not problem.decoupled) + ["all updates at once"] * (not problem.staggered)
    yield from _cuts(problem)
    yield ", ".join([f"planned by {document['solver']} {planned}", *constraints])
    yield ""
    yield from _times(document)
    yield ""
    if document["fault_free"]:
        yield from _costs_of_failures(document)
        yield ""
    yield from _memory(problem, document["peak_memory"])


def _cuts(problem: Problem) -> Iterator[str]:
    """Yields the blocks of each stage, with one line for all pipelines that have the same cut."""
    cuts: dict[tuple[str, ...], list[int]] = {}
    for d in range(problem.num_pipelines):
        blocks = tuple(_blocks_name(problem, (d, p)) or "none" for p in range(problem.num_stages))
        cuts.setdefault(blocks, []).append(d)
    if not any(map(problem.runs_of, problem.topology.workers)):
        return
    for stages, pipelines in cuts.items():
        whose = "" if len(cuts) == 1 else f" of pipeline{'s' * (len(pipelines) > 1)} {', '.join(map(str, pipelines))}"
        yield f"blocks by stage{whose}: {' | '.join(stages)}"


def _times(document: Mapping[str, Any]) -> Iterator[str]:
    iterations, bound = document["iterations"], f"bound {document['lower_bound']:.6g}, gap {_percent(document['gap'])}"
    if document["tight_bound"] > document["lower_bound"]:
        bound += f"; tight bound {document['tight_bound']:.6g}"
    table = document["tick_table"]
    permutations = f"{table['activation_permutations']} + {table['gradient_permutations']} permutations of messages"
    in_ticks = f"in {table['ticks']} ticks, each as long as its longest op; {permutations}"
    window_text = f"in a window of {counted(iterations, 'iteration')} that drains (makespan {document['makespan']:.6g})"
    yield f"period           {document['period']:<10.6g} {bound}"
    yield f"  in a window    {document['window_period']:<10.6g} {window_text}"
    yield f"  in lockstep    {document['lockstep_period']:<10.6g} {in_ticks}"
    yield f"bubbles          {_percent(document['bubble_share']):<10} of the live workers' time in the steady state"


def _costs_of_failures(document: Mapping[str, Any]) -> Iterator[str]:
    yield "without failures     period   throughput of this plan"
    for name, key in (("1F1B", "one_f_one_b"), ("zero bubble", "zero_bubble")):
        share = document[f"throughput_vs_{key}"]
        change = "the same"
        if abs(share - 1) >= 0.0005:
            change = f"{_percent(abs(share - 1))} {'gained' if share > 1 else 'lost'}"
        yield f"  {name:<14} {document['fault_free'][key]:>10.6g}   {_percent(share)}, {change}"


def _memory(problem: Problem, peaks: Mapping[str, float]) -> Iterator[str]:
    D, P, limit = problem.num_pipelines, problem.num_stages, problem.memory_limit
    limit_text = "no limit" if limit is None else f"limit {limit / problem.costs.f_stash:.4g}"
    if D <= SUMMARY_MAX_LINES and P <= MAX_COLUMNS:
        yield f"peak memory in F-stashes ({limit_text})"
        yield "             stage" + "".join(f"{p:>6}" for p in range(P))
        for d in range(D):
            cells = (f"{peaks[f'{d}:{p}']:.4g}" if (d, p) not in problem.failed else "-" for p in range(P))
            yield f"  pipeline {d:<7}" + "".join(f"{cell:>6}" for cell in cells)
        return
    yield f"peak memory in F-stashes ({limit_text}): the highest among each stage's workers"
    most = [max(peaks[f"{d}:{p}"] for d in range(D)) for p in range(P)]
    for p in range(0, P, STAGES_PER_LINE):
        yield f"  stage {p:<4}" + "".join(f"{peak:>6.4g}" for peak in most[p : p + STAGES_PER_LINE])


def _percent(share: float) -> str:
    # Adding 0.0 turns a negative zero into zero, so that no sign is shown.
    return f"{round(100 * share, 1) + 0.0:.1f} %"
