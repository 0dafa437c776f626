"""Failure traces: the times at which nodes leave and join, generated or read from a file.

Generated failures occur at random times or are evenly spaced. Files have one of the two formats published by Bamboo's
authors (NSDI'23), without a header: ``milliseconds,add|remove,node`` for events, or
``YYYY-MM-DD, HH:MM:SS, live instances`` for availability.
"""

import heapq
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from swift.errors import SettingError, check_count, check_number, check_seed

_SETTING = "trace"
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_MAX_NODES = 100_000
_MAX_EVENTS = 1_000_000
_MAX_BYTES = 64_000_000
_TOO_LONG = f"must have at most {_MAX_EVENTS:,} rows and changes of nodes, in {_MAX_BYTES // 1_000_000} MB"


class Event(NamedTuple):
    """Event in which a node joins or leaves.

    Attributes:
        time_s: time since the start of the trace, in seconds.
        kind: ``add`` or ``remove``.
        node: name of the node. A node that rejoins under the same name is the same machine, repaired.
    """

    time_s: float
    kind: Literal["add", "remove"]
    node: str


class NodeChange(NamedTuple):
    """All nodes that leave or join at one time.

    Attributes:
        time_s: time since the start of the trace, in seconds.
        removed: nodes that leave.
        added: nodes that join, or that leave and rejoin at the same time.
    """

    time_s: float
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """Sequence of events, with the trace's length.

    Attributes:
        events: events by time; a node is removed only while present, and added only while absent.
        horizon_s: length of the trace in seconds; no event is later.

    Raises:
        SettingError: the length is not positive.
    """

    events: tuple[Event, ...]
    horizon_s: float

    def __post_init__(self) -> None:
        check_number("trace horizon (s)", self.horizon_s, above=0)
        assert all(0 <= event.time_s <= self.horizon_s for event in self.events), "an event outside the trace"

    @property
    def initial(self) -> tuple[str, ...]:
        """Nodes present at the start of the trace, in order."""
        first = next(self._all_changes(), None)
        return first.added if first is not None and first.time_s == 0 else ()

    @property
    def changes(self) -> Iterator[NodeChange]:
        """Changes of nodes after the start, by time."""
        return (change for change in self._all_changes() if change.time_s > 0)

    @property
    def num_failures(self) -> int:
        """Number of times that a node leaves after the start."""
        return sum(len(change.removed) for change in self.changes)

    @property
    def most_nodes(self) -> int:
        """Largest number of nodes present at once."""
        num_nodes, most = len(self.initial), len(self.initial)
        for change in self.changes:
            num_nodes += len(change.added) - len(change.removed)
            most = max(most, num_nodes)
        return most

    @property
    def mean_time_between_failures_s(self) -> float:
        """Trace length divided by the number of failures, in seconds; infinite without failures."""
        return self.horizon_s / self.num_failures if self.num_failures else float("inf")

    def _all_changes(self) -> Iterator[NodeChange]:
        live, position = set[str](), 0
        while position < len(self.events):
            time_s = self.events[position].time_s
            was_live, removed = dict[str, bool](), dict[str, None]()
            while position < len(self.events) and self.events[position].time_s == time_s:
                _, kind, node = self.events[position]
                assert (node in live) == (kind == "remove"), f"{kind} {node}"
                was_live.setdefault(node, node in live)
                if kind == "add":
                    live.add(node)
                else:
                    live.remove(node)
                    if was_live[node]:
                        removed[node] = None
                position += 1
            added = tuple(node for node, was in was_live.items() if node in live and (not was or node in removed))
            if removed or added:
                yield NodeChange(time_s, tuple(removed), added)


def poisson(num_nodes: int, mtbf_s: float, repair_s: float, horizon_s: float, seed: int = 0) -> Trace:
    """Generates failures as a Poisson process, in which the failure rate does not depend on the past.

    Args:
        num_nodes: number of nodes, named ``node1``, ``node2``, ..., all present at the start.
        mtbf_s: mean time between failures in the cluster while all nodes are present, in seconds. A node that is down
            cannot fail.
        repair_s: time after which a failed node returns, in seconds.
        horizon_s: length of the trace, in seconds.
        seed: 32-bit seed for the times of failures and the nodes that fail.
    """
    return _random(num_nodes, mtbf_s, repair_s, horizon_s, seed, lambda source: source.expovariate(1 / mtbf_s))


def weibull(num_nodes: int, mtbf_s: float, shape: float, repair_s: float, horizon_s: float, seed: int = 0) -> Trace:
    """Generates failures with Weibull-distributed times between them.

    Args:
        num_nodes: number of nodes, as for ``poisson``.
        mtbf_s: mean of the distribution, in seconds.
        shape: shape parameter of the distribution. Below 1, failures come in bursts; at 1, they are distributed as in
            ``poisson``; above 1, they are more regular.
        repair_s: time after which a failed node returns, in seconds.
        horizon_s: length of the trace, in seconds.
        seed: 32-bit seed for the times of failures and the nodes that fail.
    """
    check_number("shape", shape, least=0.1)
    check_number("mtbf (s)", mtbf_s, above=0)
    scale = mtbf_s / math.gamma(1 + 1 / shape)
    return _random(num_nodes, mtbf_s, repair_s, horizon_s, seed, lambda source: source.weibullvariate(scale, shape))


def evenly_spaced(num_nodes: int, period_s: float, num_failures: int, seed: int = 0) -> Trace:
    """Generates the removal of one random node per period, as in the traces from Oobleck's artifact.

    Removed nodes do not return. The trace ends with the last removal, which therefore costs nothing.

    Args:
        num_nodes: number of nodes, as for ``poisson``.
        period_s: time between removals, in seconds.
        num_failures: number of removals, limited to the number of nodes.
        seed: 32-bit seed for the nodes that leave.

    >>> trace = evenly_spaced(4, 60.0, 2)
    >>> trace.horizon_s, trace.num_failures, [change.time_s for change in trace.changes]
    (120.0, 2, [60.0, 120.0])
    """
    check_count("nodes", num_nodes, least=1)
    check_number("period (s)", period_s, above=0)
    check_count("num_failures", num_failures, least=1)
    check_seed("seed", seed)
    names = _names(num_nodes)
    victims = random.Random(seed).sample(names, min(num_failures, num_nodes))
    removals = [Event(period_s * index, "remove", node) for index, node in enumerate(victims, start=1)]
    return Trace((*_all_at_once(names), *removals), period_s * len(victims))


def _random(
    num_nodes: int,
    mtbf_s: float,
    repair_s: float,
    horizon_s: float,
    seed: int,
    draw_s: Callable[[random.Random], float],
) -> Trace:
    check_count("nodes", num_nodes, least=1)
    check_number("mtbf (s)", mtbf_s, above=0)
    check_number("repair (s)", repair_s, least=0)
    check_seed("seed", seed)
    source, names = random.Random(seed), _names(num_nodes)
    events, back, down, time_s = _all_at_once(names), list[tuple[float, str]](), set[str](), 0.0
    while (time_s := time_s + draw_s(source)) <= horizon_s:
        while back and back[0][0] <= time_s:
            back_s, node = heapq.heappop(back)
            events.append(Event(back_s, "add", node))
            down.remove(node)
        # Nodes that are down are drawn too, without effect, so that failures are rarer while fewer nodes are present.
        node = names[source.randrange(num_nodes)]
        if node not in down:
            events.append(Event(time_s, "remove", node))
            down.add(node)
            heapq.heappush(back, (time_s + repair_s, node))
    events += [Event(back_s, "add", node) for back_s, node in sorted(back) if back_s <= horizon_s]
    return Trace(tuple(events), horizon_s)


def _names(num_nodes: int) -> list[str]:
    return [f"node{number}" for number in range(1, num_nodes + 1)]


def _all_at_once(names: list[str]) -> list[Event]:
    return [Event(0.0, "add", node) for node in names]


class _Row(NamedTuple):
    line: int
    time_s: float
    fields: tuple[str, ...]


def read_trace(path: Path, warn: Callable[[str], None], seed: int = 0) -> Trace:
    """Reads a trace from a file in either of the two formats; the first row determines which one.

    Rows that are out of order are sorted by time (stable sort). The trace ends with its last row.

    Args:
        path: path of the file.
        warn: called with a one-line message if rows are out of order.
        seed: seed for choosing the nodes that leave, if the file has only numbers of nodes.

    Raises:
        SettingError: the file cannot be read, or a row is not valid; the message has the row's line number.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingError(_SETTING, str(path), f"cannot be read: {reason}") from error
    rows = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not rows:
        raise SettingError(_SETTING, str(path), "has no rows")
    if len(rows) > _MAX_EVENTS or len(text) > _MAX_BYTES:
        raise SettingError(_SETTING, str(path), _TOO_LONG)
    if _DATE.match(rows[0][1].strip()):
        return _availability(path, rows, warn, seed)
    return _events(path, rows, warn)


def _events(path: Path, rows: Sequence[tuple[int, str]], warn: Callable[[str], None]) -> Trace:
    form = "must be MILLISECONDS,add|remove,NODE"
    parsed = []
    for number, line in rows:
        fields = tuple(field.strip() for field in line.split(","))
        if len(fields) != 3 or not re.fullmatch(r"-?\d{1,15}", fields[0], re.ASCII) or not fields[2]:
            raise _mistake(path, number, line, form)
        if fields[0].startswith("-"):
            raise _mistake(path, number, line, "the time is negative")
        if fields[1] not in ("add", "remove"):
            raise _mistake(path, number, line, f"there is no event {fields[1]!r}; {form}")
        parsed.append(_Row(number, int(fields[0]) / 1e3, fields[1:]))
    live, events = set[str](), []
    for row in _sorted(path, parsed, warn):
        kind, node = row.fields
        if (node in live) != (kind == "remove"):
            state = "is already present" if kind == "add" else "is not present"
            raise _mistake(path, row.line, ",".join(row.fields), f"{node} {state} at that time")
        (live.add if kind == "add" else live.remove)(node)
        events.append(Event(row.time_s, "add" if kind == "add" else "remove", node))
    return _trace(path, events, events[-1].time_s)


def _availability(path: Path, rows: Sequence[tuple[int, str]], warn: Callable[[str], None], seed: int) -> Trace:
    check_seed("seed", seed)
    form = "must be YYYY-MM-DD, HH:MM:SS, COUNT"
    parsed = []
    for number, line in rows:
        fields = tuple(field.strip() for field in line.split(","))
        if len(fields) != 3 or not re.fullmatch(r"-?\d{1,9}", fields[2], re.ASCII):
            raise _mistake(path, number, line, form)
        try:
            time = datetime.strptime(f"{fields[0]} {fields[1]} +0000", "%Y-%m-%d %H:%M:%S %z")
        except ValueError as error:
            raise _mistake(path, number, line, form) from error
        if not 0 <= int(fields[2]) <= _MAX_NODES:
            raise _mistake(path, number, line, f"the count must be 0 to {_MAX_NODES:,}")
        parsed.append(_Row(number, time.timestamp(), fields[2:]))
    ordered = _sorted(path, parsed, warn)
    begin, last = ordered[0].time_s, ordered[-1].time_s
    counts = {row.time_s - begin: int(row.fields[0]) for row in ordered}  # the last row at a time wins
    changes = (abs(count - before) for before, count in pairwise([0, *counts.values()]))
    if sum(changes) > _MAX_EVENTS:
        raise SettingError(_SETTING, str(path), _TOO_LONG)
    return _trace(path, _come_and_go(counts.items(), random.Random(seed)), last - begin)


def _come_and_go(counts: Iterable[tuple[float, int]], source: random.Random) -> list[Event]:
    """Builds events after which the numbers of live nodes are ``counts``; added nodes are new, removed ones random."""
    live, num_named, events = list[str](), 0, []
    for time_s, count in counts:
        while len(live) > count:
            events.append(Event(time_s, "remove", live.pop(source.randrange(len(live)))))
        while len(live) < count:
            num_named += 1
            live.append(f"node{num_named}")
            events.append(Event(time_s, "add", live[-1]))
    return events


def _sorted(path: Path, rows: Sequence[_Row], warn: Callable[[str], None]) -> list[_Row]:
    newest, late = rows[0].time_s, []
    for row in rows:
        if row.time_s < newest:
            late.append(row.line)
        newest = max(newest, row.time_s)
    if late:
        count = f"{len(late)} rows are" if len(late) > 1 else "1 row is"
        warn(f"{path}: {count} out of order, the first in line {late[0]}; they are sorted")
    return sorted(rows, key=lambda row: row.time_s)


def _trace(path: Path, events: Sequence[Event], horizon_s: float) -> Trace:
    if horizon_s <= 0:
        raise SettingError(_SETTING, str(path), "has no length: all its rows have the same time")
    return Trace(tuple(events), horizon_s)


def _mistake(path: Path, number: int, line: str, allowed: str) -> SettingError:
    return SettingError(_SETTING, str(path), f"line {number}, {line.strip()[:60]!r}: {allowed}")
