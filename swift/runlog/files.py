"""The files of a run's record: metrics and events, one JSON object on each line.

The files may be too large to read at once, so ``lines_from_end`` and ``cut_after`` work from the end. ``Metrics`` keeps
the numbers of all steps in memory, as a column for each metric; counts by expert class stay in their file. Each
distinct plan is written once, and later events refer to it by its ID: a plan for many workers takes hundreds of
kilobytes, and a run with a thousand failures uses only a few plans.

Shape suffixes: T steps.
"""

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Self, overload

import numpy as np

from swift.errors import SettingError
from swift.runlog.expert_counts import CLASS_COUNTS, KINDS, ClassCounts

EVENTS, METRICS = "events.jsonl", "metrics.jsonl"
_NO_COLUMNS = {"step", "time"}
ROUTER_PREFIX = "router."
"""Beginning of the names of a router's own numbers in the metrics; those of a layer end in its number."""
_MOST_STEPS = 2**53
_NULL = float("inf")
"""Stands for JSON's null in a column: a number that was not finite. NaN stands for a metric that a step lacks."""


def parse_object(text: bytes) -> dict[str, Any] | None:
    """Parses a JSON object; returns None if the text is anything else."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def is_plan(line: bytes) -> bool:
    """Returns whether a line of events is a plan; nearly all bytes of a long log are plans, which need no parsing."""
    return b'"event": "plan"' in line[:100]  # name and step come before the plan


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file one by one; skips an incomplete last line.

    Args:
        path: path of the file; a missing file has no objects.

    Raises:
        SettingError: a complete line is not a JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = parse_object(line)
            if record is not None:
                yield record
            elif line.endswith(b"\n"):
                raise SettingError(str(path), f"line {number}", "is damaged: not a JSON object")


def lines_from_end(path: Path, block_bytes: int = 2**16) -> Iterator[tuple[int, bytes]]:
    """Yields the complete lines of a file, the last one first.

    Args:
        path: path of the file.
        block_bytes: bytes to read at once.

    Yields:
        (offset of the first byte after the line and its line feed; the line without its line feed).
    """
    with path.open("rb") as file:
        # ``rest`` is the end of a line that begins in an earlier block.
        start, rest, line_end = file.seek(0, os.SEEK_END), b"", -1
        while start:
            end, start = start, max(start - block_bytes, 0)
            file.seek(start)
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            if lines and line_end < 0:
                line_end = start + len(rest) + sum(len(line) + 1 for line in lines[:-1]) + 1
                lines.pop()  # what follows the last line feed is an incomplete line
            for line in reversed(lines):
                yield line_end, line
                line_end -= len(line) + 1
        if line_end >= 0:
            yield line_end, rest


def step_of(path: Path, line: bytes) -> int:
    """Returns the step of a line; raises SettingError if the line has none."""
    record = parse_object(line) or {}
    step = record.get("step")
    if not isinstance(step, int):
        shown = line[:60].decode(errors="replace")
        raise SettingError(str(path), shown, "is damaged: not a JSON object with a step")
    return step


def cut_after(path: Path, is_kept: Callable[[bytes], bool] = lambda _: True) -> bytes | None:
    """Truncates a file after the last complete line to keep; does not read the lines before it.

    Args:
        path: path of the file; may be missing.
        is_kept: returns whether to keep a line, and all lines before it.

    Returns:
        The last line that is kept, or None if no line is kept.
    """
    if not path.exists():
        return None
    end, last = next(((end, line) for end, line in lines_from_end(path) if is_kept(line)), (0, None))
    os.truncate(path, end)
    return last


def deduplicate_plan(fields: Mapping[str, Any], written: set[str]) -> dict[str, Any]:
    """Adds ``plan_id`` to an event that has a ``plan``, and drops the plan itself if it was written before.

    Args:
        fields: fields of the event.
        written: IDs of the plans written so far; this plan's ID is added.
    """
    if "plan" not in fields:
        return dict(fields)
    identity = sha256(json.dumps(fields["plan"], sort_keys=True).encode()).hexdigest()[:16]
    remaining = {name: value for name, value in fields.items() if name != "plan" or identity not in written}
    written.add(identity)
    return remaining | {"plan_id": identity}


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads the events of a run, each with the full plan that it refers to.

    Args:
        path: run directory.

    Raises:
        SettingError: a line is damaged.
    """
    events, plans = [], dict[str, Any]()
    for event in read_objects(path / EVENTS):
        if "plan_id" in event:
            identity = str(event.pop("plan_id"))
            event["plan"] = plans[identity] = plans.get(identity) or event.get("plan")
        events.append(event)
    return events


class Metrics(Sequence[dict[str, Any]]):
    """A run's metrics: a sequence of one record per step, each built on demand.

    Args:
        columns: columns of numbers, by metric.
        counts: counts by expert class; None if there are none.
        name: name of the file, for errors.
    """

    def __init__(self, columns: "_Columns", counts: ClassCounts | None, name: str):
        self._columns, self.counts, self._name = columns, counts, name
        self.steps_T = np.array(columns.steps, np.int64)
        self.times_T = np.array(columns.times, np.float64)

    @classmethod
    def of(
        cls,
        records: Iterable[Mapping[str, Any]],
        name: str = METRICS,
        open_counts: Callable[[], ClassCounts | None] | None = None,
    ) -> Self:
        """Builds metrics from records in the order of their steps.

        Args:
            records: records with ``step`` and, except in old runs, ``time``.
            name: name of the file, for errors.
            open_counts: function that opens the file of counts; called after the last record has been read.

        Raises:
            SettingError: a record is damaged.
        """
        columns = _Columns(name)
        for record in records:
            columns.add(record)
        return cls(columns, open_counts() if open_counts else None, name)

    def scalars(self, name: str) -> np.ndarray:
        """Returns one metric over the steps.

        Returns:
            float64[T]; NaN where a step does not have the metric, or has null.

        Raises:
            SettingError: a step has a value that is not a number.
        """
        if name == "step":
            return self.steps_T.astype(np.float64)
        for index, fields in self._columns.others.items():
            if name in fields:
                raise SettingError(
                    f"{name} of step {self.steps_T[index]}", fields[name], f"must be a number, in {self._name}"
                )
        values_T = np.full(len(self), np.nan)
        column = self._columns.numbers.get(name, ())
        values_T[: len(column)] = column
        values_T[values_T == _NULL] = np.nan
        return values_T

    @property
    def names(self) -> list[str]:
        """Names of the metrics that are numbers, in the order of their first step."""
        return list(self._columns.numbers)

    @property
    def router_numbers(self) -> list[str]:
        """Names of the router's own numbers, as means over the layers."""
        names = (name for name in self._columns.numbers if name.startswith(ROUTER_PREFIX))
        return sorted(name for name in names if not name.rpartition(".")[2].isdigit())

    @property
    def last_step(self) -> int:
        """Last step that has a record; 0 if there are no records."""
        return int(self.steps_T[-1]) if len(self) else 0

    @property
    def missing(self) -> list[range]:
        """Ranges of steps, up to the last one, that have no record."""
        steps_T = np.concatenate([[0], self.steps_T])
        return [range(int(steps_T[at]) + 1, int(steps_T[at + 1])) for at in np.flatnonzero(np.diff(steps_T) > 1)]

    def __len__(self) -> int:
        return len(self.steps_T)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        positions = range(len(self))[index]
        return (
            self._record(positions)
            if isinstance(positions, int)
            else [self._record(position) for position in positions]
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._record, range(len(self)))

    def _record(self, index: int) -> dict[str, Any]:
        step = int(self.steps_T[index])
        record: dict[str, Any] = {"step": step}
        if np.isfinite(self.times_T[index]):
            record["time"] = datetime.fromtimestamp(self.times_T[index], UTC).isoformat(timespec="milliseconds")
        record |= self._columns.numbers_at(index) | self._columns.others.get(index, {})
        counts_KLE = None if self.counts is None else self.counts.at(step, hint=index)
        if counts_KLE is not None:
            record |= zip(KINDS, counts_KLE.tolist(), strict=True)
        return record


class _Columns:
    """Columns of metrics, to which records are added one by one."""

    def __init__(self, name: str):
        self._name = name
        self.steps, self.times = array("q"), array("d")
        self.numbers: dict[str, array[float]] = {}
        self.others: dict[int, dict[str, Any]] = {}  # values that are not numbers, by the step's index
        self._types: dict[str, set[type]] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        index, step = len(self.steps), record.get("step")
        last = self.steps[-1] if self.steps else 0
        if not isinstance(step, int) or not last < step < _MOST_STEPS:
            raise SettingError(self._name, f"line {index + 1}", f"step {step!r} must be above {last}")
        self.steps.append(step)
        self.times.append(self._seconds(step, record.get("time")))
        for name, value in record.items():
            if name in _NO_COLUMNS:
                continue
            if value is None or isinstance(value, int | float):
                self._put(index, name, value)
            else:
                self.others.setdefault(index, {})[name] = value

    def numbers_at(self, index: int) -> dict[str, Any]:
        """Returns the numbers of a step by name, with the types with which they were written."""
        numbers: dict[str, Any] = {}
        for name, column in self.numbers.items():
            value = column[index] if index < len(column) else np.nan
            if value == _NULL:
                numbers[name] = None
            elif value == value:
                kinds = self._types[name]
                numbers[name] = value if len(kinds) > 1 or float in kinds else next(iter(kinds))(value)
        return numbers

    def _put(self, index: int, name: str, value: float | None) -> None:
        column = self.numbers.get(name)
        if column is None:
            column, self._types[name] = self.numbers.setdefault(name, array("d")), set()
        if len(column) < index:
            column.extend([np.nan] * (index - len(column)))
        try:
            column.append(_NULL if value is None else value)
        except OverflowError:
            line = f"line {index + 1}"
            raise SettingError(self._name, line, f"is damaged: its {name} has more digits than a number") from None
        if value is not None:
            self._types[name].add(type(value))

    def _seconds(self, step: int, time: Any) -> float:
        if time is None:
            return np.nan
        try:
            return datetime.fromisoformat(time).timestamp()
        except (TypeError, ValueError) as error:
            raise SettingError(self._name, f"step {step}", f"must have a time, and has {time!r}") from error


def read_metrics(path: Path) -> Metrics:
    """Reads the metrics of a run.

    Args:
        path: run directory.

    Raises:
        SettingError: a line, or the header of the counts, is damaged.
    """
    # A run in progress writes a step's counts before its metrics. Opening the counts last ensures that they are there.
    records = read_objects(path / METRICS)
    return Metrics.of(records, str(path / METRICS), lambda: ClassCounts.open(path / CLASS_COUNTS))


def ranges_of(steps: Sequence[int]) -> list[range]:
    """Groups ascending steps into ranges of consecutive steps.

    >>> ranges_of([3, 7, 8, 9])
    [range(3, 4), range(7, 10)]
    """
    breaks = np.flatnonzero(np.diff(steps) > 1) + 1
    return [range(int(group[0]), int(group[-1]) + 1) for group in np.split(np.array(steps), breaks) if len(group)]


def ranges_text(ranges: Sequence[range], most: int = 10) -> str:
    """Formats at most ``most`` ranges of steps.

    >>> ranges_text([range(3, 4), range(7, 10)]), ranges_text([range(1, 2), range(3, 4), range(5, 6)], most=2)
    ('3, 7-9', '1, 3 and 1 more')
    """
    texts = [f"{steps[0]}-{steps[-1]}" if len(steps) > 1 else f"{steps[0]}" for steps in ranges[:most]]
    return ", ".join(texts) + f" and {len(ranges) - most} more" * (len(ranges) > most)
