"""Presence of the workers, expert ranks or processes of a run over time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from swift.errors import SettingError
from swift.runlog.analysis.history import BEGINNINGS, History, Timed, names_in, number_in
from swift.runlog.analysis.incidents import since_s
from swift.runlog.events import EVENTS
from swift.runlog.reading import Run

MAX_PLACES = 100_000
"""More than any cluster has: a record with more is damaged."""


@dataclass(frozen=True)
class Presence:
    """The times in which a worker, expert rank or process took part.

    Attributes:
        name: name, such as ``0:1`` or ``0:1 rank 3``.
        spans: (from, to) in seconds of running, in order.
    """

    name: str
    spans: tuple[tuple[float, float], ...]


def presences_of(run: Run, history: History) -> list[Presence]:
    """Returns the presence of every worker, rank or process, in mesh order; empty if the record does not name them.

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
        present = _present_after(timed, since.keys(), names)
        if present is None:
            continue
        # Whoever was present when an invocation ended left then, not when the next one began.
        previous_end_s = history.spans[max(0, history.span_of(timed.seconds) - 1)].end_s
        for name in [name for name in since if name not in present or timed.name in BEGINNINGS]:
            leave(name, min(timed.seconds, previous_end_s) if timed.name in BEGINNINGS else since_s(run, timed))
        since |= {name: timed.seconds for name in names if name in present and name not in since}
    for name in list(since):
        leave(name, history.end_s)
    return [Presence(name, tuple(spans[name])) for name in names]


def _present_after(timed: Timed, before: Any, names: list[str]) -> set[str] | None:
    """Returns the names of those present from an event on; None if nothing changes."""
    event = timed.fields
    failed = set(names_in(event, "failed"))
    match timed.name:
        case "start" | "resume":
            return set() if "processes" in event else {*names} - failed
        case "reconfigure":
            return ({*before} - failed) | set(names_in(event, "rejoined"))
        case "death":
            return {*before} - {str(event.get("process"))}
        case "epoch":
            return set(names_in(event, "members"))
        case "restart_all":
            return set()
    return None


def _all_names(run: Run, history: History) -> list[str]:
    """Returns all names in a run's events, in mesh order."""
    names: dict[str, None] = {}
    for timed in history.events:
        if timed.name in BEGINNINGS:
            names |= dict.fromkeys(names_in(timed.fields, "processes") or _topology_names(run, timed.fields))
    for timed in history.events:
        if timed.name in ("reconfigure", "epoch"):
            names |= dict.fromkeys(names_in(timed.fields, "failed", "rejoined", "members"))
    return sorted(names, key=_order)


def _topology_names(run: Run, event: Mapping[str, Any]) -> list[str]:
    """Returns the names of the workers; with a single pipeline, those of its expert ranks."""
    given = [number_in(run, event, name) for name in ("pipelines", "stages", "ranks")]
    counts = [count for count in given if count is not None]
    if len(counts) < len(given):
        return []
    if any(count < 1 or count != int(count) for count in counts) or math.prod(counts) > MAX_PLACES:
        raise SettingError(str(run.path / EVENTS), " x ".join(f"{count:g}" for count in counts), "is not a topology")
    pipelines, stages, ranks = map(int, counts)
    if pipelines > 1:
        return [f"{d}:{p}" for d, p in product(range(pipelines), range(stages))]
    return [f"0:{p} rank {r}" for p, r in product(range(stages), range(ranks))]


def _order(name: str) -> tuple[list[int], str]:
    """Returns a sort key that compares numbers in names as numbers."""
    numbers = "".join(character if character.isdigit() else " " for character in name)
    return [int(number) for number in numbers.split()], name
