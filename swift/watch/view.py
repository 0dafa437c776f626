"""Draws snapshots of runs as lines of text, for a terminal of any size and for a file.

Every line is a ``Text``, so that a drawing of a given height can be put together without measuring. Without colors
nothing is lost; where a terminal has ASCII only, bars are made of letters.

Shape suffixes: C columns, L MoE layers, E expert classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from swift.errors import printable
from swift.runlog.reading import ratio
from swift.terminal_table import TerminalTable
from swift.train.display import describe, format_duration, saved_text
from swift.watch.series import fitted_series
from swift.watch.state import ExpertLoads, RunSnapshot

_STYLES = {
    "absent": "dim",
    "starting": "cyan",
    "running": "green",
    "stalled": "bold yellow",
    "stopped": "bold red",
    "ended": "bold green",
}
"""Styles by state."""
_INCIDENT_STYLES = {"failure": "red", "stop": "red", "recovery": "green", "return": "green"}
_LABEL = 12
_LEAST_CURVE, _MOST_CURVE = 3, 10
_TOP_SHARE = 0.97
_MOST_INCIDENTS, _MOST_NAMED = 6, 8
_LEAST_MAP, _MOST_REPEATS = 8, 3
_MOST_INTEGER = 2**53
_OVERLOADED = 1.25
"""Ratio of tokens to slots from which an expert is marked: many of its tokens are dropped."""


@dataclass(frozen=True)
class Canvas:
    """The space to draw in.

    Attributes:
        width: number of columns.
        ascii_only: whether to use only ASCII characters.
    """

    width: int
    ascii_only: bool = False

    @property
    def levels(self) -> str:
        """Characters from an empty to a full bar of one row."""
        return " .:-=+*#@" if self.ascii_only else " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"

    @property
    def rule(self) -> str:
        """Character of a vertical line."""
        return "|" if self.ascii_only else "\u2502"


def run_lines(run: RunSnapshot, canvas: Canvas, height: int | None = None) -> list[Text]:
    """Draws one run.

    Args:
        run: snapshot of the run.
        canvas: space to draw in.
        height: maximum number of lines, which are then truncated to the width; None for every layer of the model, and
            messages of any length.
    """
    head, tail, incidents = _head(run, canvas), [*_workers(run, canvas)], [*_incidents(run)]
    sparks = [*_spark(run, "tokens_per_s", "tokens/s", canvas), *_spark(run, "drop_fraction", "dropped", canvas)]
    if height is None:
        curve = _curve(run, canvas, _MOST_CURVE)
        return [*head, *curve, *sparks, *_experts(run.loads, canvas, None), *tail, *incidents]
    left = height - len(head) - len(sparks) - len(tail)
    num_incidents = min(len(incidents), max(0, left // 4))
    left -= num_incidents
    num_layers = 0 if run.loads is None else len(run.loads.popularity_LE)
    experts = [*_experts(run.loads, canvas, min(num_layers, max(0, left - _LEAST_CURVE - 3)))]
    left -= len(experts)
    curve = _curve(run, canvas, min(_MOST_CURVE, left - 1)) if left > _LEAST_CURVE else []
    shown = incidents[len(incidents) - num_incidents :]
    lines = [*head, *curve, *sparks, *experts, *tail, *shown][:height]
    for line in lines:
        line.truncate(canvas.width)
    return lines


def runs_table(runs: Sequence[RunSnapshot]) -> TerminalTable:
    """Returns a table with a row for each of several runs."""
    table = TerminalTable(
        ["run", "state", "step", "loss", "tokens/s", "dropped (%)", "live", "failures", "left"], ["run", "state"]
    )
    for run in runs:
        metrics = run.metrics
        live = f"{len(run.members) - len(run.absent_members)}/{len(run.members)}" if run.members else "-"
        table.add_row(
            label_of(run, runs),
            state_text(run),
            _counter(run),
            _number(metrics, "loss", ".3f"),
            _number(metrics, "tokens_per_s", ",.0f"),
            _number(metrics, "drop_fraction", ".1f", 100),
            live,
            str(run.num_failures),
            "-" if run.seconds_left is None else format_duration(run.seconds_left),
        )
    return table


def label_of(run: RunSnapshot, runs: Sequence[RunSnapshot]) -> str:
    """Returns the name of a run, or its path if another run has the same name."""
    return run.name if sum(other.name == run.name for other in runs) == 1 else printable(str(run.path))


def state_text(run: RunSnapshot) -> str:
    """Formats the state of a run with its reason, and how long the run has been silent if that matters."""
    if run.read_share < 1 and run.state != "absent":
        return f"reading {100 * run.read_share:.0f} %"
    parts = [run.reason] if run.reason else []
    if run.state in ("starting", "stalled") and run.silent_s is not None:
        parts.insert(0, f"no line for {format_duration(run.silent_s)}")
    if run.state == "absent":
        parts = ["waiting for a run in this directory"]
    return f"{run.state}: {', '.join(parts)}" if parts else run.state


def _head(run: RunSnapshot, canvas: Canvas) -> list[Text]:
    """Draws name and state, the progress, and the newest numbers."""
    lines = [Text.assemble((run.name, "bold"), "  ", (state_text(run), _STYLES[run.state]))]
    left = "" if run.seconds_left is None else f"{format_duration(run.seconds_left)} left"
    texts = [text for text in (_counter(run), left) if text]
    if run.num_steps and run.step:
        room = canvas.width - 2 - cell_len("  ".join(texts)) - 2
        share = min(1.0, run.step / run.num_steps)
        if room >= _LEAST_MAP:
            done = int(share * room)
            full, empty = ("#", ".") if canvas.ascii_only else ("\u2588", "\u2591")
            lines.append(Text.assemble(full * done, (empty * (room - done), "dim"), "  ", "  ".join(texts)))
        else:
            lines += _wrapped(texts, canvas.width)
    if run.metrics:
        validation = _number(run.metrics, "validation_loss", ".3f")
        parts = [*describe({name: value for name, value in run.metrics.items() if _is_number(value)})]
        parts += [f"validation loss {validation}"] * (validation != "-")
        lines += _wrapped([*parts, saved_text(run.step, run.saved_step)], canvas.width)
    if run.num_damaged:
        lines.append(Text(f"{run.num_damaged:,} lines of the record are damaged", style="yellow"))
    if run.trouble:
        lines += _wrapped([printable(run.trouble)], canvas.width, "yellow")
    return lines


@np.errstate(over="ignore", invalid="ignore")
def _curve(run: RunSnapshot, canvas: Canvas, num_rows: int) -> list[Text]:
    """Draws the loss over the steps, with its range at the left."""
    values_C = fitted_series(run.series["loss"], canvas.width - _LABEL)
    finite = values_C[np.isfinite(values_C)]
    if len(finite) < 2 or num_rows < 1:
        return []
    # The steep fall of the first steps is cut at the top of the curve: it would flatten the rest.
    low, high = float(finite.min()), float(np.quantile(finite, _TOP_SHARE, method="lower"))
    # A full row below the smallest loss, so that it is seen.
    heights_C = 1 + (values_C - low) / ((high - low) or 1) * (len(canvas.levels) - 1) * (num_rows - 1)
    heights_C = np.where(np.isfinite(heights_C), heights_C + len(canvas.levels) - 2, 0)
    labels = {0: f"{high:.3f}", num_rows - 1: f"{low:.3f}"} if num_rows > 1 else {0: f"{finite[-1]:.3f}"}
    lines = []
    for row in range(num_rows):
        bars = _bars(heights_C - (num_rows - 1 - row) * (len(canvas.levels) - 1), canvas)
        name = "loss" if row == 0 else ""
        lines.append(Text.assemble((f"{name:<5}{labels.get(row, ''):>6} ", "dim"), (bars, "cyan")))
    first, last = "1", f"{run.step:,}"
    room = len(values_C) - len(first) - len(last)
    lines.append(Text(" " * _LABEL + first + " " * max(1, room) + last, style="dim"))
    return lines


@np.errstate(over="ignore", invalid="ignore")
def _spark(run: RunSnapshot, name: str, label: str, canvas: Canvas) -> list[Text]:
    """Draws a metric over the steps as one row of bars from 0; nothing if the run does not have it."""
    values_C = fitted_series(run.series[name], canvas.width - _LABEL)
    finite = values_C[np.isfinite(values_C)]
    if len(finite) < 2 or finite.max() <= 0:
        return []
    top = len(canvas.levels) - 1
    bars = _bars(np.nan_to_num(np.ceil(values_C / finite.max() * top)), canvas)
    return [Text.assemble((f"{label:<{_LABEL}}", "dim"), (bars, "blue"))]


def _bars(heights_C: np.ndarray, canvas: Canvas) -> str:
    """Draws one row of bars, whose heights are in levels of a row."""
    top = len(canvas.levels) - 1
    return "".join(canvas.levels[level] for level in np.clip(np.round(heights_C), 0, top).astype(int).tolist())


def _experts(loads: ExpertLoads | None, canvas: Canvas, most_layers: int | None) -> Iterator[Text]:
    """Draws each layer's load and replicas by expert, both in slots and on one scale, and its dropped tokens.

    Args:
        loads: loads of the experts; None draws nothing.
        canvas: space to draw in.
        most_layers: maximum number of layers; None for all.
    """
    if loads is None or most_layers == 0:
        return
    needed_LE = loads.popularity_LE * ratio(loads.replicas_LE.sum(-1), loads.popularity_LE.sum(-1))[:, None]
    needed_LE = np.nan_to_num(needed_LE)
    dropped_L = np.nan_to_num(100 * ratio(loads.dropped_LE.sum(-1), loads.popularity_LE.sum(-1)))
    room = canvas.width - _LABEL - len("  | 100.0 %")
    most_columns = room // 2
    if most_columns < _LEAST_MAP:
        yield Text(f"experts     {dropped_L.mean():.1f} % of the tokens dropped")
        return
    num_layers, num_experts = needed_LE.shape
    shown = num_layers if most_layers is None else min(num_layers, most_layers)
    group = -(-num_experts // most_columns)
    starts, repeats = np.arange(0, num_experts, group), min(_MOST_REPEATS, max(1, most_columns // num_experts))
    needed_LC, replicas_LC = (
        np.repeat(np.maximum.reduceat(values_LE, starts, axis=1), repeats, axis=1)
        for values_LE in (needed_LE, loads.replicas_LE)
    )
    scale = max(float(needed_LC[:shown].max()), float(replicas_LC[:shown].max()), 1e-9)
    grouped = f"; a column is the busiest of {group} of {num_experts} experts" if group > 1 else ""
    over = f"the last {loads.num_steps} iterations" if loads.num_steps > 1 else "the last iteration"
    columns = len(needed_LC[0])
    heading = f"{'load':<{columns}}{canvas.rule}{'replicas':<{columns}}{canvas.rule} dropped"
    yield Text(f"{'experts':<{_LABEL}}{heading}", style="dim")
    for layer in range(shown):
        yield Text.assemble(
            (f"{f'layer {layer}':<{_LABEL}}", "dim"),
            _row_of_loads(needed_LC[layer], replicas_LC[layer], scale, canvas),
            (canvas.rule, "dim"),
            _bars(_heights(replicas_LC[layer], scale, canvas), canvas),
            (canvas.rule, "dim"),
            f" {dropped_L[layer]:.1f} %",
        )
    units = f"tokens and replicas in slots, {canvas.levels[-1]} is {scale:.1f}{grouped}; over {over}"
    yield Text(f"{'':<{_LABEL}}{units}", style="dim")
    if shown < num_layers:
        rest_L = dropped_L[shown:]
        text = f"{num_layers - shown} more layers drop {rest_L.min():.1f} to {rest_L.max():.1f} %"
        yield Text(f"{'':<{_LABEL}}{text}", style="dim")


def _heights(values_C: np.ndarray, scale: float, canvas: Canvas) -> np.ndarray:
    return np.ceil(values_C / scale * (len(canvas.levels) - 1) - 1e-9)


def _row_of_loads(needed_C: np.ndarray, replicas_C: np.ndarray, scale: float, canvas: Canvas) -> Text:
    """Draws a layer's loads; experts whose tokens need many more slots than they have are red."""
    text = Text(_bars(_heights(needed_C, scale, canvas), canvas))
    for column in np.flatnonzero(needed_C > _OVERLOADED * np.maximum(replicas_C, 1e-9)).tolist():
        text.stylize("red", column, column + 1)
    return text


def _workers(run: RunSnapshot, canvas: Canvas) -> Iterator[Text]:
    """Draws who is there, who is not, and the number of failures."""
    if not run.members:
        return
    num_absent = len(run.absent_members)
    parts = [f"workers     {len(run.members) - num_absent} of {len(run.members)} live"]
    if num_absent:
        named = ", ".join(map(printable, run.absent_members[:_MOST_NAMED]))
        parts.append(f"absent: {named}" + f" and {num_absent - _MOST_NAMED} more" * (num_absent > _MOST_NAMED))
    parts.append(f"{run.num_failures} failure{'s' * (run.num_failures != 1)}")
    yield from _wrapped(parts, canvas.width, "red" if num_absent and run.state == "running" else "")


def _incidents(run: RunSnapshot) -> Iterator[Text]:
    """Draws the latest incidents, each with its local time."""
    for incident in run.incidents[-_MOST_INCIDENTS:]:
        try:
            at = datetime.fromtimestamp(incident.seconds).strftime("%H:%M:%S")
        except (ValueError, OverflowError, OSError):  # a year that the machine's calendar does not have
            at = "--:--:--"
        who = f"{', '.join(map(printable, incident.who))} " if incident.who else ""
        took = "" if incident.took_s is None else f" ({incident.took_s:.2f} s)"
        text = f"{at}  step {incident.step:,}  {incident.kind}: {who}{printable(incident.what)}{took}"
        yield Text(text, style=_INCIDENT_STYLES.get(incident.kind, ""))


def _wrapped(texts: Sequence[str], width: int, style: str = "") -> list[Text]:
    """Puts short texts on as few lines as possible; a line is broken only between texts."""
    lines = [""]
    for text in texts:
        longer = f"{lines[-1]}  {text}" if lines[-1] else text
        if lines[-1] and cell_len(longer) > width:
            lines.append(text)
        else:
            lines[-1] = longer
    return [Text(line, style=style) for line in lines]


def _counter(run: RunSnapshot) -> str:
    return f"{run.step:,}" if run.num_steps is None else f"{run.step:,}/{run.num_steps:,}"


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a number that can be computed with; an integer may have any number of digits."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= _MOST_INTEGER)


def _number(metrics: Any, name: str, form: str, factor: float = 1.0) -> str:
    """Formats a metric; ``-`` if there is none."""
    value = metrics.get(name)
    return format(factor * value, form) if _is_number(value) else "-"
