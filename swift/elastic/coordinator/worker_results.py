"""Results that workers report: records of iterations, plans, and snapshots to be saved."""

import math
import time
from typing import Any

from swift.elastic.coordinator.last_iteration import LastIteration
from swift.elastic.coordinator.run_spec import RunContext
from swift.elastic.membership.events import Event, Message, Ready
from swift.elastic.transport.worker_messages import (
    DataUnreadable,
    Planned,
    Record,
    SnapshotKept,
    SnapshotMissed,
    WorkerMessage,
)
from swift.errors import RunError

_DATA_REMEDY = "once the data are repaired"


class WorkerResults:
    """Checks and passes on the results of workers.

    Args:
        context: objects of the run.

    Attributes:
        last_iteration: chooses the last iteration of a run that is to stop.
        is_stopping: whether the run is to stop: what is saved from then on is saved in full.
        unreadable: first report of data that cannot be read; from then on no generation runs iterations.
        missed: newest report of a state of which a part could not be kept.
    """

    def __init__(self, context: RunContext):
        self._context, self._reporter = context, context.reporter
        self.last_iteration = LastIteration()
        self.is_stopping = False
        self.unreadable: DataUnreadable | None = None
        self.missed: SnapshotMissed | None = None

    def take(self, message: WorkerMessage) -> Event | None:
        """Takes a message of a member of the run; returns the event that it means for the membership, if any.

        Raises:
            RunError: the message ends the run.
        """
        if isinstance(message, Message):
            return message
        match message:
            case Record(record):
                self._take_record(record)
            case Planned(number, facts):
                self._reporter.plan(number, facts)
            case SnapshotKept(_, stamp, loss):
                if loss is not None:
                    self._check_finite(stamp.step, loss_after=loss)
                self._context.checkpoints.add(message, is_full=self.is_stopping)
            case SnapshotMissed(_, stamp, why):
                self.missed = message
                self._reporter.note("checkpoint_failed", stamp.step, _missed_text(message), error=why)
            case DataUnreadable():
                return self._take_unreadable(message)
        return None

    def check_ended(self) -> None:
        """Raises RunError if a run has ended because data could not be read, or without a part of its newest state."""
        if self.unreadable is not None and not self.is_stopping:
            raise self._unreadable_error(self.unreadable)
        if self.missed is not None and self.missed.stamp.step > (self._context.checkpoints.newest or 0):
            raise RunError(f"{_missed_text(self.missed)}: stopped; {self._context.remedy}")

    def _take_record(self, record: dict[str, Any]) -> None:
        step, flaw = record["step"], record.get("misplaced")
        if flaw is not None:
            self._reporter.note("misplaced", step, None, why=flaw)
            what = f"Experiment.placement: {flaw} at iteration {step}"
            raise RunError(f"{what}: stopped; correct the policy and {self._context.remedy}")
        self._check_finite(step, loss=record["loss"], grad_norm=record["grad_norm"])
        self.last_iteration.record(record["step_ms"] / 1000)
        self._reporter.record(record)

    def _check_finite(self, step: int, **measured: float) -> None:
        """Raises RunError where a measured value of an iteration is not finite."""
        if all(map(math.isfinite, measured.values())):
            return
        self._reporter.note("not_finite", step, None, **measured)
        values = ", ".join(f"{name} = {value}" for name, value in measured.items())
        raise RunError(f"{values} at iteration {step}: stopped; {self._context.remedy}")

    def _take_unreadable(self, message: DataUnreadable) -> Ready:
        """Has the common state saved as a checkpoint, by a new generation that runs no iteration."""
        if self.unreadable is None:
            self.unreadable = message
            self._reporter.note("data_lost", self._reporter.written, message.why, error=message.why)
        elif message.number > self.unreadable.number:  # even saving needs the data
            raise self._unreadable_error(message)
        return Ready(message.member, time.monotonic(), message.number)

    def _unreadable_error(self, message: DataUnreadable) -> RunError:
        return RunError(f"{message.why}: stopped; {self._context.remedy}, {_DATA_REMEDY}")


def _missed_text(missed: SnapshotMissed) -> str:
    where = f"{missed.member.process} cannot keep its part"
    return f"iteration {missed.stamp.step} cannot be saved: {where}: {missed.why}"
