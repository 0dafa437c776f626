"""The history of a run on one clock: its events, and the configurations that ran its iterations.

Shape suffixes: T steps.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from swift.errors import SettingError
from swift.runlog.events import EVENTS
from swift.runlog.reading import Run

BEGINNINGS = ("start", "resume")


@dataclass(frozen=True)
class Timed:
    """An event, and the seconds for which the run had been running when it came."""

    seconds: float
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the event."""
        return str(self.fields["event"])


@dataclass(frozen=True)
class Span:
    """An invocation of a run, from its first event to its last known one, in seconds of running."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class History:
    """A run on its own clock, which stops between two invocations.

    Attributes:
        events: events in order.
        spans: invocations in order.
        step_s_T: float64[T], time at which each recorded step was done, in seconds of running; NaN if not recorded.
    """

    events: list[Timed]
    spans: list[Span]
    step_s_T: np.ndarray

    @property
    def end_s(self) -> float:
        """Seconds for which the run has been running."""
        return self.spans[-1].end_s if self.spans else 0.0

    def span_of(self, seconds: float) -> int:
        """Index of the invocation to which a time belongs."""
        return max(0, bisect_right([span.start_s for span in self.spans], seconds) - 1)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive iterations of the same workers and ranks.

    Attributes:
        after: last iteration before the stretch.
        start_s, end_s: start and end of the stretch, in seconds of running.
        down: workers or ranks that were down throughout; None if the record does not name them.
        plan: event with the ``plan`` of a pipeline, see ``swift.schedules.read_plan``, and its ``failed`` workers; None
            for a single worker, or if none is recorded.
        num_steps: iterations of the stretch that were not run again later.
        median_step_ms, period_ratio, bubble_share: medians over these iterations; None if unknown.
    """

    after: int
    start_s: float
    end_s: float
    down: tuple[str, ...] | None
    plan: Mapping[str, Any] | None
    num_steps: int
    median_step_ms: float | None
    period_ratio: float | None
    bubble_share: float | None


def history_of(run: Run) -> History:
    """Puts a run's events and steps on its own clock.

    Raises:
        SettingError: an event or a step has no valid time, or an event has no name.
    """
    for number, event in enumerate(run.events, start=1):
        if not isinstance(event.get("event"), str) or not isinstance(event.get("step", 0), int):
            raise _damaged(run, EVENTS, f"event {number}", "must have a name and a step")
    event_times = [_seconds(run, EVENTS, f"event {n}", event.get("time")) for n, event in enumerate(run.events, 1)]
    step_times_T = run.metrics.times_T
    starts = _starts(run, event_times)
    known = np.sort(np.concatenate([event_times, step_times_T[np.isfinite(step_times_T)]]))
    spans, offsets, total_s = [], [], 0.0
    for start, following in pairwise([*starts, float("inf")]):
        before = int(np.searchsorted(known, following))
        last = max(start, float(known[before - 1])) if before else start
        offsets.append(total_s - start)
        spans.append(Span(total_s, total_s + last - start))
        total_s = spans[-1].end_s

    def on_clock(times: Any) -> np.ndarray:
        span = np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)
        return times + np.array(offsets)[span] if starts else np.asarray(times, float)

    events = [Timed(seconds, event) for seconds, event in zip(on_clock(event_times).tolist(), run.events, strict=True)]
    return History(events, spans, on_clock(step_times_T))


def stretches_of(run: Run, history: History) -> list[Stretch]:
    """Returns the stretches of a run in order, including those of which no iteration remains."""
    everybody = {name for timed in history.events for name in names_in(timed.fields, "processes", "members")}
    begun: list[dict[str, Any]] = []
    down: set[str] | None = None
    generation = None
    for timed in history.events:
        event = timed.fields
        if timed.name == "epoch":
            down, generation = everybody - set(names_in(event, "members")), event.get("epoch")
        elif timed.name == "reconfigure":
            down = ((down or set()) | set(names_in(event, "failed"))) - set(names_in(event, "rejoined"))
        elif timed.name in BEGINNINGS and "processes" not in event:
            down = set(names_in(event, "failed")) if "failed" in event else None
        elif timed.name == "plan" and begun and event.get("epoch", generation) == generation:
            begun[-1]["plan"] = event if isinstance(event.get("plan"), dict) else None
            continue
        else:
            continue
        after = int(event.get("step", 0)) - (timed.name == "reconfigure")
        named = None if down is None else tuple(sorted(down))
        begun.append({"after": after, "start_s": timed.seconds, "down": named, "plan": None})
    index_T = _stretch_of_steps(run, history, begun)
    ends = [*(stretch["start_s"] for stretch in begun[1:]), history.end_s][: len(begun)]
    measured = {name: run.metrics.scalars(name) for name in ("step_ms", "period_ratio", "bubble_share")}
    return [
        Stretch(**facts, end_s=end_s, **_measured(measured, index_T == index))
        for index, (facts, end_s) in enumerate(zip(begun, ends, strict=True))
    ]


def names_in(event: Mapping[str, Any], *fields: str) -> list[str]:
    """Returns the names of workers, ranks or processes in some fields of an event."""
    found = [event.get(field) for field in fields]
    return [str(name) for names in found if isinstance(names, list) for name in names]


def is_number(value: object) -> bool:
    """Whether a value of a JSON document is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_in(run: Run, event: Mapping[str, Any], name: str) -> float | None:
    """Returns a number in an event; None if it is missing. Raises SettingError if it is not a number."""
    value = event.get(name)
    if value is not None and not is_number(value):
        raise _damaged(run, EVENTS, f"{name} of {event['event']!r}", f"must be a number, and is {value!r}")
    return value


def _stretch_of_steps(run: Run, history: History, begun: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Returns the index of each step's stretch, by time where known, else by iteration; -1 before the first one."""
    starts = [stretch["start_s"] for stretch in begun]
    by_time_T = np.searchsorted(starts, history.step_s_T, side="right") - 1
    if np.isfinite(history.step_s_T).all():
        return by_time_T
    by_step_T = np.full(len(by_time_T), -1)
    for index, stretch in enumerate(begun):
        by_step_T[run.metrics.steps_T > stretch["after"]] = index
    return np.where(np.isfinite(history.step_s_T), by_time_T, by_step_T)


def _measured(measured: Mapping[str, np.ndarray], is_own_T: np.ndarray) -> dict[str, Any]:
    def median(name: str) -> float | None:
        values_T = measured[name][is_own_T]
        values_T = values_T[np.isfinite(values_T)]
        return float(np.median(values_T)) if values_T.size else None

    return {
        "num_steps": int(is_own_T.sum()),
        "median_step_ms": median("step_ms"),
        "period_ratio": median("period_ratio"),
        "bubble_share": median("bubble_share"),
    }


def _starts(run: Run, times: Sequence[float]) -> list[float]:
    """Returns the start of each invocation; older records of `launch` lack the event of the first."""
    names = [event["event"] for event in run.events]
    begun = []
    for index, name in enumerate(names):
        if name in BEGINNINGS:
            # A run in one process records the checkpoint that it restores before it records that it resumes.
            is_restored = index > 0 and names[index - 1] == "restore"
            begun.append(times[index - is_restored])
    return sorted({min(times), *begun}) if times else []


def _seconds(run: Run, file: str, what: str, time: Any) -> float:
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError) as error:
        raise _damaged(run, file, what, f"must have a time, and has {time!r}") from error


def _damaged(run: Run, file: str, what: str, allowed: str) -> SettingError:
    return SettingError(str(run.path / file), what, allowed)
