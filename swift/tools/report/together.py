"""Charts of all runs of a report together: loss, drops, load, and the optimizer's numbers."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from swift.runlog.analysis.history import history_of
from swift.runlog.analysis.incidents import incidents_of
from swift.runlog.analysis.measures import scalars
from swift.runlog.reading import Run
from swift.tools.palette import POLICY_COLORS, colors_of, line_styles
from swift.tools.report.compare import policy_of, run_labels
from swift.tools.report.sections.curves import Band, Chart, Curve, draw_curves
from swift.tools.report.sections.parts import Picture
from swift.tools.report.seeds import seed_groups


@dataclass(frozen=True)
class RunStyle:
    """Name, colour and line style of a run in all pictures of a report."""

    label: str
    color: str
    line: str


def run_styles(runs: Sequence[Run]) -> list[RunStyle]:
    """Chooses labels, colours and line styles: a run has the colour of its placement policy, see ``colors_of``.

    Runs that differ in their seed alone share a colour, and have line styles of their own.
    """
    first = {index: group.members[0] for group in seed_groups(runs) for index in group.members}
    drawn = [index for index in range(len(runs)) if first.get(index, index) == index]
    chosen = colors_of([policy_of(runs[index]) or "" for index in drawn], POLICY_COLORS)
    color_of = dict(zip(drawn, chosen, strict=True))
    colors = [color_of[first.get(index, index)] for index in range(len(runs))]
    return [RunStyle(*style) for style in zip(run_labels(runs), colors, line_styles(colors), strict=True)]


def pictures_together(runs: Sequence[Run]) -> Iterator[Picture]:
    """Draws the charts of all runs for which at least one run has the numbers.

    Raises:
        SettingError: the record of a run is damaged.
    """
    marks, lines = failure_steps(runs[0]) if len(runs) == 1 else [], _Lines(runs)
    if chart := lines.chart("loss (nats per token)", "loss"):
        summaries = [run.summary or {} for run in runs]
        targets = {one["target_loss"] for one in summaries if _is_finite(one.get("target_loss"))}
        validation = lines.curves("validation_loss")
        caption = "Training loss, smoothed; each step faint." + " Rings: validation loss." * bool(validation)
        chart = replace(chart, rings=validation, ring_bands=lines.bands(validation))
        chart = replace(chart, levels=sorted(targets), marks=marks)
        yield _picture("loss", caption + " Triangles: failures." * bool(marks), chart)
    if chart := lines.chart("tokens that survive (%)", "drop_share", lambda share: 100 * (1 - share)):
        caption = "Share of the routed tokens for which their expert had room."
        yield _picture("survival", caption, replace(chart, top=100.0, marks=marks))
    if chart := lines.chart("load imbalance (largest / mean)", "load_imbalance"):
        caption = "Load of the fullest replica over the mean load, averaged over layers; 1 is even."
        yield _picture("imbalance", caption, chart)
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


def failure_steps(run: Run) -> list[int]:
    """Returns the steps at which a run lost workers."""
    return [incident.step for incident in incidents_of(run, history_of(run)) if incident.kind == "failure"]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _picture(name: str, caption: str, chart: Chart) -> Picture:
    return Picture(name, caption, draw_curves(chart), chart=chart)


class _Lines:
    """The lines of charts: those of each run, and those of each group of seeds.

    Args:
        runs: runs of a report.
    """

    def __init__(self, runs: Sequence[Run]):
        self._runs, self._styles, self._groups = runs, run_styles(runs), seed_groups(runs)

    def chart(
        self, ylabel: str, name: str, shown: Callable[[np.ndarray], np.ndarray] = lambda values_T: values_T
    ) -> Chart | None:
        """Makes the chart of a metric, as ``shown`` converts it; None if no run has it."""
        curves = [replace(curve, values_T=shown(curve.values_T)) for curve in self.curves(name)]
        return Chart(ylabel, curves, self.bands(curves)) if curves else None

    def curves(self, name: str) -> list[Curve]:
        """Makes curves of one metric, for the runs that have it."""
        curves = (
            Curve(index, style.label, style.color, style.line, scalars(run, "step"), scalars(run, name))
            for index, (run, style) in enumerate(zip(self._runs, self._styles, strict=True))
        )
        return [curve for curve in curves if np.isfinite(curve.values_T).any()]

    def bands(self, curves: Sequence[Curve]) -> list[Band]:
        """Makes the bands of the groups of which at least two runs have a curve."""
        of_groups = ([one for one in curves if one.index in group.members] for group in self._groups)
        return [
            _band(group.name, members)
            for group, members in zip(self._groups, of_groups, strict=True)
            if len(members) > 1
        ]


def _band(name: str, curves: Sequence[Curve]) -> Band:
    """Makes the band of some runs of a group, over the steps that all of them have."""
    steps_T = reduce(np.intersect1d, [curve.steps_T for curve in curves])
    values_NT = np.stack([curve.values_T[np.isin(curve.steps_T, steps_T)] for curve in curves])
    return Band(name, curves[0].color, curves[0].style, [curve.index for curve in curves], steps_T, values_NT)
