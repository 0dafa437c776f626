"""Sections of a report on one run: checkpoints, answers to tasks, configurations, and the timeline.

- Coverage: the age of every expert's newest copy at each checkpoint.
- Answers: results of ``swift evaluate`` on the run's checkpoints, also compared across runs.
- Configurations: a table, and the schedule of each distinct plan.
- Timeline: uptimes of workers, progress, failures and recoveries.

Shape suffixes: C checkpoints and restores, L MoE layers, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from swift.draw.charts import FONT_SIZE, new_figure, thin
from swift.draw.picture import draw_picture
from swift.draw.style import GRID, INK, LIVE, MOMENT_COLORS
from swift.errors import SettingError
from swift.evaluate.results import Difference, Evaluation, Score, differences, stored_evaluations
from swift.report.history import (
    ConfigurationPeriod,
    History,
    Incident,
    Uptime,
    configuration_periods,
    incidents_of,
    names_in,
    number_in,
    presences_of,
)
from swift.report.parts import Picture, Section, Table, seconds_text
from swift.runlog.files import EVENTS
from swift.runlog.reading import Run, scalars
from swift.schedules.plans.normalize import Move, after_moves, denormalize, failure_counts, normalize
from swift.schedules.plans.store import CorruptPlanError, read_plan
from swift.schedules.schedule import Schedule
from swift.topology import Worker, read_worker

_MOST_CHECKPOINTS = 100
_MOST_COLUMNS = 300

_ANSWER_HEADINGS = ("tasks", "task", "score", "iteration", "questions", "correct (%)", "interval of 95 %")

_MOST_PLANS = 8
_MOST_CONFIGURATIONS = 100

_MOST_PRESENCES = 24
_MOST_INCIDENTS = 200
_MARKERS = {"failure": "v", "recovery": "P", "return": "^", "restore": "D", "resume": ">", "stop": "X"}


@dataclass(frozen=True)
class Coverage:
    """The newest copies of experts after each checkpoint and restore.

    Attributes:
        event_C: index of each checkpoint or restore among the run's events.
        steps_C: iteration of each checkpoint or restore, in chronological order.
        newest_CLE: int[C, L, E], iteration of each expert's newest copy; 0 if there is none.
    """

    event_C: list[int]
    steps_C: np.ndarray
    newest_CLE: np.ndarray

    @property
    def age_CLE(self) -> np.ndarray:
        """Age of each expert's newest copy, in iterations before the checkpoint, int[C, L, E]."""
        return self.steps_C[:, None, None] - self.newest_CLE


def coverage_section(run: Run, history: History, prefix: str) -> Section:
    """Builds the section on a run's checkpoints, with the age of the copies that a restore from each would use."""
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
        pictures = [Picture(f"{prefix}-coverage", caption, _draw_coverage(coverage))]
    else:
        notes.append("Every checkpoint has all experts.")
    rows = [
        [
            f"{timed.fields.get('step', 0):,}",
            seconds_text(timed.seconds),
            *_checkpoint_texts(run, timed.fields, _oldest(coverage, number)),
        ]
        for number, timed in saves[-_MOST_CHECKPOINTS:]
    ]
    if len(saves) > _MOST_CHECKPOINTS:
        notes.append(f"The last {_MOST_CHECKPOINTS} of {len(saves):,} checkpoints are listed.")
    headings = ["iteration", "time", "experts of a layer", "oldest copy", "MB", "stall", "saved in", "PLT (%)"]
    return Section(title, pictures, [Table(headings, rows, num_text=0)], " ".join(notes))


def coverage_of(run: Run) -> Coverage | None:
    """Computes the coverage after every checkpoint and restore; returns None if the record does not list experts.

    Raises:
        SettingError: the record is damaged.
    """
    shape = (0, 0) if run.metrics.counts is None else run.metrics.counts.shape
    newest_LE, steps, snapshots = np.zeros(shape, int), [], []
    numbers = []
    for number, event in enumerate(run.events):
        name, step, experts = event.get("event"), event.get("step", 0), event.get("experts")
        if name not in ("checkpoint", "restore") or experts is None:
            continue
        newest_LE = newest_LE.copy()
        try:
            for source, units in _saved_units(experts, step) if name == "checkpoint" else experts.items():
                _set_newest(newest_LE, int(source), units)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise SettingError(
                f"experts of {name} {step}", experts, f"must be experts by layer, in {run.path}"
            ) from error
        numbers.append(number)
        steps.append(step)
        snapshots.append(newest_LE)
    return Coverage(numbers, np.array(steps), np.array(snapshots)) if snapshots and newest_LE.size else None


def _draw_coverage(coverage: Coverage) -> Figure:
    """Draws the age of each expert's newest copy: one column per checkpoint, one row per expert."""
    shown = np.unique(np.linspace(0, len(coverage.steps_C) - 1, _MOST_COLUMNS).astype(int))
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


def _saved_units(experts: Any, step: int) -> list[tuple[int, Any]]:
    """Converts a checkpoint's experts to the layout used for restores, (iteration of the copies, experts)."""
    units = experts
    if experts != "all":
        units = [(layer, class_) for layer, classes in enumerate(experts) for class_ in classes]
    return [(step, units)]


def _set_newest(newest_LE: np.ndarray, step: int, units: Any) -> None:
    """Records ``step`` as the newest copy for all experts, or for the given (layer, expert) pairs."""
    if units == "all":
        newest_LE[:] = step
        return
    for layer, class_ in units:
        if min(layer, class_) < 0:  # a negative index would count from the end
            raise IndexError(f"layer {layer} has no expert {class_}")
        newest_LE[layer, class_] = step


def _oldest(coverage: Coverage | None, event: int) -> str:
    """Formats the iteration of the oldest copy that a restore from a checkpoint would use."""
    if coverage is None or event not in coverage.event_C:
        return "-"
    return f"{coverage.newest_CLE[coverage.event_C.index(event)].min():,}"


def _checkpoint_texts(run: Run, event: Mapping[str, Any], oldest: str) -> Sequence[str]:
    names = ("experts_per_layer", "bytes", "stall_ms", "save_ms", "plt")
    numbers = [number_in(run.path, event, name) for name in names]
    shows = ("{:g}".format, _megabytes, _milliseconds, _milliseconds, lambda plt: f"{100 * plt:.2f}")
    texts = ["-" if number is None else show(number) for number, show in zip(numbers, shows, strict=True)]
    return [texts[0], oldest, *texts[1:]]


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def _milliseconds(ms: float) -> str:
    return seconds_text(ms / 1000)


def answers_section(run: Run) -> list[Section]:
    """Builds the section on how a run's checkpoints answered task questions; no section if they were not evaluated.

    Args:
        run: run to show.

    Raises:
        SettingError: the results are damaged.
    """
    evaluations, rows = stored_evaluations(run.path), []
    for evaluation in evaluations:
        step = "-" if evaluation.step is None else f"{evaluation.step:,}"
        for score in evaluation.scores:
            low, high = score.interval
            counts = f"{score.questions:,}", f"{100 * score.share:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"
            rows.append([evaluation.tasks, score.task, _words(score.metric), step, *counts])
    parts = [
        f"{evaluation.tasks} of iteration {evaluation.step}" for evaluation in evaluations if not evaluation.is_complete
    ]
    note = f"Not all questions are answered yet: {', '.join(parts)}." if parts else ""
    return [Section("Answers to tasks", tables=[Table(_ANSWER_HEADINGS, rows, 3)], note=note)] if rows else []


def answers_together(runs: Sequence[Run], labels: Sequence[str]) -> list[Section]:
    """Builds the section that compares the answers of several runs; no section unless two share a task file.

    For each task file, a run's newest evaluated checkpoint is used. Differences are paired question by question,
    relative to the first run that was evaluated on the file.

    Args:
        runs: runs of a report.
        labels: label of each run.

    Raises:
        SettingError: a run's results are damaged.
    """
    newest: dict[str, dict[int, Evaluation]] = {}
    for index, run in enumerate(runs):
        for evaluation in sorted(stored_evaluations(run.path), key=lambda evaluation: evaluation.step or 0):
            newest.setdefault(evaluation.tasks_digest, {})[index] = evaluation
    shared = [by_run for by_run in newest.values() if len(by_run) > 1]
    if not shared:
        return []
    asked = sorted({index for by_run in shared for index in by_run})
    rows = [row for by_run in shared for row in _answer_rows(by_run, asked)]
    note = (
        "Correct answers (%) of each run's newest checkpoint that was asked, and in brackets their interval of 95 %; "
        "below, the difference from the first run in points, over the questions that both have answered. Where its "
        "interval leaves 0 out, the two differ."
    )
    partly = [
        f"{labels[index]} on {evaluation.tasks}"
        for by_run in shared
        for index, evaluation in by_run.items()
        if not evaluation.is_complete
    ]
    note += f" Not all questions are answered yet: {', '.join(partly)}." if partly else ""
    headings = ["tasks", "task", "score", *(labels[index] for index in asked)]
    return [Section("Answers to tasks", tables=[Table(headings, rows, 3)], note=note)]


def _answer_rows(evaluations: Mapping[int, Evaluation], asked: Sequence[int]) -> list[list[str]]:
    """Builds two rows for each score in a task file: shares of correct answers, and differences from the first run."""
    first = min(evaluations)
    scores = {
        index: {(score.task, score.metric): score for score in evaluation.scores}
        for index, evaluation in evaluations.items()
    }
    apart = {
        index: {
            (difference.task, difference.metric): difference
            for difference in differences(evaluation, evaluations[first])
        }
        for index, evaluation in evaluations.items()
        if index != first
    }
    rows = []
    for key in dict.fromkeys(key for run_scores in scores.values() for key in run_scores):
        named = [evaluations[first].tasks, key[0], _words(key[1])]
        rows.append([*named, *(_share_text(scores.get(index, {}).get(key)) for index in asked)])
        rows.append(["", "", "difference", *(_difference_text(apart.get(index, {}).get(key)) for index in asked)])
    return rows


def _share_text(score: Score | None) -> str:
    if score is None:
        return "-"
    low, high = score.interval
    return f"{100 * score.share:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _difference_text(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    low, high = difference.interval
    return f"{100 * difference.share:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def _words(name: str) -> str:
    return name.replace("_", " ")


def plans_section(run: Run, history: History, prefix: str) -> Section:
    """Builds the section on configurations: a row for each period, and a Gantt chart for each distinct plan."""
    title = "Configurations that ran"
    stretches = [stretch for stretch in configuration_periods(run, history) if stretch.num_steps]
    if not stretches:
        return Section(title, note="No configuration is recorded.")
    different: dict[str, Mapping[str, Any]] = {}
    for stretch in stretches:
        if stretch.plan is not None:
            different.setdefault(
                str([stretch.plan.get(name) for name in ("plan", "failed", "positions")]), stretch.plan
            )
    pictures = [
        _plan_picture(run, event, f"{prefix}-plan{index}")
        for index, event in enumerate([*different.values()][:_MOST_PLANS])
    ]
    headings = ["iterations", "down", "iterations kept", "median", "period (x fault-free)", "bubble (%)"]
    table = Table(headings, [_stretch_row(stretch) for stretch in stretches[:_MOST_CONFIGURATIONS]], num_text=2)
    notes = [
        "No schedule is recorded; a single worker has none." * (not pictures),
        f"The schedules of {_MOST_PLANS} of {len(different)} configurations are drawn."
        * (len(different) > _MOST_PLANS),
        f"The first {_MOST_CONFIGURATIONS} of {len(stretches):,} configurations are listed."
        * (len(stretches) > _MOST_CONFIGURATIONS),
    ]
    return Section(title, pictures, [table], " ".join(filter(None, notes)))


def schedule_of(event: Mapping[str, Any]) -> tuple[Schedule, dict[Worker, Worker]]:
    """Reads the schedule in a ``plan`` event, with the workers that ran it.

    Returns:
        (schedule, worker that took over the role by worker whose role it took over).

    Raises:
        CorruptPlanError, SettingError: the event does not contain a valid schedule.
    """
    planned = read_plan(event["plan"])
    failed = frozenset(map(_worker, names_in(event, "failed")))
    problem = replace(planned.problem, failed=failed)
    moved = _moves(event)
    problem, players = after_moves(problem, moved), {place: worker for worker, place in moved}
    if not planned.problem.is_uniform:
        return planned, players
    if failure_counts(problem) != failure_counts(planned.problem):
        raise CorruptPlanError("it is for other failures than those of its event")
    return denormalize(planned, normalize(problem)), players


def _moves(event: Mapping[str, Any]) -> tuple[Move, ...]:
    """Reads the moves of workers that have taken over others' roles."""
    positions = event.get("positions")
    if not isinstance(positions, Mapping):
        raise CorruptPlanError(f"{positions!r} are not the positions of workers")
    return tuple(Move(_worker(worker), _worker(position)) for worker, position in positions.items())


def _plan_picture(run: Run, event: Mapping[str, Any], name: str) -> Picture:
    down = ", ".join(names_in(event, "failed")) or "no worker"
    try:
        schedule, players = schedule_of(event)
    except (CorruptPlanError, SettingError) as error:
        raise SettingError(str(run.path / EVENTS), f"the plan with {down} down", f"is damaged: {error}") from error
    window = schedule.problem.num_iterations
    what = "An iteration" if window == 1 else f"A window of {window} iterations"
    caption = f"{what} with {down} down: what each worker runs, in the planner's unit of time."
    if players:
        moved = ", ".join(f"{d}:{p} runs as {e}:{q}" for (e, q), (d, p) in sorted(players.items()))
        caption += f" Roles have moved: {moved}."
    return Picture(name, caption, draw_picture(schedule), is_wide=True)


def _stretch_row(stretch: ConfigurationPeriod) -> list[str]:
    first = stretch.after + 1
    down = "not recorded" if stretch.down is None else ", ".join(stretch.down) or "none"
    return [
        f"from {first:,}",
        down,
        f"{stretch.num_steps:,}",
        *_texts(stretch.median_step_ms, lambda ms: seconds_text(ms / 1000)),
        *_texts(stretch.period_ratio, "{:.2f}".format),
        *_texts(stretch.bubble_share, lambda share: f"{100 * share:.1f}"),
    ]


def _texts(value: float | None, show: Any) -> Sequence[str]:
    return ["-" if value is None else show(value)]


def _worker(name: str) -> Worker:
    worker = read_worker(name)
    if worker is None:
        raise CorruptPlanError(f"{name!r} is not a worker")
    return worker


def timeline_section(run: Run, history: History, prefix: str) -> Section:
    """Builds the section on a run's failures, recoveries and returns."""
    title = "Failures and recoveries"
    incidents, presences = incidents_of(run, history), presences_of(run, history)
    if not incidents:
        return Section(title, note="No failures.")
    shown = _shown_presences(presences)
    figure = _draw_timeline(run, history, shown, incidents)
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
        for incident in incidents[:_MOST_INCIDENTS]
    ]
    note = f"The first {_MOST_INCIDENTS:,} of {len(incidents):,}." if len(incidents) > _MOST_INCIDENTS else ""
    table = Table(["time", "iteration", "what", "who", "how", "took"], rows, num_text=6)
    return Section(title, [Picture(f"{prefix}-timeline", caption, figure, is_wide=True)], [table], note)


def _draw_timeline(run: Run, history: History, presences: Sequence[Uptime], incidents: Sequence[Incident]) -> Figure:
    """Draws completed iterations over the running time, and below them a bar for each worker while it is live.

    Args:
        run: run whose steps are drawn.
        history: history of the run.
        presences: workers to draw, with the periods during which they were live.
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
    for kind, marker in _MARKERS.items():
        kind_incidents = [incident for incident in incidents if incident.kind == kind]
        if not kind_incidents:
            continue
        x = np.array([incident.seconds for incident in kind_incidents])
        y = np.array([float(incident.step) for incident in kind_incidents])
        if seconds_T.size:
            y = np.interp(x, seconds_T, steps_T)
        (line,) = axes.plot(x / unit, y, marker, markersize=7.5, color=MOMENT_COLORS[kind], label=kind, zorder=3)
        line.set(markeredgecolor=INK, markeredgewidth=0.6)
    axes.set_ylabel("iterations done")
    axes.set_ylim(bottom=0)
    legend = axes.legend(loc="upper left", frameon=False, fontsize=FONT_SIZE - 1, ncols=3, handletextpad=0.3)
    for text in legend.get_texts():
        text.set_color(INK)
    axes.margins(y=0.3)


def _shown_presences(presences: Sequence[Uptime]) -> list[Uptime]:
    """Selects the workers that were live for the shortest time, and returns them in mesh order."""
    by_time = sorted(presences, key=lambda presence: sum(end - start for start, end in presence.spans))
    chosen = {presence.name for presence in by_time[:_MOST_PRESENCES]}
    return [presence for presence in presences if presence.name in chosen]
