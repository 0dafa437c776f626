"""Decides when a state is written: one request at a time, retries, the fallback, and a writer that dies or stalls.

``Saver`` is pure, so that every order of failures can be tested without files and clocks. Two writers carry out its
actions and report the outcomes: the thread of ``swift train``, see ``swift.train.checkpointer``, and the checkpoint
service of ``swift launch``, see ``CheckpointClient``, which also loads and reshards states.

| event | decision |
|---|---|
| a state is to be saved | replaces saves that wait and a save that has failed; waits until its record is on file |
| a state is to be loaded | a failed save is retried once before it |
| a write fails | is retried after the next pause of ``RETRY_PAUSES_S``, unless a newer save or a load waits |
| the writer dies | is restarted and gets its request again, unless that is a save and a newer one waits; three times |
| the writer is late | is killed, once |
| the fallback is requested | `unsaved`, if there is one, is written outside the run directory |
"""

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, NamedTuple, Self

RETRY_PAUSES_S = (2.0, 5.0, 10.0, 20.0)
"""Pauses before each new attempt of a failed save, s; after the last one, the run goes on to the next save."""
MAX_STARTS = 3
"""Starts of a service in a row, without an answer in between, after which it is given up."""
_RECORD_S = 10.0
"""Seconds that a save waits for the record of its iteration. If all members that had the record have died, it never
comes."""


class WriteRequest(NamedTuple):
    """A state is to be saved, loaded or resharded.

    Attributes:
        kind: ``save``, or ``fallback`` for a save outside the run directory; ``load`` replaces the state of the run,
            ``reshard`` converts it.
        step: iteration of the state; 0 for a load.
        command: further details for the writer.
    """

    kind: Literal["save", "fallback", "load", "reshard"]
    step: int = 0
    command: Any = None

    @property
    def is_write(self) -> bool:
        """Whether a state is written."""
        return self.kind in ("save", "fallback")


class FallbackRequested(NamedTuple):
    """The run ends: what is unsaved is to be written outside the run directory."""


class RecordWritten(NamedTuple):
    """Progress of the run's record.

    Attributes:
        written: last iteration whose record is in the file, or is about to be.
        on_file: last iteration whose record is in the file.
    """

    written: int
    on_file: int


class Written(NamedTuple):
    """The current request has succeeded."""


class WriteFailed(NamedTuple):
    """The current request has failed.

    Attributes:
        reason: cause, in one line.
        is_final: whether another attempt is pointless.
        is_invalid: whether the state is not worth saving anywhere, for example not finite.
    """

    reason: str
    is_final: bool = False
    is_invalid: bool = False


class Draining(NamedTuple):
    """Somebody waits for the current save: its pause ends, and its next failure is final."""


class WriterNeeded(NamedTuple):
    """The writer is to be running."""


class WriterDied(NamedTuple):
    """The process of the writer has ended."""


class TimePassed(NamedTuple):
    """Time has passed; reported regularly.

    Attributes:
        has_slept: whether the machine was asleep, so that answers may be unread: the writer is not killed.
    """

    has_slept: bool = False


_WriterEvent = Written | WriteFailed | WriterNeeded | WriterDied
SaveEvent = WriteRequest | FallbackRequested | RecordWritten | Draining | TimePassed | _WriterEvent


class Write(NamedTuple):
    """Give a request to the writer, which has none."""

    request: WriteRequest


class WriterAction(Enum):
    """Actions on the process of the writer.

    Attributes:
        START: start it.
        KILL: kill it; ``WriterDied`` follows.
        GIVE_UP: nothing more, as it has died too often.
    """

    START = "start"
    KILL = "kill"
    GIVE_UP = "give up"


class FailureReport(NamedTuple):
    """A write has failed.

    Attributes:
        request: the request.
        reason: cause, in one line, and when it is tried again.
    """

    request: WriteRequest
    reason: str

    @property
    def line(self) -> str:
        """Line for the user."""
        step = self.request.step
        if self.request.kind == "fallback":
            return f"the state after iteration {step} could not be kept elsewhere either: {self.reason}"
        return f"the checkpoint of iteration {step} was not saved: {self.reason}"


SaveAction = Write | WriterAction | FailureReport


def newest_text(newest: int | None) -> str:
    """Returns a phrase for the user about the newest checkpoint of a run; None: there is none."""
    return "no other checkpoint is there" if newest is None else f"the checkpoint of iteration {newest} is there"


def nothing_kept(step: int) -> str:
    """Returns the line for the user about a state that is lost."""
    return f"nothing of the state after iteration {step} could be kept"


@dataclass(frozen=True, kw_only=True)
class Saver:
    """A run's requests to its writer, and the failures so far. Times are of one monotonic clock, in seconds.

    Attributes:
        deadline_s: time limit for a request; a writer that takes longer is killed.
        start_s: time that the writer takes to start, in addition.
        is_running: whether the writer is running; a thread always is.
        is_killed: whether the writer is being killed.
        num_starts: consecutive starts without an answer in between.
        ready_by: time by which the writer should have started.
        current: request that the writer has.
        due: time at which the writer is late with it.
        waiting: requests after it, in order.
        requested_at: time of the newest request to save.
        record: progress of the run's record; all of it by default.
        failed: newest save, if it has failed.
        pauses_s: pauses before further attempts to write the newest save, should they fail.
        retry_at: time of the next attempt; None: there will be none.
    """

    deadline_s: float = math.inf
    start_s: float = 0.0
    is_running: bool = True
    is_killed: bool = False
    num_starts: int = 0
    ready_by: float = 0.0
    current: WriteRequest | None = None
    due: float = math.inf
    waiting: tuple[WriteRequest, ...] = ()
    requested_at: float = 0.0
    record: RecordWritten | None = None
    failed: WriteRequest | None = None
    pauses_s: tuple[float, ...] = ()
    retry_at: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request has no answer yet, or a save is to be retried."""
        return self.current is not None or bool(self.waiting) or self.retry_at is not None

    @property
    def unsaved(self) -> WriteRequest | None:
        """Newest save, if it has failed, or waits for its record; None while another request is carried out."""
        waiting = [request for request in self.waiting if request.kind == "save" and self.current is None]
        return waiting[-1] if waiting else self.failed

    def on(self, event: SaveEvent, now: float) -> tuple[Self, tuple[SaveAction, ...]]:
        """Returns the saver after an event, and what is to be done, in this order.

        Args:
            event: what has happened.
            now: time of the event.
        """
        saver, actions = self._after(event, now)
        saver, more = saver._advanced(now)
        return saver, actions + more

    def _after(self, event: SaveEvent, now: float) -> tuple[Self, tuple[SaveAction, ...]]:
        match event:
            case WriteRequest():
                return self._requested(event, now)._started(now)
            case FallbackRequested() if (unsaved := self.unsaved) is not None:
                fallback = unsaved._replace(kind="fallback")  # nobody waits for other requests any more
                return replace(self, waiting=(fallback,), failed=None, retry_at=None)._started(now)
            case RecordWritten():
                return replace(self, record=event), ()
            case Written() if self.current is not None:
                return self._written(self.current)._answered(now), ()
            case WriteFailed() if self.current is not None:
                return self._failed(self.current, event, now)
            case Draining():
                return replace(self, pauses_s=(), retry_at=None if self.retry_at is None else now), ()
            case WriterNeeded():
                return self._started(now)
            case WriterDied():
                return self._died(now)
            case TimePassed(has_slept=False) if self.current is not None and now > self.due:
                return replace(self, is_killed=True, due=math.inf), (WriterAction.KILL,)
        return self, ()

    def _requested(self, request: WriteRequest, now: float) -> Self:
        if request.kind == "save":  # the states of older saves may be gone before these are sent
            waiting = (*(other for other in self.waiting if not other.is_write), request)
            newest = replace(self, failed=None, pauses_s=RETRY_PAUSES_S, retry_at=None)
            return replace(newest, waiting=waiting, requested_at=now)
        failed = self.failed
        if request.kind == "load" and failed is not None and failed not in (self.current, *self.waiting):
            return replace(self, waiting=(*self.waiting, failed, request), retry_at=None)
        return replace(self, waiting=(*self.waiting, request))

    def _written(self, request: WriteRequest) -> Self:
        if request.kind != "save":
            return self
        waiting = tuple(other for other in self.waiting if other != request._replace(kind="fallback"))
        return replace(self, waiting=waiting, failed=None, retry_at=None)

    def _failed(self, request: WriteRequest, event: WriteFailed, now: float) -> tuple[Self, tuple[SaveAction, ...]]:
        saver, again = self._answered(now), ""
        if not request.is_write:
            return saver, ()
        if request.kind == "fallback" or any(other.kind != "reshard" for other in self.waiting):
            saver = replace(saver, failed=None)  # a newer state is to be saved, or the run resumes from another one
        else:
            saver = replace(saver, failed=None if event.is_invalid else request)
            if self.pauses_s and not (event.is_final or event.is_invalid):
                pause_s, *pauses_s = self.pauses_s
                saver = replace(saver, retry_at=now + pause_s, pauses_s=tuple(pauses_s))
                again = f"; trying again in {pause_s:g} s"
        return saver, (FailureReport(request, f"{event.reason}{again}"),)

    def _answered(self, now: float) -> Self:
        return replace(self, current=None, num_starts=1, ready_by=now)

    def _died(self, now: float) -> tuple[Self, tuple[SaveAction, ...]]:
        again = () if self.current is None else (self.current,)
        if again and again[0].kind == "save" and self.waiting and self.waiting[0].is_write:
            again = ()  # a newer save waits
        saver = replace(self, is_running=False, is_killed=False, current=None, waiting=again + self.waiting)
        return (saver, (WriterAction.GIVE_UP,)) if self.num_starts >= MAX_STARTS else saver._started(now)

    def _started(self, now: float) -> tuple[Self, tuple[SaveAction, ...]]:
        if self.is_running:
            return self, ()
        saver = replace(self, is_running=True, num_starts=self.num_starts + 1, ready_by=now + self.start_s)
        return saver, (WriterAction.START,)

    def _advanced(self, now: float) -> tuple[Self, tuple[SaveAction, ...]]:
        """Queues a retry that is due, and sends the first request if the writer has none."""
        saver = self
        if self.retry_at is not None and now >= self.retry_at:
            assert self.failed is not None, "a retry is of a failed save"
            saver = replace(self, waiting=(*self.waiting, self.failed), retry_at=None)
        is_free = saver.is_running and not saver.is_killed and saver.current is None
        if not is_free or not saver.waiting or saver._awaits_record(now):
            return saver, ()
        request, *waiting = saver.waiting
        due = max(now, self.ready_by) + self.deadline_s
        return replace(saver, current=request, waiting=tuple(waiting), due=due), (Write(request),)

    def _awaits_record(self, now: float) -> bool:
        """Whether the first request waits for its record: if the run ended in between, the record would be missing."""
        request, record = self.waiting[0], self.record
        if request.kind != "save" or record is None:
            return False
        has_time = now < self.requested_at + _RECORD_S
        if record.written < request.step and not (has_time and len(self.waiting) == 1):
            return False  # the record is lost, or other requests wait for this save
        return record.on_file < request.step
