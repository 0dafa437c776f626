"""Content of a report: sections on all runs together, followed by sections on each run."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from swift.draw.charts import (
    ClassSeries,
    class_series,
    draw_bars,
    draw_drops,
    draw_layer,
    layer_maps,
    new_figure,
    shares,
)
from swift.files import replace_file
from swift.report.compare import pictures_together, run_labels, validation_table
from swift.report.history import history_of, time_by_cause
from swift.report.parts import Picture, Section, Table, seconds_text
from swift.report.sections import answers_section, answers_together, coverage_section, plans_section, timeline_section
from swift.runlog.files import ranges_text
from swift.runlog.reading import Run, ratio, scalars

_MAX_BARS = 40
"""Maximum number of runs in the bar chart of time; the table contains all of them."""
_MAX_CELLS = 80_000
"""Maximum number of heat map values per run in the page; if there are more, neighboring bins are merged."""


def sections_of_all(runs: Sequence[Run]) -> list[Section]:
    """Builds the sections on all runs together: charts, where the time went, and a comparison of answers.

    Raises:
        SettingError: a run's record is damaged.
    """
    validations = validation_table(runs)
    together = Section("", list(pictures_together(runs)), [] if validations is None else [validations])
    return [together, _spending_section(runs), *answers_together(runs, run_labels(runs))]


def sections_of(run: Run, index: int) -> list[Section]:
    """Builds the sections on one run: its experts, failures, configurations, checkpoints and answers.

    Args:
        run: run to show.
        index: index of the run in the report.

    Raises:
        SettingError: the run's record is damaged.
    """
    prefix = f"run{index + 1}-{re.sub(r'[^A-Za-z0-9._]+', '-', run.name)[:40]}"
    history = history_of(run)
    return [
        _experts_section(run, prefix),
        timeline_section(run, history, prefix),
        plans_section(run, history, prefix),
        coverage_section(run, history, prefix),
        *answers_section(run),
    ]


def save_figures(runs: Sequence[Run], directory: str | Path) -> list[Path]:
    """Writes all pictures of a report as PNG files.

    Args:
        runs: runs to draw.
        directory: directory for the files; created if missing.

    Returns:
        Paths of the files, in the report's order.

    Raises:
        SettingError: a run's record is damaged.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    sections = [
        *sections_of_all(runs),
        *(section for index, run in enumerate(runs) for section in sections_of(run, index)),
    ]
    paths = []
    for picture in [picture for section in sections for picture in section.pictures]:
        paths.append(directory / f"{picture.name}.png")
        replace_file(paths[-1], picture.png)
    return paths


def _spending_section(runs: Sequence[Run]) -> Section:
    title = "Where the time went"
    spent = [time_by_cause(run, history_of(run)) for run in runs]
    known = [
        (label, times) for label, times in zip(run_labels(runs), spent, strict=True) if times and sum(times.values())
    ]
    if not known:
        return Section(title, note="The record does not show where the time went.")
    figure, (axes,) = new_figure(height=1.6 + 0.35 * min(len(known), _MAX_BARS))
    draw_bars(axes, known[:_MAX_BARS])
    causes = [cause for cause in known[0][1] if any(times[cause] for _, times in known)]
    rows = []
    for label, times in known:
        total = sum(times.values())
        texts = [f"{seconds_text(times[c])} ({100 * times[c] / total:.1f} %)" if times[c] else "-" for c in causes]
        rows.append([label, seconds_text(total), *texts])
    caption = "The whole time of a run, each moment counted once; the useful part is its goodput."
    caption += f" The first {_MAX_BARS} of {len(known):,} runs." * (len(known) > _MAX_BARS)
    return Section(title, [Picture("spending", caption, figure)], [Table(["run", "in all", *causes], rows, 1)])


def _experts_section(run: Run, prefix: str) -> Section:
    title = "Popularity and replicas"
    series = class_series(run)
    if series is None:
        return Section(title, note="No popularity of experts is recorded.")
    steps_T, num_layers = scalars(run, "step"), len(series.popularity_LE)
    figure = draw_drops(steps_T, series.dropped_TL, series.routed_TL)
    num_merged = max(1, math.ceil(series.popularity_BLE.size / _MAX_CELLS))
    pictures = [Picture(f"{prefix}-drops", "Tokens dropped in each MoE layer.", figure)]
    for layer in range(num_layers):
        counts_BE = series.popularity_BLE[:, layer], series.replicas_BLE[:, layer]
        figure = draw_layer(layer, steps_T, *counts_BE)
        maps = layer_maps(steps_T, *counts_BE, num_merged)
        caption = f"MoE layer {layer}: each expert's share of the tokens and of the replicas."
        pictures.append(Picture(f"{prefix}-layer{layer}", caption, figure, maps=maps))
    headings = [
        "layer",
        "tokens dropped (%)",
        "most popular expert",
        "its tokens (%)",
        "its replicas (%)",
        "misplaced (%)",
    ]
    rows = [_layer_row(layer, series) for layer in range(num_layers)]
    note = "Misplaced: the mean share of replicas that would have to belong to another expert to match the tokens."
    if series.unknown:
        note += f" Left out, because their counts are missing or damaged: iterations {ranges_text(series.unknown)}."
    return Section(title, pictures, [Table(headings, rows, 1)], note)


def _layer_row(layer: int, series: ClassSeries) -> list[str]:
    tokens_E, replicas_E = shares(series.popularity_LE[layer]), shares(series.replicas_LE[layer])
    misplaced_T = series.misplaced_TL[:, layer]
    misplaced_T = misplaced_T[np.isfinite(misplaced_T)]
    if not misplaced_T.size:
        return [str(layer), *["-"] * 5]
    top = int(np.argmax(tokens_E))
    numbers = (tokens_E[top], replicas_E[top], misplaced_T.mean())
    dropped = float(ratio(series.dropped_TL[:, layer].sum(), series.routed_TL[:, layer].sum()))
    return [str(layer), f"{100 * dropped:.1f}", str(top), *(f"{100 * number:.1f}" for number in numbers)]
