"""Charts of all runs of a report together: loss, drops, load, and the optimizer's numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swift.runlog import Run, history_of, incidents_of, scalars
from swift.tools.palette import POLICY_COLORS, colors_of, line_styles
from swift.tools.report.compare import policy_of, run_labels
from swift.tools.report.sections import Chart, Curve, Picture, draw_curves


@dataclass(frozen=True)
class RunStyle:
    """Name, colour and line style of a run in all pictures of a report."""

    label: str
    color: str
    line: str


def run_styles(runs: Sequence[Run]) -> list[RunStyle]:
    """Chooses labels, colours and line styles: a run has the colour of its placement policy, see ``colors_of``."""
    colors = colors_of([policy_of(run) or "" for run in runs], POLICY_COLORS)
    return [RunStyle(*style) for style in zip(run_labels(runs), colors, line_styles(colors), strict=True)]


def pictures_together(runs: Sequence[Run]) -> Iterator[Picture]:
    """Draws the charts of all runs for which at least one run has the numbers.

    Raises:
        SettingError: the record of a run is damaged.
    """
    marks = failure_steps(runs[0]) if len(runs) == 1 else []
    if losses := _curves(runs, "loss"):
        summaries = [run.summary or {} for run in runs]
        targets = {one["target_loss"] for one in summaries if _is_finite(one.get("target_loss"))}
        validation = _curves(runs, "validation_loss")
        chart = Chart("loss (nats per token)", losses, validation, sorted(targets), marks=marks)
        caption = "Training loss, smoothed; each step faint." + " Rings: validation loss." * bool(validation)
        yield _picture("loss", caption + " Triangles: failures." * bool(marks), chart)
    if dropped := _curves(runs, "drop_share"):
        survival = [replace(curve, values_T=100 * (1 - curve.values_T)) for curve in dropped]
        caption = "Share of the routed tokens for which their expert had room."
        yield _picture("survival", caption, Chart("tokens that survive (%)", survival, top=100.0, marks=marks))
    if imbalance := _curves(runs, "load_imbalance"):
        caption = "Load of the fullest replica over the mean load, averaged over layers; 1 is even."
        yield _picture("imbalance", caption, Chart("load imbalance (largest / mean)", imbalance))
    if rates := _curves(runs, "learning_rate"):
        caption = "Learning rate of the optimizer at each step."
        yield _picture("learning-rate", caption, Chart("learning rate", rates, is_exact=True, from_zero=True))
    if norms := _curves(runs, "grad_norm"):
        caption = "Norm of all gradients together, before they are clipped."
        yield _picture("gradient-norm", caption, Chart("gradient norm", norms, from_zero=True))
    if speeds := _curves(runs, "tokens_per_s"):
        caption = "Tokens trained in a second, by the time of each step; compilation makes the first ones slow."
        yield _picture("throughput", caption, Chart("tokens per second", speeds, from_zero=True, marks=marks))
    if reading := _curves(runs, "input_ms"):
        caption = "Time to read the batch of each step, while the devices compute the one before."
        yield _picture("input", caption, Chart("reading input (ms)", reading, from_zero=True))
    if shares := _curves(runs, "mfu"):
        utilization = [replace(curve, values_T=100 * curve.values_T) for curve in shares]
        caption = (
            "Model FLOPs utilization: the model's own FLOPs over the devices' peak, or that of the host's matmuls."
        )
        yield _picture("utilization", caption, Chart("MFU (%)", utilization, from_zero=True))


def failure_steps(run: Run) -> list[int]:
    """Returns the steps at which a run lost workers."""
    return [incident.step for incident in incidents_of(run, history_of(run)) if incident.kind == "failure"]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _picture(name: str, caption: str, chart: Chart) -> Picture:
    return Picture(name, caption, draw_curves(chart), chart=chart)


def _curves(runs: Sequence[Run], name: str) -> list[Curve]:
    """Curves of one metric, for the runs that have it."""
    curves = (
        Curve(index, style.label, style.color, style.line, scalars(run, "step"), scalars(run, name))
        for index, (run, style) in enumerate(zip(runs, run_styles(runs), strict=True))
    )
    return [curve for curve in curves if np.isfinite(curve.values_T).any()]
