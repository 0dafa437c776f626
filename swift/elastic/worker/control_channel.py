"""A process's ear and voice: commands of the supervisor as they come, and what the process says, from any thread."""

import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from swift.elastic.membership import Beat, Enter
from swift.elastic.transport import (
    WORKER_COMMANDS,
    WORKER_NEWS,
    FormGroup,
    Halt,
    Hang,
    StartGeneration,
    Stop,
    WorkerCommand,
    WorkerNews,
)
from swift.elastic.worker.process_setup import take_output

_BEAT_S, _ABORT_S = 0.5, 0.05


class CommandListener:
    """Listens to the supervisor in a thread of its own; ends the process when there is nobody to listen to.

    Args:
        source: where commands come from, a line each.
        leaving: called when a generation has to be left at once, also in the midst of a collective; returns what to
            call, again and again, until the main thread has taken the order.
        gone: called when there is no supervisor any more; does not return.
    """

    def __init__(self, source: TextIO, leaving: Callable[[], Callable[[], None]], gone: Callable[[], NoReturn]):
        self._source, self._leaving, self._gone = source, leaving, gone
        self._changed = threading.Condition()
        self._order: FormGroup | None = None
        self._said: Enter | StartGeneration | None = None
        self._taken = 0
        self.halt: Halt | None = None
        self.hangs = False
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    @property
    def newest(self) -> FormGroup | None:
        """The generation that was ordered last."""
        return self._order

    def wait_for_order(self, after: int, timeout_s: float | None = None) -> FormGroup | None:
        """The newest generation, once it is newer than ``after``; None if there is none in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_old(after), timeout_s):
                return None
            assert self._order is not None
            self._taken = self._order.form.number
            return self._order

    def may_enter(self, number: int) -> bool:
        """Waits for the leave to form a generation; False if a newer one was ordered instead."""
        return isinstance(self._wait_for(Enter, number), Enter)

    def wait_for_go(self, number: int) -> StartGeneration | None:
        """The leave to run a generation; None if a newer one was ordered instead."""
        said = self._wait_for(StartGeneration, number)
        return said if isinstance(said, StartGeneration) else None

    def is_old(self, number: int) -> bool:
        """Whether a generation is not the newest that was ordered."""
        return self._order is not None and self._order.form.number > number

    def _wait_for(self, kind: type[Enter] | type[StartGeneration], number: int) -> Enter | StartGeneration | None:
        def has_come() -> bool:
            said = self._said
            return isinstance(said, kind) and number == (
                said.go.number if isinstance(said, StartGeneration) else said.number
            )

        with self._changed:
            self._changed.wait_for(lambda: has_come() or self.is_old(number))
            return None if self.is_old(number) else self._said

    def _listen(self) -> None:
        try:
            for line in self._source:
                if line.endswith("\n"):  # else the supervisor died in the midst of saying it
                    self._hear(WORKER_COMMANDS.read(line))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # other threads may be in XLA, which does not end in peace
        self._gone()

    def _hear(self, order: WorkerCommand) -> None:
        if isinstance(order, Stop):
            os._exit(0)
        if isinstance(order, FormGroup) and order.form.after is None:
            # Asked for before the order is known: until then it is the generation to be left.
            abort = self._leaving()
            threading.Thread(target=self._call_off, args=(order.form.number, abort), daemon=True).start()
        with self._changed:
            match order:
                case FormGroup():
                    self._order = order
                case Halt():
                    self.halt = order
                case Hang():
                    self.hangs = True
                case Enter() | StartGeneration():
                    self._said = order
            self._changed.notify_all()

    def _call_off(self, number: int, abort: Callable[[], None]) -> None:
        while self._taken < number:
            abort()
            time.sleep(_ABORT_S)


class ControlChannel:
    """Speaks to the supervisor, and beats; generation and iterations entered and finished are set from outside.

    It takes over standard output: whatever else is printed goes to standard error.

    Args:
        gone: called when there is nobody to speak to; does not return.
    """

    def __init__(self, gone: Callable[[], NoReturn]):
        self._out, self._gone = take_output(), gone
        self._lock = threading.Lock()
        self.generation = self.entered = self.finished = 0
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def say(self, kind: type[WorkerNews], **said: Any) -> None:
        """Says something, see ``swift.elastic.transport.worker_messages``."""
        line = WORKER_NEWS.line_of(kind, **said)
        try:
            with self._lock:
                self._out.write(line)
                self._out.flush()
        except BrokenPipeError:
            self._gone()

    def tell_progress(self) -> None:
        """Beats now."""
        self.say(Beat, number=self.generation, entered=self.entered, finished=self.finished)

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT_S)
            self.tell_progress()
