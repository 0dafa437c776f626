"""A run's history on one clock: its configurations, incidents, worker uptimes, and time by cause.

Incidents are failures, recoveries, rejoins, restores, resumes and stops. Every moment is attributed to exactly one
cause. For a run with several processes, the supervisor accounts for the time, see ``swift.elastic.reporting.goodput``;
for a run in one process, the time by cause is computed here from the record.

Shape suffix: T steps.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from swift.errors import SettingError
from swift.runlog.files import EVENTS
from swift.runlog.reading import Run, scalars
from swift.topology import worker_name

BEGINNINGS = ("start", "resume")
"""Events with which an invocation of a run begins."""

Kind = Literal["failure", "recovery", "return", "restore", "resume", "stop"]
_KINDS: tuple[Kind, ...] = ("failure", "recovery", "return", "restore", "resume", "stop")

STOPS = {
    "stage_lost": "a stage has no live worker",
    "rank_lost": "the state of a lost rank has no copy",
    "non_finite": "the loss was no longer finite",
    "invalid_placement": "an expert class had no slot",
    "checkpoint_failed": "a checkpoint was not saved",
    "interrupt": "interrupted",
    "run_aborted": "a process has failed too often",
}
"""Events after which a run stops, with the reason."""

_CAUSES = ("startup", "useful", "saving", "detection", "reconfiguration", "rerun", "waiting", "other")
"""Causes to which time is attributed.

- startup: time until the first iteration, and the excess of that iteration over the usual duration.
- useful: iterations, each counted once.
- saving: waiting for a checkpoint.
- detection: time from the death or hang of a worker until it is detected.
- reconfiguration: the change to other workers, and the excess of the first iteration after it.
- rerun: iterations that are run again.
- waiting: time during which a stage has no process.
- other: evaluations, writing the record, and iterations that a later invocation ran again.
"""

_MAX_PLACES = 100_000
"""Upper bound on the number of workers or ranks; a record with more is considered damaged."""


@dataclass(frozen=True)
class Timed:
    """An event, with its time on the run's clock, in seconds of running."""

    seconds: float
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the event."""
        return str(self.fields["event"])


@dataclass(frozen=True)
class Span:
    """One invocation of a run, from its first to its last known moment, in seconds on the run's clock."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class History:
    """A run's events and steps on its own clock, which is stopped between invocations.

    Attributes:
        events: events in order.
        spans: invocations in order.
        step_s_T: float64[T], time at which each recorded step ended, in seconds of running; NaN if not recorded.
    """

    events: list[Timed]
    spans: list[Span]
    step_s_T: np.ndarray

    @property
    def end_s(self) -> float:
        """Total running time of the run, in seconds."""
        return self.spans[-1].end_s if self.spans else 0.0

    def span_of(self, seconds: float) -> int:
        """Returns the index of the invocation that a time belongs to."""
        return max(0, bisect_right([span.start_s for span in self.spans], seconds) - 1)


@dataclass(frozen=True, kw_only=True)
class ConfigurationPeriod:
    """A period of consecutive iterations with the same workers and ranks.

    Attributes:
        after: last iteration before the period.
        start_s, end_s: start and end of the period, in seconds of running.
        down: workers or ranks that were down throughout the period; None if the record does not name them.
        plan: event with a pipeline's ``plan``, see ``swift.schedules.read_plan``, and its ``failed`` workers; None for
            a single worker, or if no plan is recorded.
        num_steps: number of iterations of the period that were not run again later.
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
            raise _damaged(run.path, EVENTS, f"event {number}", "must have a name and a step")
    event_times = [_seconds(run.path, EVENTS, f"event {n}", event.get("time")) for n, event in enumerate(run.events, 1)]
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
        # Times before the first event belong to the first invocation.
        span = np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)
        return times + np.array(offsets)[span] if starts else np.asarray(times, float)

    events = [Timed(seconds, event) for seconds, event in zip(on_clock(event_times).tolist(), run.events, strict=True)]
    return History(events, spans, on_clock(step_times_T))


def configuration_periods(run: Run, history: History) -> list[ConfigurationPeriod]:
    """Returns a run's configuration periods in order, including those whose iterations were all run again."""
    everybody = {name for timed in history.events for name in names_in(timed.fields, "processes", "members")}
    begun: list[dict[str, Any]] = []
    down: set[str] | None = None
    generation = None
    for timed in history.events:
        event = timed.fields
        if timed.name == "generation_live":
            down, generation = everybody - set(names_in(event, "members")), event.get("generation")
        elif timed.name == "reconfigure":
            down = ((down or set()) | set(names_in(event, "failed"))) - set(names_in(event, "rejoined"))
        elif timed.name in BEGINNINGS and "processes" not in event:
            down = set(names_in(event, "failed")) if "failed" in event else None
        elif timed.name == "plan" and begun and event.get("generation", generation) == generation:
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
        ConfigurationPeriod(**facts, end_s=end_s, **_measured(measured, index_T == index))
        for index, (facts, end_s) in enumerate(zip(begun, ends, strict=True))
    ]


def names_in(event: Mapping[str, Any], *fields: str) -> list[str]:
    """Returns the workers, ranks or processes that are named in the given fields of an event."""
    name_lists = [event.get(field) for field in fields]
    return [str(name) for names in name_lists if isinstance(names, list) for name in names]


def _is_number(value: object) -> bool:
    """Whether a JSON value is a number; a boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_in(path: Path, event: Mapping[str, Any], name: str) -> float | None:
    """Returns a number from an event, or None if it is missing.

    Args:
        path: directory of the run, for errors.
        event: event of the run.
        name: field of the event.

    Raises:
        SettingError: the field is not a number.
    """
    value = event.get(name)
    if value is not None and not _is_number(value):
        raise _damaged(path, EVENTS, f"{name} of {event['event']!r}", f"must be a number, and is {value!r}")
    return value


def _stretch_of_steps(run: Run, history: History, begun: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Returns the index of each step's period, by time if known, else by iteration; -1 before the first period."""
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
    """Returns each invocation's start time; older records of ``launch`` lack the event for the first one."""
    names = [event["event"] for event in run.events]
    begun = []
    for index, name in enumerate(names):
        if name in BEGINNINGS:
            # A run in one process records the checkpoint that it restores before the resume itself.
            is_restored = index > 0 and names[index - 1] == "restore"
            begun.append(times[index - is_restored])
    return sorted({min(times), *begun}) if times else []


def _seconds(path: Path, file: str, what: str, time: Any) -> float:
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError) as error:
        raise _damaged(path, file, what, f"must have a time, and has {time!r}") from error


def _damaged(path: Path, file: str, what: str, allowed: str) -> SettingError:
    return SettingError(str(path / file), what, allowed)


@dataclass(frozen=True)
class Incident:
    """A failure, recovery, return, restore, resume or stop.

    Attributes:
        kind: kind of incident.
        seconds: time of the incident, in seconds of running.
        step: last iteration done before the incident, or first iteration after it.
        who: workers, ranks or processes affected; empty if all are affected.
        what: phrase that describes the incident.
        took_s: duration in seconds; None if unknown.
    """

    kind: Kind
    seconds: float
    step: int
    who: tuple[str, ...]
    what: str
    took_s: float | None = None


def incidents_of(run: Run, history: History) -> list[Incident]:
    """Returns a run's incidents in order.

    Raises:
        SettingError: an event is damaged.
    """
    return [incident for timed in history.events for incident in incidents_in(run.path, timed)]


def _reconfigure_s(path: Path, timed: Timed) -> float:
    """Returns the duration of a reconfiguration in seconds: planning, compiling and moving the state."""
    parts = [number_in(path, timed.fields, name) or 0.0 for name in ("plan_ms", "compile_ms", "move_ms")]
    return sum(parts) / 1000


def _since_s(path: Path, timed: Timed) -> float:
    """Returns an event's start in seconds of running; a reconfiguration is recorded at its end."""
    return max(0.0, timed.seconds - _reconfigure_s(path, timed)) if timed.name == "reconfigure" else timed.seconds


def incidents_in(path: Path, timed: Timed) -> Iterator[Incident]:
    """Yields the incidents that an event tells of.

    Args:
        path: directory of the run, for errors.
        timed: event of the run.

    Raises:
        SettingError: the event is damaged.
    """
    event = timed.fields
    at = (timed.seconds, int(event.get("step", 0)))
    failed, rejoined = names_in(event, "failed"), names_in(event, "rejoined")
    match timed.name:
        case "reconfigure":
            how = "prepared" if event.get("prepared") else "not prepared"
            took_s: float | None = _reconfigure_s(path, timed)
            at = (_since_s(path, timed), at[1])
            if failed:
                yield Incident("failure", *at, tuple(failed), f"the others continue, {how}", took_s)
                took_s = None
            if rejoined:
                yield Incident("return", *at, tuple(rejoined), f"rejoined, {how}", took_s)
            if "cuts" in event:
                yield Incident("recovery", *at, (), "blocks move among the survivors", took_s)
        case "process_died":
            found_ms = 1000 * (number_in(path, event, "detection_s") or 0.0)
            text = f"died ({event.get('reason')}), found after {found_ms:.0f} ms"
            yield Incident("failure", *at, (str(event.get("process")),), text)
        case "recovery":
            again = number_in(path, event, "rerun_steps") or 0
            text = f"the others continue after iteration {event.get('resumed_from')}, {again:g} run again"
            yield Incident("recovery", *at, tuple(failed), text, number_in(path, event, "recovery_s"))
        case "rejoin":
            who = tuple(names_in(event, "rejoined"))
            yield Incident("return", *at, who, "rejoined", number_in(path, event, "rejoin_s"))
        case "recut":
            took_s = number_in(path, event, "recut_s")
            yield Incident("recovery", *at, (), "blocks move among the survivors", took_s)
        case "restore":
            yield Incident("restore", *at, (), f"from the checkpoint of iteration {at[1]}")
        case "reshard":
            yield Incident("restore", *at, (), "the state is resharded for the live ranks")
        case "restart_all":
            yield Incident("restore", *at, (), f"restarting all processes: {event.get('reason')}")
        case "resume":
            yield Incident("resume", *at, (), f"continues after iteration {at[1]}")
        case name if name in STOPS:
            yield Incident("stop", *at, (), STOPS[name])


def time_by_cause(run: Run, history: History) -> dict[str, float] | None:
    """Returns the seconds by cause, which sum to the run's total running time, or None if they are unknown.

    Raises:
        SettingError: the record is damaged.
    """
    accounts = _accounts(run)
    if accounts:
        spent = {cause: sum(account.get(f"{cause}_s", 0.0) for account in accounts) for cause in _CAUSES}
        running_s = sum(account["total_s"] for account in accounts)
        if len(accounts) < sum(timed.name in BEGINNINGS for timed in history.events):
            running_s = max(running_s, history.end_s)  # a supervisor that was killed did not record an account
        spent["other"] = max(0.0, running_s - sum(spent.values()))
        return spent
    is_launched = any(timed.name == "generation_live" for timed in history.events)
    if is_launched or not history.spans or not np.isfinite(history.step_s_T).any():
        return None
    return _recorded(run, history)


def _accounts(run: Run) -> list[Mapping[str, float]]:
    """Returns the supervisors' accounts of time by cause, one per invocation; older records have only the last."""
    ends = [event["goodput"] for event in run.events if event.get("goodput") is not None]
    if not ends and run.summary and run.summary.get("goodput") is not None:
        ends = [run.summary["goodput"]]
    for account in ends:
        if not _is_account(account):
            raise SettingError("goodput", account, f"must be seconds by cause, in {run.path}")
    return ends


def _is_account(account: object) -> bool:
    """Whether a JSON value is an account, with the total seconds and, if given, the seconds by cause as numbers."""
    if not isinstance(account, dict):
        return False
    return _is_number(account.get("total_s")) and all(_is_number(account.get(f"{cause}_s", 0.0)) for cause in _CAUSES)


def _recorded(run: Run, history: History) -> dict[str, float]:
    """Computes the time by cause from the ends and durations of iterations, reconfigurations and saves."""
    spent = dict.fromkeys(_CAUSES, 0.0)
    took_T = np.nan_to_num(scalars(run, "step_ms")) / 1000
    usual_s = float(np.median(took_T)) if took_T.size else 0.0
    # At equal times, an event sorts after an iteration, which ended first.
    ends = zip(history.step_s_T.tolist(), took_T.tolist(), strict=True)
    moments: list[tuple[float, bool, Any]] = [(end_s, False, took_s) for end_s, took_s in ends if np.isfinite(end_s)]
    moments += [(timed.seconds, True, timed) for timed in history.events]
    moments.sort(key=_time_and_kind)
    changed_s, cause = 0.0, "startup"  # duration of the reconfiguration, which the next iteration's time includes
    for (_, is_event), group in groupby(moments, key=_time_and_kind):
        items = [item for _, _, item in group]
        if not is_event:  # a window's iterations end together, and each has its share of the time
            own_s = max(0.0, sum(items) - changed_s)
            useful_s = min(own_s, usual_s * len(items)) if cause else own_s
            spent["useful"] += useful_s
            spent[cause or "useful"] += own_s - useful_s
            changed_s, cause = 0.0, ""
            continue
        for timed in items:
            if timed.name in BEGINNINGS:
                changed_s, cause = 0.0, "startup"
            elif timed.name == "reconfigure":
                changed_s, cause = _reconfigure_s(run.path, timed), "reconfiguration"
                spent[cause] += changed_s
            elif timed.name == "checkpoint":
                spent["saving"] += (number_in(run.path, timed.fields, "stall_ms") or 0.0) / 1000
    spent["other"] = max(0.0, history.end_s - sum(spent.values()))
    return spent


def _time_and_kind(moment: tuple[float, bool, Any]) -> tuple[float, bool]:
    return moment[:2]


@dataclass(frozen=True)
class Uptime:
    """The periods during which a worker, expert rank or process was live.

    Attributes:
        name: name, such as ``0:1`` or ``0:1 rank 3``.
        spans: (start, end) in seconds of running, in order.
    """

    name: str
    spans: tuple[tuple[float, float], ...]


def presences_of(run: Run, history: History) -> list[Uptime]:
    """Returns the uptime of every worker, rank or process, in mesh order; empty if the record does not name them.

    Raises:
        SettingError: an event is damaged.
    """
    names = _all_names(run, history)
    since: dict[str, float] = {}
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in names}

    def leave(name: str, seconds: float) -> None:
        start = since.pop(name, None)
        if start is not None:
            spans[name].append((start, seconds))

    for timed in history.events:
        present = present_after(timed, since.keys(), names)
        if present is None:
            continue
        # Members of an invocation leave at its end, not at the start of the next one.
        previous_end_s = history.spans[max(0, history.span_of(timed.seconds) - 1)].end_s
        for name in [name for name in since if name not in present or timed.name in BEGINNINGS]:
            leave(name, min(timed.seconds, previous_end_s) if timed.name in BEGINNINGS else _since_s(run.path, timed))
        since |= {name: timed.seconds for name in names if name in present and name not in since}
    for name in list(since):
        leave(name, history.end_s)
    return [Uptime(name, tuple(spans[name])) for name in names]


def present_after(timed: Timed, before: Collection[str], names: Collection[str]) -> set[str] | None:
    """Returns the workers, ranks or processes that are present after an event, or None if it does not change them.

    Args:
        timed: event of a run.
        before: names of those that were present before the event.
        names: all names of the run, see ``names_of``.
    """
    event = timed.fields
    failed = set(names_in(event, "failed"))
    match timed.name:
        case "start" | "resume":
            return set() if "processes" in event else {*names} - failed
        case "reconfigure":
            return ({*before} - failed) | set(names_in(event, "rejoined"))
        case "process_died":
            return {*before} - {str(event.get("process"))}
        case "generation_live":
            return set(names_in(event, "members"))
        case "restart_all":
            return set()
    return None


def _all_names(run: Run, history: History) -> list[str]:
    """Returns all names that a run's events mention, in mesh order."""
    return sorted({name for timed in history.events for name in names_of(run.path, timed)}, key=mesh_order)


def names_of(path: Path, timed: Timed) -> list[str]:
    """Returns the workers, ranks or processes of a run that an event names, in no order.

    Args:
        path: directory of the run, for errors.
        timed: event of the run.

    Raises:
        SettingError: the event is damaged.
    """
    if timed.name in BEGINNINGS:
        return names_in(timed.fields, "processes") or _topology_names(path, timed.fields)
    if timed.name in ("reconfigure", "generation_live"):
        return names_in(timed.fields, "failed", "rejoined", "members")
    return []


def _topology_names(path: Path, event: Mapping[str, Any]) -> list[str]:
    """Returns the workers' names, or the expert ranks' if there is a single pipeline."""
    numbers = [number_in(path, event, name) for name in ("pipelines", "stages", "ranks")]
    counts = [count for count in numbers if count is not None]
    if len(counts) < len(numbers):
        return []
    if any(count < 1 or count != int(count) for count in counts) or math.prod(counts) > _MAX_PLACES:
        raise SettingError(str(path / EVENTS), " x ".join(f"{count:g}" for count in counts), "is not a topology")
    pipelines, stages, ranks = map(int, counts)
    if pipelines > 1:
        return list(map(worker_name, product(range(pipelines), range(stages))))
    return [f"0:{p} rank {r}" for p, r in product(range(stages), range(ranks))]


def mesh_order(name: str) -> tuple[list[int], str]:
    """Returns a sort key for names of workers, ranks or processes; numbers within a name are compared by value."""
    numbers = "".join(character if character.isdigit() else " " for character in name)
    return [int(number) for number in numbers.split()], name
