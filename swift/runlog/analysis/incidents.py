"""Incidents of a run: failures, recoveries, rejoins, restores."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from swift.runlog.analysis.history import History, Timed, names_in, number_in
from swift.runlog.reading import Run

Kind = Literal["failure", "recovery", "return", "restore", "resume", "stop"]
KINDS: tuple[Kind, ...] = ("failure", "recovery", "return", "restore", "resume", "stop")

_STOPS = {
    "stage_lost": "a stage has no live worker",
    "rank_lost": "the state of a lost rank has no copy",
    "not_finite": "the loss was no longer finite",
    "misplaced": "an expert class had no slot",
    "checkpoint_failed": "a checkpoint was not saved",
    "interrupt": "interrupted",
    "give_up": "a process has failed too often",
}


@dataclass(frozen=True)
class Incident:
    """An incident of a run.

    Attributes:
        kind: kind of incident.
        seconds: time of the incident, in seconds of running.
        step: last iteration done before it, or the first one after it.
        who: workers, ranks or processes concerned; empty if all are.
        what: phrase for people.
        took_s: cost of the incident in seconds; None if unknown.
    """

    kind: Kind
    seconds: float
    step: int
    who: tuple[str, ...]
    what: str
    took_s: float | None = None


def incidents_of(run: Run, history: History) -> list[Incident]:
    """Returns all incidents of a run, in order.

    Raises:
        SettingError: an event is damaged.
    """
    return [incident for timed in history.events for incident in _incidents(run, timed)]


def reconfigure_s(run: Run, timed: Timed) -> float:
    """Cost of a reconfiguration in seconds: planning, compiling and moving the state."""
    parts = [number_in(run, timed.fields, name) or 0.0 for name in ("plan_ms", "compile_ms", "move_ms")]
    return sum(parts) / 1000


def since_s(run: Run, timed: Timed) -> float:
    """Start of what an event records, in seconds of running: a reconfiguration is recorded when it is over."""
    return max(0.0, timed.seconds - reconfigure_s(run, timed)) if timed.name == "reconfigure" else timed.seconds


def _incidents(run: Run, timed: Timed) -> Iterator[Incident]:
    event = timed.fields
    at = (timed.seconds, int(event.get("step", 0)))
    failed, rejoined = names_in(event, "failed"), names_in(event, "rejoined")
    match timed.name:
        case "reconfigure":
            how = "prepared" if event.get("prepared") else "not prepared"
            took_s: float | None = reconfigure_s(run, timed)
            at = (since_s(run, timed), at[1])
            if failed:
                yield Incident("failure", *at, tuple(failed), f"the others continue, {how}", took_s)
                took_s = None
            if rejoined:
                yield Incident("return", *at, tuple(rejoined), f"rejoined, {how}", took_s)
            if "cuts" in event:
                yield Incident("recovery", *at, (), "blocks move among the survivors", took_s)
        case "death":
            found_ms = 1000 * (number_in(run, event, "detection_s") or 0.0)
            text = f"died ({event.get('why')}), found after {found_ms:.0f} ms"
            yield Incident("failure", *at, (str(event.get("process")),), text)
        case "recovery":
            again = number_in(run, event, "rerun_steps") or 0
            text = f"the others continue after iteration {event.get('after')}, {again:g} run again"
            yield Incident("recovery", *at, tuple(failed), text, number_in(run, event, "recovery_s"))
        case "join":
            who = tuple(names_in(event, "joined"))
            yield Incident("return", *at, who, "rejoined", number_in(run, event, "join_s"))
        case "move":
            took_s = number_in(run, event, "move_s")
            yield Incident("recovery", *at, (), "blocks move among the survivors", took_s)
        case "restore":
            yield Incident("restore", *at, (), f"from the checkpoint of iteration {at[1]}")
        case "reshard":
            yield Incident("restore", *at, (), "the state is resharded for the live ranks")
        case "restart_all":
            yield Incident("restore", *at, (), f"all processes are restarted: {event.get('why')}")
        case "resume":
            yield Incident("resume", *at, (), f"continues after iteration {at[1]}")
        case name if name in _STOPS:
            yield Incident("stop", *at, (), _STOPS[name])
