"""Configurations of a run, and the schedule of each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from swift.errors import SettingError
from swift.runlog.analysis.history import History, Stretch, names_in, stretches_of
from swift.runlog.events import EVENTS
from swift.runlog.reading import Run
from swift.schedules.plans.normalize import Move, after_moves, denormalize, failure_counts, normalize
from swift.schedules.plans.store import DamagedPlanError, read_plan
from swift.schedules.schedule import Schedule
from swift.tools.draw.picture import draw_picture
from swift.tools.report.sections.parts import Picture, Section, Table, seconds_text
from swift.topology import Worker, read_worker

MAX_DRAWN = 8
MAX_ROWS = 100


def plans_section(run: Run, history: History, prefix: str) -> Section:
    """Makes the section on configurations: a row for each stretch, and a Gantt chart for each distinct plan."""
    title = "Configurations that ran"
    stretches = [stretch for stretch in stretches_of(run, history) if stretch.num_steps]
    if not stretches:
        return Section(title, note="No configuration is recorded.")
    different: dict[str, Mapping[str, Any]] = {}
    for stretch in stretches:
        if stretch.plan is not None:
            different.setdefault(str([stretch.plan.get(name) for name in ("plan", "failed", "places")]), stretch.plan)
    pictures = [
        _picture(run, event, f"{prefix}-plan{index}") for index, event in enumerate([*different.values()][:MAX_DRAWN])
    ]
    headings = ["iterations", "down", "iterations kept", "median", "period (x fault-free)", "bubble (%)"]
    table = Table(headings, [_row(stretch) for stretch in stretches[:MAX_ROWS]], num_text=2)
    notes = [
        "No schedule is recorded; a single worker has none." * (not pictures),
        f"The schedules of {MAX_DRAWN} of {len(different)} configurations are drawn." * (len(different) > MAX_DRAWN),
        f"The first {MAX_ROWS} of {len(stretches):,} configurations are listed." * (len(stretches) > MAX_ROWS),
    ]
    return Section(title, pictures, [table], " ".join(filter(None, notes)))


def schedule_of(event: Mapping[str, Any]) -> tuple[Schedule, dict[Worker, Worker]]:
    """Reads the schedule of an event ``plan``, with the workers that ran it.

    Returns:
        The schedule, and the worker that has each place of which it is not its own.

    Raises:
        DamagedPlanError, SettingError: the event has no valid schedule.
    """
    planned = read_plan(event["plan"])
    failed = frozenset(map(_worker, names_in(event, "failed")))
    problem = replace(planned.problem, failed=failed)
    moved = _moves(event)
    problem, players = after_moves(problem, moved), {place: worker for worker, place in moved}
    if not planned.problem.is_alike:
        return planned, players
    if failure_counts(problem) != failure_counts(planned.problem):
        raise DamagedPlanError("it is for other failures than those of its event")
    return denormalize(planned, normalize(problem)), players


def _moves(event: Mapping[str, Any]) -> tuple[Move, ...]:
    """Reads who has whose place."""
    places = event.get("places")
    if not isinstance(places, Mapping):
        raise DamagedPlanError(f"{places!r} are not the places of workers")
    return tuple(Move(_worker(worker), _worker(place)) for worker, place in places.items())


def _picture(run: Run, event: Mapping[str, Any], name: str) -> Picture:
    down = ", ".join(names_in(event, "failed")) or "no worker"
    try:
        schedule, players = schedule_of(event)
    except (DamagedPlanError, SettingError) as error:
        raise SettingError(str(run.path / EVENTS), f"the plan with {down} down", f"is damaged: {error}") from error
    window = schedule.problem.num_iterations
    what = "An iteration" if window == 1 else f"A window of {window} iterations"
    caption = f"{what} with {down} down: what each worker runs, in the planner's unit of time."
    if players:
        moved = ", ".join(f"{d}:{p} runs as {e}:{q}" for (e, q), (d, p) in sorted(players.items()))
        caption += f" Roles have moved: {moved}."
    return Picture(name, caption, draw_picture(schedule), is_wide=True)


def _row(stretch: Stretch) -> list[str]:
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
        raise DamagedPlanError(f"{name!r} is not a worker")
    return worker
