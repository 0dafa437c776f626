"""Who was at work when, how far the run was by then, and what happened to it."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from swift.runlog import History, Incident, Presence, Run, moments_of, presences_of, scalars
from swift.tools.report.sections.axes import FONT_SIZE, new_figure
from swift.tools.report.sections.palette import GRID, INK, MOMENT_COLORS, RUN_COLORS
from swift.tools.report.sections.parts import Picture, Section, Table, seconds_text
from swift.tools.report.sections.series import thin

MAX_ROWS = 24
MAX_MOMENTS = 200
MARKERS = {"failure": "v", "recovery": "P", "return": "^", "restore": "D", "resume": ">", "stop": "X"}


def timeline_section(run: Run, history: History, prefix: str) -> Section:
    """The failures, recoveries and returns of a run.

    Args:
        run: which.
        history: its clock.
        prefix: of the picture's name.

    Raises:
        SettingError: the record is damaged.
    """
    title = "Failures and recoveries"
    moments, presences = moments_of(run, history), presences_of(run, history)
    if not moments:
        return Section(title, note="Nobody failed.")
    shown = _shown(presences)
    figure = draw_timeline(run, history, shown, moments)
    caption = "Iterations that were done over the time of running, and who was at work."
    if len(shown) < len(presences):
        caption += (
            f" {len(presences) - len(shown):,} of {len(presences):,} are left out, those that were longest at work."
        )
    rows = [
        [
            seconds_text(moment.seconds),
            f"{moment.step:,}",
            moment.kind,
            ", ".join(moment.who) or "all",
            moment.what,
            "-" if moment.took_s is None else seconds_text(moment.took_s),
        ]
        for moment in moments[:MAX_MOMENTS]
    ]
    note = f"The first {MAX_MOMENTS:,} of {len(moments):,}." if len(moments) > MAX_MOMENTS else ""
    table = Table(["time", "iteration", "what", "who", "how", "took"], rows, num_text=6)
    return Section(title, [Picture(f"{prefix}-timeline", caption, figure, is_wide=True)], [table], note)


def draw_timeline(run: Run, history: History, presences: Sequence[Presence], moments: Sequence[Incident]) -> Figure:
    """Draws the iterations done over the time of running, and below it a bar for each of those who are at work.

    Args:
        run: for its steps.
        history: its clock.
        presences: whose bars to draw.
        moments: to be marked.
    """
    unit, name = (
        (1.0, "seconds") if history.end_s < 600 else (60.0, "minutes") if history.end_s < 10_800 else (3600.0, "hours")
    )
    bars = 0.55 + 0.22 * max(1, len(presences))
    figure, (above, below) = new_figure(height=2.9 + bars, num_rows=2, width=7.6, heights=(2.2, bars))
    _draw_progress(above, run, history, moments, unit)
    for y, presence in enumerate(presences):
        spans = [(start / unit, max(end - start, 0.0) / unit) for start, end in presence.spans]
        below.barh(y, history.end_s / unit, color="none", edgecolor=GRID, hatch="////", linewidth=0.5, height=0.62)
        below.broken_barh(spans, (y - 0.31, 0.62), facecolors=RUN_COLORS[0], linewidth=0)
    below.set_yticks(range(len(presences)), [presence.name for presence in presences])
    below.set_ylim(max(1, len(presences)) - 0.4, -0.6)
    below.set_ylabel("at work")
    below.set_xlabel(f"{name} of running")
    below.grid(visible=False, axis="y")
    end = max(history.end_s / unit, 1e-3)
    below.set_xlim(-0.015 * end, 1.015 * end)
    return figure


def _draw_progress(axes: Axes, run: Run, history: History, moments: Sequence[Incident], unit: float) -> None:
    steps_T, known_T = scalars(run, "step"), np.isfinite(history.step_s_T)
    seconds_T, steps_T = history.step_s_T[known_T], steps_T[known_T]
    points = thin(seconds_T)
    axes.plot(seconds_T[points] / unit, steps_T[points], color=INK, linewidth=1.6)
    for kind, marker in MARKERS.items():
        at = [moment for moment in moments if moment.kind == kind]
        if not at:
            continue
        x = np.array([moment.seconds for moment in at])
        y = np.interp(x, seconds_T, steps_T) if seconds_T.size else np.array([float(moment.step) for moment in at])
        (line,) = axes.plot(x / unit, y, marker, markersize=7.5, color=MOMENT_COLORS[kind], label=kind, zorder=3)
        line.set(markeredgecolor=INK, markeredgewidth=0.6)
    axes.set_ylabel("iterations done")
    axes.set_ylim(bottom=0)
    legend = axes.legend(loc="upper left", frameon=False, fontsize=FONT_SIZE - 1, ncols=3, handletextpad=0.3)
    for text in legend.get_texts():
        text.set_color(INK)
    axes.margins(y=0.3)


def _shown(presences: Sequence[Presence]) -> list[Presence]:
    """Those who were away longest, in mesh order."""
    by_time = sorted(presences, key=lambda presence: sum(end - start for start, end in presence.spans))
    chosen = {presence.name for presence in by_time[:MAX_ROWS]}
    return [presence for presence in presences if presence.name in chosen]
