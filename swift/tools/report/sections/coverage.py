"""Checkpoint coverage: the age of every expert's newest copy at each checkpoint.

Shape suffixes: C checkpoints and restores, L MoE layers, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from swift.errors import SettingError
from swift.runlog.analysis.history import History, number_in
from swift.runlog.reading import Run
from swift.tools.palette import INK
from swift.tools.report.sections.axes import FONT_SIZE, new_figure
from swift.tools.report.sections.parts import Picture, Section, Table, seconds_text

MAX_ROWS = 100
MAX_COLUMNS = 300


@dataclass(frozen=True)
class Coverage:
    """Newest copies of experts after each checkpoint and restore.

    Attributes:
        event_C: index of each checkpoint or restore among the run's events.
        steps_C: iterations of the checkpoints and restores, in order of time.
        newest_CLE: int[C, L, E], iteration of each expert's newest copy; 0 if there is none.
    """

    event_C: list[int]
    steps_C: np.ndarray
    newest_CLE: np.ndarray

    @property
    def age_CLE(self) -> np.ndarray:
        """Age of each expert's newest copy, in iterations before the checkpoint."""
        return self.steps_C[:, None, None] - self.newest_CLE


def coverage_section(run: Run, history: History, prefix: str) -> Section:
    """Makes the section on a run's checkpoints, and on the age of the copies that a restore of each would use."""
    title = "Checkpoint coverage"
    saves = [(number, timed) for number, timed in enumerate(history.events) if timed.name == "checkpoint"]
    if not saves:
        return Section(title, note="No checkpoint was saved.")
    coverage = coverage_of(run)
    pictures, notes = [], []
    if coverage is None:
        notes.append("Which experts were saved is not recorded.")
    elif coverage.age_CLE.any():
        caption = "Iterations between each checkpoint and the newest copy of an expert in it; 0: it was saved there."
        pictures = [Picture(f"{prefix}-coverage", caption, draw_coverage(coverage))]
    else:
        notes.append("Every checkpoint has all experts.")
    rows = [
        [
            f"{timed.fields.get('step', 0):,}",
            seconds_text(timed.seconds),
            *_facts(run, timed.fields, _oldest(coverage, number)),
        ]
        for number, timed in saves[-MAX_ROWS:]
    ]
    if len(saves) > MAX_ROWS:
        notes.append(f"The last {MAX_ROWS} of {len(saves):,} checkpoints are listed.")
    headings = ["iteration", "time", "experts of a layer", "oldest copy", "MB", "stall", "saved in", "PLT (%)"]
    return Section(title, pictures, [Table(headings, rows, num_text=0)], " ".join(notes))


def coverage_of(run: Run) -> Coverage | None:
    """Computes the coverage after every checkpoint and restore; None if no experts are recorded.

    Raises:
        SettingError: the record is damaged.
    """
    shape = (0, 0) if run.metrics.counts is None else run.metrics.counts.shape
    newest_LE, steps, found = np.zeros(shape, int), [], []
    numbers = []
    for number, event in enumerate(run.events):
        name, step, experts = event.get("event"), event.get("step", 0), event.get("experts")
        if name not in ("checkpoint", "restore") or experts is None:
            continue
        newest_LE = newest_LE.copy()
        try:
            for source, units in _units(experts, step) if name == "checkpoint" else experts.items():
                _set_newest(newest_LE, int(source), units)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise SettingError(
                f"experts of {name} {step}", experts, f"must be experts by layer, in {run.path}"
            ) from error
        numbers.append(number)
        steps.append(step)
        found.append(newest_LE)
    return Coverage(numbers, np.array(steps), np.array(found)) if found and newest_LE.size else None


def draw_coverage(coverage: Coverage) -> Figure:
    """Draws the age of each expert's newest copy: a column for each checkpoint, a row for each expert."""
    shown = np.unique(np.linspace(0, len(coverage.steps_C) - 1, MAX_COLUMNS).astype(int))
    age_CLE = coverage.age_CLE[shown]
    num_columns, num_layers, num_classes = age_CLE.shape
    figure, (axes,) = new_figure(height=min(6.0, 1.7 + 0.09 * num_layers * num_classes))
    image = axes.imshow(
        age_CLE.reshape(num_columns, -1).T, aspect="auto", interpolation="nearest", cmap="cividis_r", vmin=0
    )
    axes.grid(visible=False)
    axes.set_yticks([num_classes * (layer + 0.5) - 0.5 for layer in range(num_layers)], map(str, range(num_layers)))
    for layer in range(1, num_layers):
        axes.axhline(num_classes * layer - 0.5, color=INK, linewidth=0.8)
    at = MaxNLocator(6, integer=True, min_n_ticks=1).tick_values(0, num_columns - 1)
    ticks = [int(tick) for tick in at if 0 <= tick < num_columns]
    axes.set_xticks(ticks, [f"{coverage.steps_C[shown[tick]]:,}" for tick in ticks])
    axes.set_xlabel("checkpoint of iteration")
    axes.set_ylabel("MoE layer, its experts downwards")
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=30)
    bar.set_label("age (iterations)", fontsize=FONT_SIZE, color=INK)
    bar.ax.tick_params(colors=INK, labelsize=FONT_SIZE - 1)
    return figure


def _units(experts: Any, step: int) -> list[tuple[int, Any]]:
    """Converts the experts of a checkpoint, all or some of each layer, to the form of a restore: units by iteration."""
    units = experts
    if experts != "all":
        units = [(layer, class_) for layer, classes in enumerate(experts) for class_ in classes]
    return [(step, units)]


def _set_newest(newest_LE: np.ndarray, step: int, units: Any) -> None:
    """Sets the newest copy of all experts, or of (layer, expert) pairs."""
    if units == "all":
        newest_LE[:] = step
        return
    for layer, class_ in units:
        if min(layer, class_) < 0:  # a negative index would count from the end
            raise IndexError(f"layer {layer} has no expert {class_}")
        newest_LE[layer, class_] = step


def _oldest(coverage: Coverage | None, event: int) -> str:
    """Formats the iteration of the oldest copy that a restore of a checkpoint would use."""
    if coverage is None or event not in coverage.event_C:
        return "-"
    return f"{coverage.newest_CLE[coverage.event_C.index(event)].min():,}"


def _facts(run: Run, event: Mapping[str, Any], oldest: str) -> Sequence[str]:
    numbers = [number_in(run, event, name) for name in ("experts_per_layer", "bytes", "stall_ms", "save_ms", "plt")]
    shows = ("{:g}".format, _megabytes, _milliseconds, _milliseconds, lambda plt: f"{100 * plt:.2f}")
    texts = ["-" if number is None else show(number) for number, show in zip(numbers, shows, strict=True)]
    return [texts[0], oldest, *texts[1:]]


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def _milliseconds(ms: float) -> str:
    return seconds_text(ms / 1000)
