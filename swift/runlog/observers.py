"""Observers, which receive a run's iterations and events: trackers, or code of your own.

Every run has the observer ``TensorBoard``. Only viewers read its files, so an error there never delays or ends the run.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import register_writer_factory
from tensorboardX.summary import histogram_raw, scalar

from swift.runlog.expert_counts import KINDS
from swift.runlog.files import ROUTER_PREFIX

_GROUPS = {
    "train": ("loss", "aux_loss", "validation_loss", "validation_bits_per_byte", "grad_norm", "learning_rate"),
    "speed": ("step_ms", "input_ms", "tokens_per_s", "mfu", "bubble_share", "period_ratio"),
    "experts": (
        *("tokens", "loss_weight", "tokens_routed", "tokens_dropped", "tokens_overflowed"),
        *("drop_fraction", "load_imbalance"),
    ),
    "workers": ("live_workers", "live_ranks"),
}
"""Metrics by the group in which trackers show them."""
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}
_SCHEME = "swift-file"
_FLUSH_S = 10


class Observer:
    """Base class of observers. Receives every record after it is written; override the methods that you need.

    An observer that raises is not called again, and the run continues. Calls come one at a time, in the order of the
    record, and the run waits for each; with ``launch`` they run in a thread of the supervisor.
    """

    def begin(self, run_dir: Path, step: int, config: str) -> None:
        """Called when a run begins or is resumed.

        Args:
            run_dir: run directory.
            step: iterations done so far; above 0 in a resumed run.
            config: operative configuration, one ``Name.setting = value`` per line.
        """

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Receives the record of an iteration, as in ``metrics.jsonl``, with the counts by expert class."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Receives the record of an event, as in ``events.jsonl``, with ``event``, ``step`` and ``time``."""

    def end(self) -> None:
        """Called when the run, or this invocation of it, ends."""


def grouped_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns a record's numbers by tag, such as ``train/loss``.

    >>> grouped_scalars({"step": 3, "time": "...", "loss": 2.5, "replicas": [[1]], "mine": 1, "router.entropy.0": 2})
    {'train/loss': 2.5, 'other/mine': 1.0, 'router/entropy.0': 2.0}
    """
    numbers = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    return {_tag(name): value for name, value in numbers.items() if name != "step"}


def _tag(name: str) -> str:
    if name.startswith(ROUTER_PREFIX):
        return f"router/{name.removeprefix(ROUTER_PREFIX)}"
    return f"{_GROUP_OF.get(name.partition('/')[0], 'other')}/{name}"


def count_histograms(record: Mapping[str, Any]) -> Iterator[Summary]:
    """Yields a histogram for each kind of count and each layer, in which the experts are the bins.

    Args:
        record: record of an iteration with the counts by expert class, ``[L][E]`` each.
    """
    for kind in KINDS:
        for layer, counts_E in enumerate(record.get(kind, ())):
            counts, limits = np.asarray(counts_E, np.float64), np.arange(len(counts_E)) + 0.5
            total, weighted = counts.sum(), counts * np.arange(len(counts))
            yield histogram_raw(
                f"{kind}/layer {layer}",
                min=0.0,
                max=float(len(counts) - 1),
                num=float(total),
                sum=float(weighted.sum()),
                sum_squares=float((weighted * np.arange(len(counts))).sum()),
                bucket_limits=limits.tolist(),
                bucket_counts=counts.tolist(),
            )


class Board:
    """A TensorBoard file of scalars by iteration.

    It replaces tensorboardX's own ``SummaryWriter``, which writes in a thread that waits by the wall clock. If the
    clock is set back by weeks, that thread ends with an error, and logging then blocks forever.

    Args:
        path: directory of the files; created if it is missing.
        last_step: last iteration to keep; TensorBoard ignores earlier values of later iterations.
    """

    def __init__(self, path: Path, last_step: int):
        path.mkdir(exist_ok=True)
        self._file = EventsWriter(f"{_SCHEME}:{path / 'events'}")
        self._flushed = time.monotonic()
        self._write(last_step + 1, file_version="brain.Event:2")
        # A start event makes TensorBoard discard earlier values from this step on.
        self._write(last_step + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Adds an iteration's numbers by name; flushes the file if the last flush is more than ten seconds ago."""
        for tag, value in values.items():
            self._write(step, summary=scalar(tag, value))
        if self.is_due:
            self._file.flush()
            self._flushed = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the next ``add`` flushes the file."""
        return time.monotonic() - self._flushed > _FLUSH_S

    def add_counts(self, record: Mapping[str, Any]) -> None:
        """Adds histograms of an iteration's counts by expert class."""
        for summary in count_histograms(record):
            self._write(record["step"], summary=summary)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, step: int, **content: Any) -> None:
        self._file.write_event(Event(wall_time=time.time(), step=step, **content))


class TensorBoard(Observer):
    """Writes the numbers of every iteration for TensorBoard, in groups such as ``train`` and ``experts``.

    Load, replicas and drops of every expert are histograms over the experts, by layer: of the first iteration, and of
    one every ten seconds.
    """

    def begin(self, run_dir: Path, step: int, config: str) -> None:
        """See Observer."""
        del config
        self._board, self._has_counts = Board(run_dir / "tensorboard", step), False

    def on_step(self, record: Mapping[str, Any]) -> None:
        """See Observer."""
        if self._board.is_due or not self._has_counts:
            self._board.add_counts(record)
            self._has_counts = True
        self._board.add(grouped_scalars(record), record["step"])

    def end(self) -> None:
        """See Observer."""
        self._board.close()


class _LenientFile:
    """A file that drops all output after its first error."""

    def __init__(self, path: str):
        self._file: BinaryIO | None = None
        with suppress(OSError):
            self._file = open(path, "wb")  # noqa: SIM115

    def write(self, content: bytes) -> None:
        try:
            if self._file is not None:
                self._file.write(content)
        except OSError:
            self.close()

    def flush(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
        except OSError:
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()


class _Files:
    """The file system that tensorboardX uses for paths with ``_SCHEME``."""

    def open(self, path: str) -> _LenientFile:
        return _LenientFile(path.removeprefix(f"{_SCHEME}:"))


register_writer_factory(_SCHEME, _Files())
