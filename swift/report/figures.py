"""Which pictures a report has, in which order, and what each shows."""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from swift.files import replace_file
from swift.record import Run, scalars
from swift.report.compare import run_labels
from swift.report.draw import Curve, draw_curves, draw_drops, draw_layer
from swift.report.series import class_counts

RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#56b4e9", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can tell apart; the yellow darkened for a light ground."""
DPI = 160


@dataclass(frozen=True)
class Picture:
    """A drawn figure.

    Args:
        name: unique among the pictures of a report; a file name without its ending.
        run_index: the run that it shows; None if it shows all.
        caption: what there is to see.
        png: the encoded picture.
    """

    name: str
    run_index: int | None
    caption: str
    png: bytes


def draw_pictures(runs: Sequence[Run]) -> Iterator[Picture]:
    """Draws what is known of the runs: first the curves of all runs, then what each run's MoE layers did.

    Raises:
        SettingError: the metrics of a run are damaged.
    """
    yield from _draw_together(runs)
    for index, run in enumerate(runs):
        popularity_TLE, replicas_TLE, dropped_TLE = class_counts(run)
        if not popularity_TLE.size:
            continue
        prefix = f"run{index + 1}-{re.sub(r'[^A-Za-z0-9._]+', '-', run.name)[:40]}"
        steps_T = scalars(run, "step")
        for layer in range(popularity_TLE.shape[1]):
            figure = draw_layer(layer, steps_T, popularity_TLE[:, layer], replicas_TLE[:, layer])
            caption = f"MoE layer {layer}: what each expert class gets of the tokens, and of the replicas."
            yield _picture(f"{prefix}-layer{layer}", index, caption, figure)
        figure = draw_drops(steps_T, dropped_TLE, popularity_TLE)
        yield _picture(f"{prefix}-drops", index, "Tokens dropped in each MoE layer.", figure)


def save_figures(runs: Sequence[Run], directory: str | Path) -> list[Path]:
    """Writes the pictures of the runs' report as PNG files.

    Args:
        runs: the runs to draw.
        directory: made where it is missing.

    Returns:
        the files, in the report's order.

    Raises:
        SettingError: the metrics of a run are damaged.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in draw_pictures(runs):
        paths.append(directory / f"{picture.name}.png")
        replace_file(paths[-1], picture.png)
    return paths


def run_color(index: int) -> str:
    """The colour of a run in all pictures."""
    return RUN_COLORS[index % len(RUN_COLORS)]


def _draw_together(runs: Sequence[Run]) -> Iterator[Picture]:
    if losses := _curves(runs, "loss"):
        targets = {run.summary["target_loss"] for run in runs if run.summary and run.summary.get("target_loss")}
        validation = _curves(runs, "validation_loss")
        figure = draw_curves("loss (nats per token)", losses, validation, levels=sorted(targets))
        caption = "Training loss, smoothed; each step faint." + " Rings: validation loss." * bool(validation)
        yield _picture("loss", None, caption, figure)
    if dropped := _curves(runs, "drop_share"):
        survival = [replace(curve, values_T=100 * (1 - curve.values_T)) for curve in dropped]
        figure = draw_curves("tokens that survive (%)", survival, top=100.0)
        yield _picture("survival", None, "Tokens that their expert had room for, of all that were routed.", figure)
    if imbalance := _curves(runs, "load_imbalance"):
        figure = draw_curves("load imbalance (largest / mean)", imbalance)
        yield _picture(
            "imbalance",
            None,
            "Load of the fullest replica over the mean load, averaged over layers; 1 is even.",
            figure,
        )


def _curves(runs: Sequence[Run], name: str) -> list[Curve]:
    """One metric of all runs that have it at all."""
    curves = (
        Curve(label, run_color(index), scalars(run, "step"), scalars(run, name))
        for index, (run, label) in enumerate(zip(runs, run_labels(runs), strict=True))
    )
    return [curve for curve in curves if np.isfinite(curve.values_T).any()]


def _picture(name: str, run_index: int | None, caption: str, figure: Figure) -> Picture:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return Picture(name, run_index, caption, file.getvalue())
