"""Follows the files of a run, and condenses what was read into a snapshot.

Each line is read once, and memory does not grow with the run. Whether a run lives is judged by its lease; where there
is none, as in a copy of the files, by lines that arrive. Clocks of two machines are compared only for the age of the
last line that was there at first.

Shape suffixes: B bins of steps, L MoE layers, E expert classes, R entries, K kinds of counts.
"""

import errno
import math
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from swift.errors import SettingError, printable
from swift.report.history import (
    BEGINNINGS,
    STOPS,
    Incident,
    Timed,
    incidents_in,
    mesh_order,
    names_of,
    present_after,
)
from swift.runlog.expert_counts import CLASS_COUNTS, ClassCounts
from swift.runlog.files import EVENTS, METRICS, is_plan, parse_object
from swift.runlog.following import FollowedLines, LeaseWatch
from swift.runlog.lease import Owner, Verdict
from swift.runlog.reading import CONFIG, settings_in
from swift.train.display import StepTimer
from swift.watch.series import BinnedSeries

SERIES = ("loss", "tokens_per_s", "drop_fraction")
"""Metrics that are kept over all iterations."""
NUM_COUNTED = 20
"""Number of the latest iterations over which the loads of experts are averaged."""
_NUM_TIMED = 50
_MOST_INCIDENTS = 100
_LEAST_SILENCE_S, _SILENT_STEPS = 30.0, 10
"""A run stalls after this many seconds without a line, or after the usual time of so many iterations if longer."""
_MOST_STEP = 2**53
_ENDS = ("finish", "stop", "interrupt")
"""Events that a process writes last."""
_PROGRESS = ("checkpoint", "generation_live", "recovery", "rejoin")
"""Events after which an earlier trouble no longer counts as the reason of a stop."""

State = Literal["absent", "starting", "running", "stalled", "stopped", "ended"]


@dataclass(frozen=True)
class ExpertLoads:
    """Loads of the experts, averaged over the latest iterations.

    Attributes:
        num_steps: number of iterations.
        popularity_LE: float64[L, E], tokens routed to each class.
        replicas_LE: float64[L, E], slots of each class.
        dropped_LE: float64[L, E], tokens dropped.
    """

    num_steps: int
    popularity_LE: np.ndarray
    replicas_LE: np.ndarray
    dropped_LE: np.ndarray


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """A run as far as its files have been read.

    Attributes:
        path: run directory.
        name: name of the directory; control characters are escaped.
        state: ``absent`` if there is no run in the directory, ``stalled`` if a living run has been silent for unusually
            long, ``stopped`` if its process has ended before the last iteration.
        reason: phrase that explains the state; may be empty.
        silent_s: seconds since the last line; None if no line was read.
        num_steps: last step of the run; None if unknown.
        metrics: newest record of ``metrics.jsonl``; empty before the first step.
        series: metrics in ``SERIES`` over all steps, float64[B], see ``BinnedSeries.means_B``.
        seconds_left: estimated remaining time; None if unknown, or if the run is not running.
        loads: loads of the experts; None for a model without experts.
        members: names of all workers, ranks or processes, in mesh order; empty if unknown.
        absent_members: names of those that are not there now.
        num_failures: number of failures so far.
        incidents: latest incidents in order; their ``seconds`` are times since 1970.
        saved_step: step of the newest checkpoint; None if there is none.
        read_share: share of the files that has been read.
        num_damaged: number of lines that could not be understood.
        trouble: message on a file that cannot be read; may be empty.
    """

    path: Path
    name: str
    state: State
    reason: str
    silent_s: float | None
    num_steps: int | None
    metrics: Mapping[str, Any]
    series: Mapping[str, np.ndarray]
    seconds_left: float | None
    loads: ExpertLoads | None
    members: tuple[str, ...]
    absent_members: tuple[str, ...]
    num_failures: int
    incidents: tuple[Incident, ...]
    saved_step: int | None
    read_share: float
    num_damaged: int
    trouble: str

    @property
    def step(self) -> int:
        """Newest recorded step; 0 before the first."""
        return int(self.metrics.get("step", 0))


class _StepsRead:
    """The figures that are kept of ``metrics.jsonl``."""

    def __init__(self) -> None:
        self.newest: dict[str, Any] = {}
        self.series = {name: BinnedSeries() for name in SERIES}
        self.timed: deque[tuple[int, float]] = deque(maxlen=_NUM_TIMED)
        self.num_damaged = 0

    def add(self, lines: list[bytes]) -> None:
        """Adds new lines."""
        steps: list[int] = []
        values: dict[str, list[float]] = {name: [] for name in SERIES}
        for line in lines:
            record = parse_object(line) or {}
            step = record.get("step")
            if type(step) is not int or not self.step < step < _MOST_STEP:
                self.num_damaged += 1
                continue
            self.newest = record
            steps.append(step)
            for name in SERIES:
                values[name].append(_number(record.get(name)))
            self.timed.append((step, _seconds(record)))
        for name, series in self.series.items():
            series.add(np.array(steps, np.int64), np.array(values[name]))

    @property
    def step(self) -> int:
        """Newest step; 0 before the first."""
        return int(self.newest.get("step", 0))

    @property
    def newest_s(self) -> float:
        """Time of the newest step since 1970; NaN if unknown."""
        return self.timed[-1][1] if self.timed else math.nan

    def timer(self, num_steps: int, since: float) -> StepTimer:
        """Returns a timer of the latest steps that were recorded after a time."""
        timer = StepTimer(num_steps)
        for step, seconds in self.timed:
            if seconds >= since:
                timer.passed(step, seconds)
        return timer


class _EventsRead:
    """The figures that are kept of ``events.jsonl``."""

    def __init__(self, path: Path):
        self._path = path
        self.incidents: deque[Incident] = deque(maxlen=_MOST_INCIDENTS)
        self.num_failures = self.num_damaged = 0
        self.members: set[str] = set()
        self.present: set[str] = set()
        self.saved_step: int | None = None
        self.begun_s = self.newest_s = math.nan
        self.end: str | None = None  # event that the newest invocation wrote last, if it has ended
        self.trouble: str | None = None  # newest event that may explain a stop

    def add(self, lines: list[bytes]) -> None:
        """Adds new lines."""
        for line in lines:
            if is_plan(line):  # plans are not shown
                continue
            event = parse_object(line) or {}
            seconds, name = _seconds(event), event.get("event")
            if not isinstance(name, str) or type(event.get("step", 0)) is not int or math.isnan(seconds):
                self.num_damaged += 1
                continue
            try:
                self._add(Timed(seconds, event))
            except (SettingError, OverflowError):  # an integer may have any number of digits
                self.num_damaged += 1

    def _add(self, timed: Timed) -> None:
        incidents, names = list(incidents_in(self._path, timed)), names_of(self._path, timed)
        self.newest_s = timed.seconds
        self.members.update(names)
        present = present_after(timed, self.present, self.members)
        self.present = self.present if present is None else present
        self.incidents += incidents
        self.num_failures += sum(incident.kind == "failure" for incident in incidents)
        if timed.name == "checkpoint":
            self.saved_step = timed.fields.get("step")
        if timed.name in BEGINNINGS:
            self.begun_s, self.end, self.trouble = timed.seconds, None, None
        elif timed.name in _ENDS:
            self.end = timed.name
        elif timed.name in STOPS:
            self.trouble = timed.name
        elif timed.name in _PROGRESS:
            self.trouble = None

    @property
    def reason(self) -> str:
        """Reason for which the run stopped; empty if no event says it."""
        name = self.trouble or ("interrupt" if self.end == "interrupt" else None)
        return "" if name is None else STOPS[name]


class RunFollower:
    """Follows the files of a run.

    Args:
        path: run directory; may be missing.
        clock: returns the time in seconds, on a clock that is never set.
        wall_clock: returns the seconds since 1970.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ):
        self._path, self._clock, self._wall_clock = path, clock, wall_clock
        self._files = {name: FollowedLines(path / name) for name in (METRICS, EVENTS)}
        self._left = dict.fromkeys(self._files, 0)
        self._steps, self._events = _StepsRead(), _EventsRead(path)
        self._lease = LeaseWatch(path)
        self._config: tuple[int, ...] = ()
        self._num_steps: int | None = None
        self._loads: ExpertLoads | None = None
        self._loads_step = 0
        self._line_time: float | None = None  # when the newest line was read
        self._line_age_s = 0.0  # its age at that time
        self._has_caught_up = self._has_grown = False
        self._trouble = ""

    def read(self) -> bool:
        """Reads the next part of each file, a few megabytes at most; returns whether there is more to read at once."""
        self._trouble, has_more, has_new = "", False, False
        for name, file in self._files.items():
            try:
                new = file.read()
            except OSError as error:
                self._trouble = f"{self._path / name} cannot be read: {error.strerror}"
                continue
            if new.is_restarted and name == METRICS:
                self._steps, self._loads, self._loads_step = _StepsRead(), None, 0
            elif new.is_restarted:
                self._events = _EventsRead(self._path)
            (self._steps if name == METRICS else self._events).add(new.lines)
            self._left[name] = new.bytes_left
            has_more = has_more or bool(new.lines and new.bytes_left)
            has_new = has_new or bool(new.lines)
        if has_new:
            self._line_time = self._clock()
            self._line_age_s = 0.0 if self._has_caught_up else self._age_s()
            self._has_grown = self._has_caught_up
        self._has_caught_up = self._has_caught_up or not has_more
        return has_more

    def snapshot(self) -> RunSnapshot:
        """Returns the run as read so far; also reads its configuration, its lease and its newest counts."""
        self._read_config()
        self._read_loads()
        state, reason = self._state()
        read, left = sum(file.offset for file in self._files.values()), sum(self._left.values())
        events = self._events
        return RunSnapshot(
            path=self._path,
            name=printable(self._path.resolve().name),
            state=state,
            reason=reason,
            silent_s=self._silent_s(),
            num_steps=self._num_steps,
            metrics=self._steps.newest,
            series={name: series.means_B for name, series in self._steps.series.items()},
            seconds_left=self._seconds_until(self._num_steps) if state == "running" else None,
            loads=self._loads,
            members=tuple(sorted(events.members, key=mesh_order)),
            absent_members=tuple(sorted(events.members - events.present, key=mesh_order)),
            num_failures=events.num_failures,
            incidents=tuple(events.incidents),
            saved_step=events.saved_step,
            read_share=read / max(1, read + left),
            num_damaged=self._steps.num_damaged + events.num_damaged,
            trouble=self._trouble,
        )

    def _age_s(self) -> float:
        """Age of the newest line by its own time; 0 if unknown."""
        newest_s = np.fmax(self._steps.newest_s, self._events.newest_s)
        return 0.0 if np.isnan(newest_s) else max(0.0, self._wall_clock() - float(newest_s))

    def _silent_s(self) -> float | None:
        return None if self._line_time is None else self._clock() - self._line_time + self._line_age_s

    def _seconds_until(self, step: int | None) -> float | None:
        """Estimates the seconds from the newest step to another one; None if unknown."""
        if step is None:
            return None
        return self._steps.timer(step, float(np.nan_to_num(self._events.begun_s))).seconds_left()

    def _state(self) -> tuple[State, str]:
        """Returns the state and its reason."""
        verdict, owner = Verdict.DEAD, None
        try:
            verdict, owner = self._lease.look(self._clock(), self._wall_clock())
        except SettingError as error:
            self._trouble = str(error)
        is_owned = verdict is not Verdict.DEAD
        if not self._config:
            return ("starting" if is_owned else "absent"), ""
        events, silent_s = self._events, self._silent_s() or 0.0
        owned_since = _since(owner) if is_owned and owner is not None else math.nan
        if events.end and not owned_since > events.newest_s:
            return ("ended" if events.end == "finish" else "stopped"), "" if events.end == "finish" else events.reason
        limit_s = max(_LEAST_SILENCE_S, _SILENT_STEPS * (self._seconds_until(self._steps.step + 1) or 0.0))
        if not is_owned and not (self._has_grown and silent_s < limit_s):
            return "stopped", events.reason or "no process writes it"
        # A process that has just taken the directory has not said so in the events yet.
        if not self._steps.newest or self._steps.newest_s < np.fmax(events.begun_s, owned_since):
            return "starting", ""
        if silent_s > limit_s:
            return "stalled", STOPS[events.trouble] if events.trouble else ""
        return "running", ""

    def _read_config(self) -> None:
        """Reads the number of steps again if the configuration was replaced, as by a run that is extended."""
        try:
            status = (self._path / CONFIG).stat()
            key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if key == self._config:
                return
            if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for a writer
                raise OSError(errno.EINVAL, "is not a regular file")
            text = (self._path / CONFIG).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            self._config, self._num_steps = (), None
            return
        except OSError as error:
            self._trouble = f"{self._path / CONFIG} cannot be read: {error.strerror}"
            return
        number = settings_in(text).get("Experiment.num_steps", "").partition("=")[2].strip()
        self._config, self._num_steps = key, int(number) if number.isdecimal() and len(number) < 16 else None

    def _read_loads(self) -> None:
        step = self._steps.step
        if step == self._loads_step:
            return
        try:
            counts = ClassCounts.open(self._path / CLASS_COUNTS)
            self._loads = None if counts is None else _loads_of(counts)
            self._loads_step = step
        except (SettingError, OSError) as error:
            self._loads, self._trouble = None, str(error)


def _loads_of(counts: ClassCounts) -> ExpertLoads | None:
    """Averages the newest entries of a file of counts; returns None if there is none."""
    total_KLE, number = np.zeros(()), 0
    for steps, counts_RKLE in counts.blocks(max(0, counts.num_entries - NUM_COUNTED)):
        total_KLE, number = total_KLE + counts_RKLE.sum(0, dtype=np.float64), number + len(steps)
    if not number:
        return None
    popularity_LE, replicas_LE, dropped_LE = total_KLE / number
    return ExpertLoads(number, popularity_LE, replicas_LE, dropped_LE)


def _number(value: object) -> float:
    """Returns a JSON number as a float; NaN for anything else."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _seconds(record: Mapping[str, Any]) -> float:
    """Returns the time of a record, in seconds since 1970; NaN if it has none."""
    try:
        return datetime.fromisoformat(record["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return math.nan


def _since(owner: Owner) -> float:
    """Returns the time at which an owner took the directory, in seconds since 1970; NaN if unknown."""
    return _seconds({"time": owner.since})
