"""A process's ear and voice: commands of the supervisor as they come, and what the process says, from any thread."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from swift.launch.output import take_output
from swift.launch.wire import Command, Enter, Halt, Hang, Leave, News, Order, Stop, news_line, read_order
from swift.mesh.epochs import Beat

_BEAT_S, _ABORT_S = 0.5, 0.05
_GONE = 70
"""Exit code of a process whose supervisor is gone."""


class Orders:
    """Listens to the supervisor in a thread of its own; ends the process when there is nobody to listen to.

    Args:
        source: where commands come from, a line each.
        leaving: called when an epoch has to be left at once, also in the midst of a collective; returns what to call,
            again and again, until the main thread has taken the order.
        orphaned: called before the process ends for want of a supervisor.
    """

    def __init__(self, source: TextIO, leaving: Callable[[], Callable[[], None]], orphaned: Callable[[], None]):
        self._source, self._leaving, self._orphaned = source, leaving, orphaned
        self._changed = threading.Condition()
        self._order: Order | None = None
        self._said: Enter | Leave | None = None
        self._taken = 0
        self.halt: Halt | None = None
        self.hangs = False
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    @property
    def newest(self) -> Order | None:
        """The epoch that was ordered last."""
        return self._order

    def wait_for_order(self, after: int, timeout_s: float | None = None) -> Order | None:
        """The newest epoch, once it is newer than ``after``; None if there is none in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_old(after), timeout_s):
                return None
            assert self._order is not None
            self._taken = self._order.form.number
            return self._order

    def may_enter(self, number: int) -> bool:
        """Waits for the leave to form an epoch; False if a newer one was ordered instead."""
        return isinstance(self._wait_for(Enter, number), Enter)

    def wait_for_go(self, number: int) -> Leave | None:
        """The leave to run an epoch; None if a newer one was ordered instead."""
        said = self._wait_for(Leave, number)
        return said if isinstance(said, Leave) else None

    def is_old(self, number: int) -> bool:
        """Whether an epoch is not the newest that was ordered."""
        return self._order is not None and self._order.form.number > number

    def _wait_for(self, kind: type[Enter] | type[Leave], number: int) -> Enter | Leave | None:
        def has_come() -> bool:
            said = self._said
            return isinstance(said, kind) and number == (said.go.number if isinstance(said, Leave) else said.number)

        with self._changed:
            self._changed.wait_for(lambda: has_come() or self.is_old(number))
            return None if self.is_old(number) else self._said

    def _listen(self) -> None:
        try:
            for line in self._source:
                self._hear(read_order(line))
        finally:  # other threads may be in XLA, which does not end in peace
            self._orphaned()
            os._exit(_GONE)

    def _hear(self, order: Command) -> None:
        if isinstance(order, Stop):
            os._exit(0)
        if isinstance(order, Order) and order.form.after is None:
            # Asked for before the order is known: until then it is the epoch to be left.
            abort = self._leaving()
            threading.Thread(target=self._call_off, args=(order.form.number, abort), daemon=True).start()
        with self._changed:
            match order:
                case Order():
                    self._order = order
                case Halt():
                    self.halt = order
                case Hang():
                    self.hangs = True
                case Enter() | Leave():
                    self._said = order
            self._changed.notify_all()

    def _call_off(self, number: int, abort: Callable[[], None]) -> None:
        while self._taken < number:
            abort()
            time.sleep(_ABORT_S)


class Voice:
    """Speaks to the supervisor, and beats: the epoch, the iteration entered and the one finished are set from outside.

    It takes over standard output: whatever else is printed goes to standard error.
    """

    def __init__(self) -> None:
        self._out = take_output()
        self._lock = threading.Lock()
        self.epoch = self.entered = self.finished = 0
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def say(self, kind: type[News], **said: Any) -> None:
        """Says something, see ``swift.launch.wire``."""
        with self._lock:
            self._out.write(news_line(kind, **said))
            self._out.flush()

    def tell_progress(self) -> None:
        """Beats now."""
        self.say(Beat, number=self.epoch, entered=self.entered, finished=self.finished)

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT_S)
            try:
                self.tell_progress()
            except BrokenPipeError:
                os._exit(_GONE)
