"""Reader of spot-instance traces in the two formats published by Bamboo's authors (NSDI'23).

Events are ``milliseconds,add|remove,node`` without a header; availability is ``YYYY-MM-DD, HH:MM:SS, live instances``.
"""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from swift.errors import SettingError, check_seed
from swift.tools.simulate.traces.trace import Event, Trace

SETTING = "trace"
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_MAX_NODES = 100_000
_MAX_EVENTS = 1_000_000
_MAX_BYTES = 64_000_000
_TOO_LONG = f"must have at most {_MAX_EVENTS:,} rows and changes of nodes, in {_MAX_BYTES // 1_000_000} MB"


class _Row(NamedTuple):
    line: int
    time_s: float
    fields: tuple[str, ...]


def read_trace(path: Path, warn: Callable[[str], None], seed: int = 0) -> Trace:
    """Reads the trace in a file, whose format is detected from its first row.

    Rows that are out of order are sorted stably. The trace ends with its last row.

    Args:
        path: path of the file.
        warn: function called with a line on the number of rows out of order.
        seed: seed for the choice of nodes where the file has only their number.

    Raises:
        SettingError: the file or a row cannot be read; the message has the line number.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingError(SETTING, str(path), f"cannot be read: {reason}") from error
    rows = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not rows:
        raise SettingError(SETTING, str(path), "has no rows")
    if len(rows) > _MAX_EVENTS or len(text) > _MAX_BYTES:
        raise SettingError(SETTING, str(path), _TOO_LONG)
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
    counts = {row.time_s - begin: int(row.fields[0]) for row in ordered}  # of several at one time the last one counts
    changes = (abs(count - before) for before, count in pairwise([0, *counts.values()]))
    if sum(changes) > _MAX_EVENTS:
        raise SettingError(SETTING, str(path), _TOO_LONG)
    return _trace(path, _come_and_go(counts.items(), random.Random(seed)), last - begin)


def _come_and_go(counts: Iterable[tuple[float, int]], source: random.Random) -> list[Event]:
    """Makes events that reach these node counts; added nodes are new, and removed ones are random."""
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
        raise SettingError(SETTING, str(path), "has no length: all its rows have the same time")
    return Trace(tuple(events), horizon_s)


def _mistake(path: Path, number: int, line: str, allowed: str) -> SettingError:
    return SettingError(SETTING, str(path), f"line {number}, {line.strip()[:60]!r}: {allowed}")
