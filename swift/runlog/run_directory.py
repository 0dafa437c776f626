"""The run directory, which a run writes to while it trains. Does not import JAX.

A resumed run drops the metrics and counts of steps after the checkpoint from which it continues. A process that does
not record, because another process of the run does, uses a ``NullRunDirectory``.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from swift.errors import RunError, SettingError, error_line
from swift.files import replace_file, sync_directory
from swift.runlog.expert_counts import CLASS_COUNTS, KINDS, ClassCounts, CountsWriter, counts_array, cut_entries
from swift.runlog.files import EVENTS, METRICS, cut_after, deduplicate_plan, step_of
from swift.runlog.observers import Observer, TensorBoard
from swift.runlog.reading import CONFIG, SUMMARY, check_new_run, check_same_run


class RunDirectory:
    """A run's directory, opened for writing by :meth:`create` or :meth:`resume`; a context manager.

    Attributes:
        check: function called before each write; raises if another process has taken the directory, see ``Lease``.
    """

    check: Callable[..., None] = staticmethod(lambda **_: None)

    def __init__(self, path: Path, last_step: int, config_text: str, observers: Sequence[Observer] = ()):
        self.path = path
        self._last_step = last_step
        board = TensorBoard()
        board.begin(path, last_step, config_text)  # first, before files are open: it makes a directory, which may fail
        self._counts: CountsWriter | None = None  # a model without experts has none
        self._metrics = (path / METRICS).open("a", encoding="utf-8")
        self._events = (path / EVENTS).open("a", encoding="utf-8")
        self._plans_written: set[str] = set()
        self._observers: list[Observer] = [board]
        for observer in observers:
            self._observers.append(observer)
            self._tell(observer, "begin", path, last_step, config_text)

    @classmethod
    def create(cls, path: str | Path, config_text: str, observers: Sequence[Observer] = ()) -> Self:
        """Starts a run in a directory that holds no run; creates the directory if it is missing.

        Args:
            path: run directory.
            config_text: operative configuration, stored as ``config.gin``.
            observers: observers of the run besides TensorBoard.

        Raises:
            SettingError: the directory already holds a run, or cannot be created. Nothing was written.
        """
        path = Path(path)
        check_new_run(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            replace_file(path / CONFIG, config_text.encode())
            return cls(path, 0, config_text, observers)
        except OSError as error:
            for name in (CONFIG, METRICS, EVENTS):  # otherwise the directory would seem to hold a run
                with suppress(OSError):
                    (path / name).unlink()
            raise SettingError("--run-dir", str(path), f"cannot be made a directory: {error.strerror}") from error

    @classmethod
    def resume(
        cls,
        path: str | Path,
        config_text: str,
        step: int,
        may_change: Collection[str] = (),
        may_lack: Collection[str] = (),
        observers: Sequence[Observer] = (),
    ) -> Self:
        """Continues a run after ``step``: drops the metrics of later steps, and keeps all events.

        ``summary.json`` is removed, since only a finished run has one.

        Args:
            path: run directory.
            config_text: operative configuration with which the run continues.
            step: last step to keep, which is the checkpoint's.
            may_change: settings that may differ from the run's, such as ``Experiment.num_steps``.
            may_lack: settings that the run's configuration may lack, see ``check_same_run``.
            observers: observers of the run besides TensorBoard.

        Raises:
            SettingError: there is no run, its files are damaged, or it has another configuration.
        """
        path = Path(path)
        check_same_run(path, config_text, may_change, may_lack)
        with _write_errors():
            _truncate_record(path, step)
            replace_file(path / CONFIG, config_text.encode())
            (path / SUMMARY).unlink(missing_ok=True)
            return cls(path, step, config_text, observers)

    @property
    def checkpoints_path(self) -> Path:
        """Directory of the run's checkpoints, created with the first checkpoint."""
        return self.path / "checkpoints"

    def log_step(self, metrics: Mapping[str, Any]) -> None:
        """Appends one step's metrics, with the time of the call (ISO 8601, UTC).

        Args:
            metrics: ``step`` (from 1, rising from call to call) and measurements, which may be numpy scalars and
                arrays. A number that is not finite is written as null. Counts by expert class go to a separate file,
                written before the metrics, see ``swift.runlog.expert_counts``.
        """
        self.check()
        scalars = {name: value for name, value in metrics.items() if name not in KINDS}
        record = _plain({"step": metrics["step"], "time": _now()} | scalars)
        assert record["step"] > self._last_step, f"step {record['step']} was logged after step {self._last_step}"
        with _write_errors():
            # Counts first: a step that has metrics then always has its counts too.
            if any(len(metrics.get(kind, ())) for kind in KINDS):
                counts_KLE = counts_array(CLASS_COUNTS, record["step"], [metrics.get(kind) for kind in KINDS])
                self._counts = self._counts or CountsWriter.open(self.path / CLASS_COUNTS)
                self._counts.write(record["step"], counts_KLE)
            self._last_step = record["step"]
            self._metrics.write(_line(record))
            self._metrics.flush()
        self._notify_all("on_step", {**metrics, **record})

    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """Appends one event, with the time of the call (ISO 8601, UTC).

        Args:
            event: name of the event, such as ``failure`` or ``checkpoint``.
            step: last step done before the event.
            **fields: further fields, as in :meth:`log_step`. Each distinct ``plan`` is written only once.
        """
        self.check()
        fields = deduplicate_plan(fields, self._plans_written)
        with _write_errors():
            record = {"time": _now(), "event": event, "step": step} | fields
            self._events.write(_line(record))
            self._events.flush()
        self._notify_all("on_event", record)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes ``summary.json``, which marks the run as finished."""
        self.check()
        with _write_errors():
            replace_file(self.path / SUMMARY, (json.dumps(_plain(summary), indent=2, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Closes all files; a second call does nothing."""
        for file in (self._metrics, self._counts, self._events):
            with suppress(OSError):  # nothing is lost: every line was flushed when it was written
                if file is not None:
                    file.close()
        self._notify_all("end")
        self._observers = []

    def _notify_all(self, method: str, *arguments: Any) -> None:
        for observer in list(self._observers):
            self._tell(observer, method, *arguments)

    def _tell(self, observer: Observer, method: str, *arguments: Any) -> None:
        """Calls an observer; removes it if it raises."""
        try:
            getattr(observer, method)(*arguments)
        except Exception as error:
            self._observers.remove(observer)
            reason = f"{type(observer).__name__}.{method} failed: {error_line(error)}"
            print(f"{reason}; it is not called again in this run", file=sys.stderr)
            if not self._events.closed:
                self.log_event("observer_failed", self._last_step, error=reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class NullRunDirectory(RunDirectory):
    """A run directory that this process does not write to: another process keeps the record.

    Args:
        path: run directory.
    """

    def __init__(self, path: Path):
        self.path = path

    def log_step(self, metrics: Mapping[str, Any]) -> None:
        """Does nothing: the recording process writes the metrics."""

    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """Does nothing: the recording process writes events."""

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Does nothing: the recording process writes the summary."""

    def close(self) -> None:
        """Does nothing: no file is open."""


def _truncate_record(path: Path, step: int) -> None:
    """Truncates metrics and counts after a step, and every file after its last complete line.

    It reads only the lines that it removes, since the files may be large.

    Args:
        path: run directory.
        step: last step to keep.

    Raises:
        SettingError: a line, or the header of the counts, is damaged.
    """
    ClassCounts.open(path / CLASS_COUNTS)  # raises for a damaged header before anything is cut
    last = cut_after(path / METRICS, lambda line: step_of(path / METRICS, line) <= step)
    cut_entries(path / CLASS_COUNTS, 0 if last is None else step_of(path / METRICS, last))
    cut_after(path / EVENTS)


@contextmanager
def _write_errors() -> Iterator[None]:
    """Turns an OSError in the block into a RunError that says how to continue."""
    try:
        yield
    except OSError as error:
        text = f"the record of the run cannot be written: {error}: stopped"
        raise RunError(f"{text}; once it can be, --resume continues from the newest checkpoint") from error


def sync_record(path: Path) -> None:
    """Flushes a run's record to disk (fsync), regardless of which process wrote it.

    Call it before each checkpoint, so that after a power failure the record has every iteration that the checkpoint
    includes.

    Args:
        path: run directory.
    """
    for name in (CLASS_COUNTS, METRICS, EVENTS):
        with suppress(FileNotFoundError), (path / name).open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _plain(value: Any) -> Any:
    """Converts a value to JSON's types; numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist() if value.dtype.kind in "iub" else _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_plain(record), allow_nan=False) + "\n"
