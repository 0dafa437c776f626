"""Timeline of a run: presence of workers, progress, failures and recoveries."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from swift.runlog.analysis.history import History
from swift.runlog.analysis.incidents import Incident, incidents_of
from swift.runlog.analysis.measures import scalars
from swift.runlog.analysis.worker_presence import Presence, presences_of
from swift.runlog.reading import Run
from swift.tools.palette import GRID, INK, LIVE, MOMENT_COLORS
from swift.tools.report.sections.axes import FONT_SIZE, new_figure
from swift.tools.report.sections.parts import Picture, Section, Table, seconds_text
from swift.tools.report.sections.series import thin

MAX_ROWS = 24
MAX_INCIDENTS = 200
MARKERS = {"failure": "v", "recovery": "P", "return": "^", "restore": "D", "resume": ">", "stop": "X"}


def timeline_section(run: Run, history: History, prefix: str) -> Section:
    """Makes the section on a run's failures, recoveries and returns."""
    title = "Failures and recoveries"
    incidents, presences = incidents_of(run, history), presences_of(run, history)
    if not incidents:
        return Section(title, note="No failures.")
    shown = _shown(presences)
    figure = draw_timeline(run, history, shown, incidents)
    caption = "Completed iterations over the time of running, and the workers that were live."
    if len(shown) < len(presences):
        caption += f" The {len(presences) - len(shown):,} of {len(presences):,} that were live longest are left out."
    rows = [
        [
            seconds_text(incident.seconds),
            f"{incident.step:,}",
            incident.kind,
            ", ".join(incident.who) or "all",
            incident.what,
            "-" if incident.took_s is None else seconds_text(incident.took_s),
        ]
        for incident in incidents[:MAX_INCIDENTS]
    ]
    note = f"The first {MAX_INCIDENTS:,} of {len(incidents):,}." if len(incidents) > MAX_INCIDENTS else ""
    table = Table(["time", "iteration", "what", "who", "how", "took"], rows, num_text=6)
    return Section(title, [Picture(f"{prefix}-timeline", caption, figure, is_wide=True)], [table], note)


def draw_timeline(run: Run, history: History, presences: Sequence[Presence], incidents: Sequence[Incident]) -> Figure:
    """Draws completed iterations over the time of running, and below them a bar for each worker while it is live.

    Args:
        run: run whose steps are drawn.
        history: timeline of the run.
        presences: workers to draw, with the times at which they are live.
        incidents: failures and recoveries to mark.
    """
    unit, name = (
        (1.0, "seconds") if history.end_s < 600 else (60.0, "minutes") if history.end_s < 10_800 else (3600.0, "hours")
    )
    bars = 0.55 + 0.22 * max(1, len(presences))
    figure, (above, below) = new_figure(height=2.9 + bars, num_rows=2, width=7.6, heights=(2.2, bars))
    _draw_progress(above, run, history, incidents, unit)
    for y, presence in enumerate(presences):
        spans = [(start / unit, max(end - start, 0.0) / unit) for start, end in presence.spans]
        below.barh(y, history.end_s / unit, color="none", edgecolor=GRID, hatch="////", linewidth=0.5, height=0.62)
        below.broken_barh(spans, (y - 0.31, 0.62), facecolors=LIVE, linewidth=0)
    below.set_yticks(range(len(presences)), [presence.name for presence in presences])
    below.set_ylim(max(1, len(presences)) - 0.4, -0.6)
    below.set_ylabel("live")
    below.set_xlabel(f"{name} of running")
    below.grid(visible=False, axis="y")
    end = max(history.end_s / unit, 1e-3)
    below.set_xlim(-0.015 * end, 1.015 * end)
    return figure


def _draw_progress(axes: Axes, run: Run, history: History, incidents: Sequence[Incident], unit: float) -> None:
    steps_T, known_T = scalars(run, "step"), np.isfinite(history.step_s_T)
    seconds_T, steps_T = history.step_s_T[known_T], steps_T[known_T]
    points = thin(seconds_T)
    axes.plot(seconds_T[points] / unit, steps_T[points], color=INK, linewidth=1.6)
    for kind, marker in MARKERS.items():
        found = [incident for incident in incidents if incident.kind == kind]
        if not found:
            continue
        x = np.array([incident.seconds for incident in found])
        y = np.interp(x, seconds_T, steps_T) if seconds_T.size else np.array([float(one.step) for one in found])
        (line,) = axes.plot(x / unit, y, marker, markersize=7.5, color=MOMENT_COLORS[kind], label=kind, zorder=3)
        line.set(markeredgecolor=INK, markeredgewidth=0.6)
    axes.set_ylabel("iterations done")
    axes.set_ylim(bottom=0)
    legend = axes.legend(loc="upper left", frameon=False, fontsize=FONT_SIZE - 1, ncols=3, handletextpad=0.3)
    for text in legend.get_texts():
        text.set_color(INK)
    axes.margins(y=0.3)


def _shown(presences: Sequence[Presence]) -> list[Presence]:
    """Selects the workers that were absent longest, in mesh order."""
    by_time = sorted(presences, key=lambda presence: sum(end - start for start, end in presence.spans))
    chosen = {presence.name for presence in by_time[:MAX_ROWS]}
    return [presence for presence in presences if presence.name in chosen]
