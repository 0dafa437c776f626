"""Comparison of several runs: a table, as in the papers, and charts that show all runs together.

The charts show loss, dropped tokens, load, optimizer metrics and throughput. Runs that differ only in their seed form a
group; the charts and a second table show its mean and range.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from swift.draw.charts import Band, Chart, Curve, draw_curves, mean_and_range
from swift.draw.style import POLICY_COLORS, colors_of, line_styles
from swift.errors import SettingError, printable
from swift.report.history import history_of, incidents_of
from swift.report.parts import Picture, Table
from swift.runlog.files import ROUTER_PREFIX
from swift.runlog.reading import Run, measure, newest, scalars, settings_in
from swift.terminal_table import TerminalTable

COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "name": ("run", str),
    "placement": ("placement", str),
    "final_loss": ("final loss (mean of last 10)", "{:.3f}".format),
    "dropped_percent": ("tokens dropped (%)", "{:.2f}".format),
    "steps_to_target": ("steps to target", "{:,}".format),
    "median_step_ms": ("median step (ms)", "{:,.1f}".format),
    "validation_loss": ("validation loss", "{:.3f}".format),
}
"""Columns of a comparison by key: heading, and a function that formats a value."""

_MEASURES = tuple(key for key in COLUMNS if key not in ("name", "placement"))
_SEED = "Experiment.seed"
_BITS = "validation_bits_per_byte"
_AS_BITS = "validation_loss", _BITS
_NAMED_SEED = re.compile(r",seed=\d+$")
_HISTORY = ("init_from", "settings_changed")
"""Events that make a run differ from its settings; all runs of a group must have the same ones."""
NOTE = (
    "n runs that differ in their seed alone: their mean \N{PLUS-MINUS SIGN} their sample standard deviation, and in "
    "brackets the smallest and the largest value. In the charts the mean is a line or a ring, and its band or bar "
    "extends from the smallest to the largest; lines are smoothed before they are compared."
)


def comparison_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Collects the table's values, one row per run.

    Returns:
        For each run, its ``name``, unique among the runs, its ``placement`` policy, and the measures of
        ``swift.runlog.measure``.

    Raises:
        SettingError: a run's metrics are damaged.
    """
    rows = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        summary = run.summary or {}
        facts = {"name": label, "placement": _policy_of(run)}
        rows.append(facts | measure(run, summary.get("target_loss")))
    return rows


def comparison_table(runs: Sequence[Run]) -> TerminalTable:
    """Builds a terminal table from ``comparison_rows``; missing values are shown as '-'."""
    table = TerminalTable([heading for heading, _ in COLUMNS.values()], texts=("run", "placement"))
    for row in comparison_rows(runs):
        table.add_row(*cells(row))
    return table


def cells(row: dict[str, Any]) -> list[str]:
    """Formats a row from ``comparison_rows`` in the order of ``COLUMNS``; control characters are escaped."""
    return ["-" if row[key] is None else printable(show(row[key])) for key, (_, show) in COLUMNS.items()]


def _policy_of(run: Run) -> str | None:
    """Returns the name of a run's placement policy, from its summary or, for an unfinished run, its configuration.

    A user-defined policy is not imported; its class name is returned. Returns None if the policy is unknown.
    """
    named = (run.summary or {}).get("placement")
    if isinstance(named, str):
        return named
    # Imported on use: these load JAX and the trainer, which a report on finished runs does not need.
    from swift.config.stored import OF_RUN, StoredObject, UnreadableConfig, build, read_config
    from swift.experts.placement.flexmoe import FlexMoE
    from swift.experts.placement.packed import MinMax, Packed
    from swift.experts.placement.policy import Static
    from swift.experts.placement.symi import Symi

    policies = {kind.__name__: kind for kind in (FlexMoE, MinMax, Packed, Static, Symi)}
    try:
        part = read_config(run.path, OF_RUN).settings.get("placement")
        if not isinstance(part, StoredObject):
            return None
        policy_class = None if part.module else policies.get(part.kind)
        return part.kind if policy_class is None else build(part, lambda _: policy_class).name
    except (UnreadableConfig, SettingError):
        return None


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Labels runs by name, followed by the directory if several have the same name; control characters are escaped."""
    names = [run.name for run in runs]
    return [
        printable(name if names.count(name) == 1 else f"{name} ({run.path})")
        for run, name in zip(runs, names, strict=True)
    ]


def validation_table(runs: Sequence[Run]) -> Table | None:
    """Builds a table of the newest and the lowest validation loss of each run, and of each source of a mixture.

    Returns:
        The table; None if no run has more than its validation loss, which ``comparison_rows`` has.
    """
    rows = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        losses = [name for name in run.metrics.names if name.partition("/")[0] == "validation_loss"]
        for name in losses if len(losses) > 1 or _BITS in run.metrics.names else ():
            losses_T, source = scalars(run, name), name.partition("/")[2]
            lowest = min(losses_T[np.isfinite(losses_T)], default=None)
            values = (newest(losses_T), lowest, newest(scalars(run, name.replace(*_AS_BITS))))
            rows.append([label, source or "all", *("-" if value is None else f"{value:.4f}" for value in values)])
    headings = ["run", "validation data", "newest loss (nats per token)", "lowest loss", "newest bits per byte"]
    return Table(headings, rows, num_text=2) if rows else None


@dataclass(frozen=True)
class SeedGroup:
    """Several runs of equal length, or that stopped early, and settings that differ only in their seed.

    Attributes:
        name: names of the first and the last run; unique among the groups of a report.
        members: index of each run in the report.
        seeds: seed of each run.
    """

    name: str
    members: tuple[int, ...]
    seeds: tuple[str, ...]


def seed_groups(runs: Sequence[Run]) -> list[SeedGroup]:
    """Finds the seed groups among a report's runs.

    A run is not in a group if it repeats a seed, has no recorded steps, or has another length than the others. A mean
    over a varying number of runs would jump where one of them ends.
    """
    runs_by_key: dict[object, dict[str, int]] = {}
    for index, run in enumerate(runs):
        settings = settings_in(run.config_text)
        seed = settings.pop(_SEED, "").partition("=")[2].strip()
        if seed and len(run.metrics):
            # Events are compared without their times, which differ even between runs with the same history.
            history = [{**event, "time": None} for event in run.events if event.get("event") in _HISTORY]
            key = (frozenset(settings.values()), _length(run), repr(history))
            runs_by_key.setdefault(key, {}).setdefault(seed, index)
    groups = [group for group in runs_by_key.values() if len(group) > 1]
    names = [_name([runs[index] for index in group.values()]) for group in groups]
    return [
        SeedGroup(
            printable(name if names.count(name) == 1 else f"{name} ({runs[next(iter(group.values()))].path})"),
            tuple(group.values()),
            tuple(group),
        )
        for name, group in zip(names, groups, strict=True)
    ]


def _length(run: Run) -> int:
    """Returns the last step of a run, or the last that it would have had if it has stopped early."""
    summary = run.summary or {}
    return summary.get("num_steps", 0) if "stopped_early" in summary else run.metrics.last_step


def _name(runs: Sequence[Run]) -> str:
    """Returns the name that the runs of a sweep share without their seeds, or else the first and the last name."""
    first, last = runs[0].name, runs[-1].name
    shared = {_NAMED_SEED.sub("", run.name) for run in runs}
    if len(shared) == 1:
        return shared.pop()
    return first if first == last else f"{first} \N{HORIZONTAL ELLIPSIS} {last}"


@dataclass(frozen=True)
class Spread:
    """A measure of the runs in a seed group.

    Attributes:
        mean: mean of the runs that have the measure.
        deviation: their sample standard deviation; None for a single run.
        least: smallest value.
        most: largest value.
        count: number of runs that have the measure.
    """

    mean: float
    deviation: float | None
    least: float
    most: float
    count: int


def seed_rows(runs: Sequence[Run], groups: Sequence[SeedGroup]) -> list[dict[str, Any]]:
    """Collects each group's values: ``name``, ``placement``, ``n``, ``seeds``, and a ``Spread`` or None per measure.

    Raises:
        SettingError: a run's metrics are damaged.
    """
    measured, rows = comparison_rows(runs), []
    for group in groups:
        first = measured[group.members[0]]
        facts = {"name": group.name, "placement": first["placement"], "n": len(group.members), "seeds": group.seeds}
        rows.append(facts | {key: _spread([measured[index][key] for index in group.members]) for key in _MEASURES})
    return rows


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean, low, high = (_like(known[0], float(number)) for number in mean_and_range(np.array(known)))
    return Spread(mean, float(np.std(known, ddof=1)) if len(known) > 1 else None, low, high, len(known))


def seeds_table(runs: Sequence[Run], groups: Sequence[SeedGroup]) -> Table:
    """Builds a table with one row per group: number of runs, their seeds, and each measure's mean and spread.

    Raises:
        SettingError: a run's metrics are damaged.
    """
    rows = [
        [row["name"], str(row["n"]), ", ".join(row["seeds"]), *(_cell(key, row, has_range=True) for key in _MEASURES)]
        for row in seed_rows(runs, groups)
    ]
    return Table(["runs", "n", "seeds", *(COLUMNS[key][0] for key in _MEASURES)], rows, num_text=1)


def seeds_terminal_table(runs: Sequence[Run], groups: Sequence[SeedGroup]) -> TerminalTable:
    """Builds a terminal table with one row per group, and ``mean +- standard deviation`` of each measure."""
    rows = seed_rows(runs, groups)
    keys = [key for key in _MEASURES if any(row[key] is not None for row in rows)]
    table = TerminalTable(["runs", "n", *(COLUMNS[key][0] for key in keys)], texts=("runs",))
    for row in rows:
        cells = (_cell(key, row, has_range=False).replace("\N{PLUS-MINUS SIGN}", "+-") for key in keys)
        table.add_row(row["name"], str(row["n"]), *cells)
    return table


def _cell(key: str, row: Mapping[str, Any], *, has_range: bool) -> str:
    """Formats a measure's mean and spread and, if some runs have no value, the number of runs that have one."""
    spread, show = row[key], COLUMNS[key][1]
    if spread is None:
        return "-"
    more = [f"{show(spread.least)} to {show(spread.most)}"] * has_range
    more += [f"{spread.count} of {row['n']}"] * (spread.count < row["n"])
    deviation = "" if spread.deviation is None else f" \N{PLUS-MINUS SIGN} {show(_like(spread.mean, spread.deviation))}"
    return f"{show(spread.mean)}{deviation}" + (f" ({'; '.join(more)})" if more else "")


def _like(example: float, value: float) -> float:
    """Rounds a number if the example is an integer, so that a mean of counts is shown as a count."""
    return round(value) if isinstance(example, int) else value


@dataclass(frozen=True)
class RunStyle:
    """A run's label, color and line style in all pictures of a report."""

    label: str
    color: str
    line: str


def run_styles(runs: Sequence[Run]) -> list[RunStyle]:
    """Chooses labels, colors and line styles. A run has the color of its placement policy, see ``colors_of``.

    Runs that differ only in their seed have the same color and different line styles.
    """
    first = {index: group.members[0] for group in seed_groups(runs) for index in group.members}
    drawn = [index for index in range(len(runs)) if first.get(index, index) == index]
    chosen = colors_of([_policy_of(runs[index]) or "" for index in drawn], POLICY_COLORS)
    color_of = dict(zip(drawn, chosen, strict=True))
    colors = [color_of[first.get(index, index)] for index in range(len(runs))]
    return [RunStyle(*style) for style in zip(run_labels(runs), colors, line_styles(colors), strict=True)]


def pictures_together(runs: Sequence[Run]) -> Iterator[Picture]:
    """Draws the charts of all runs, omitting those for which no run has data.

    Raises:
        SettingError: a run's record is damaged.
    """
    marks, lines = _failure_steps(runs[0]) if len(runs) == 1 else [], _Lines(runs)
    if chart := lines.chart("loss (nats per token)", "loss"):
        summaries = [run.summary or {} for run in runs]
        targets = {summary["target_loss"] for summary in summaries if _is_finite(summary.get("target_loss"))}
        validation = lines.curves("validation_loss")
        caption = "Training loss, smoothed; each step faint." + " Rings: validation loss." * bool(validation)
        chart = replace(chart, rings=validation, ring_bands=lines.bands(validation))
        chart = replace(chart, levels=sorted(targets), marks=marks)
        yield _picture("loss", caption + " Triangles: failures." * bool(marks), chart)
    if chart := lines.chart("tokens that survive (%)", "drop_fraction", lambda share: 100 * (1 - share)):
        caption = "Share of the routed tokens for which their expert had room."
        yield _picture("survival", caption, replace(chart, top=100.0, marks=marks))
    if chart := lines.chart("load imbalance (largest / mean)", "load_imbalance"):
        caption = "Load of the fullest replica over the mean load, averaged over layers; 1 is even."
        yield _picture("imbalance", caption, chart)
    yield from _router_pictures(runs, lines)
    if chart := lines.chart("learning rate", "learning_rate"):
        caption = "Learning rate of the optimizer at each step."
        yield _picture("learning-rate", caption, replace(chart, is_exact=True, from_zero=True))
    if chart := lines.chart("gradient norm", "grad_norm"):
        caption = "Norm of all gradients together, before they are clipped."
        yield _picture("gradient-norm", caption, replace(chart, from_zero=True))
    if chart := lines.chart("tokens per second", "tokens_per_s"):
        caption = "Tokens trained in a second, by the time of each step; compilation makes the first ones slow."
        yield _picture("throughput", caption, replace(chart, from_zero=True, marks=marks))
    if chart := lines.chart("reading input (ms)", "input_ms"):
        caption = "Time to read the next batch in each step, while the devices compute."
        yield _picture("input", caption, replace(chart, from_zero=True))
    if chart := lines.chart("MFU (%)", "mfu", lambda share: 100 * share):
        caption = (
            "Model FLOPs utilization: the model's own FLOPs over the devices' peak, or that of the host's matmuls."
        )
        yield _picture("utilization", caption, replace(chart, from_zero=True))


_MOST_ELEMENTS = 8
"""Elements of a router's vector that are drawn, each in a chart."""


def _router_pictures(runs: Sequence[Run], lines: "_Lines") -> Iterator[Picture]:
    """Draws the numbers that routers of one's own record."""
    for name in sorted({name for run in runs for name in run.metrics.router_numbers}):
        element = name.rpartition("-")[2]
        if element.isdigit() and int(element) >= _MOST_ELEMENTS:
            continue
        if chart := lines.chart(name, name):
            caption = f"{name.removeprefix(ROUTER_PREFIX)}, as the router records it, averaged over layers."
            yield _picture(re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-"), caption, chart)


def _failure_steps(run: Run) -> list[int]:
    """Returns the steps at which a run lost workers."""
    return [incident.step for incident in incidents_of(run, history_of(run)) if incident.kind == "failure"]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _picture(name: str, caption: str, chart: Chart) -> Picture:
    return Picture(name, caption, draw_curves(chart), chart=chart)


class _Lines:
    """Builder of the charts' lines: one for each run, and a band for each seed group.

    Args:
        runs: runs of a report.
    """

    def __init__(self, runs: Sequence[Run]):
        self._runs, self._styles, self._groups = runs, run_styles(runs), seed_groups(runs)

    def chart(
        self, ylabel: str, name: str, shown: Callable[[np.ndarray], np.ndarray] = lambda values_T: values_T
    ) -> Chart | None:
        """Builds the chart of a metric, converted by ``shown``; returns None if no run has the metric."""
        curves = [replace(curve, values_T=shown(curve.values_T)) for curve in self.curves(name)]
        return Chart(ylabel, curves, self.bands(curves)) if curves else None

    def curves(self, name: str) -> list[Curve]:
        """Builds the curves of a metric, for the runs that have it."""
        curves = (
            Curve(index, style.label, style.color, style.line, scalars(run, "step"), scalars(run, name))
            for index, (run, style) in enumerate(zip(self._runs, self._styles, strict=True))
        )
        return [curve for curve in curves if np.isfinite(curve.values_T).any()]

    def bands(self, curves: Sequence[Curve]) -> list[Band]:
        """Builds bands for the groups in which at least two runs have a curve."""
        curves_by_group = ([curve for curve in curves if curve.index in group.members] for group in self._groups)
        return [
            _band(group.name, members)
            for group, members in zip(self._groups, curves_by_group, strict=True)
            if len(members) > 1
        ]


def _band(name: str, curves: Sequence[Curve]) -> Band:
    """Builds the band for runs in a group, over the steps that all of them have recorded."""
    steps_T = reduce(np.intersect1d, [curve.steps_T for curve in curves])
    values_NT = np.stack([curve.values_T[np.isin(curve.steps_T, steps_T)] for curve in curves])
    return Band(name, curves[0].color, curves[0].style, [curve.index for curve in curves], steps_T, values_NT)
