"""A process's ear and voice: commands of the supervisor as they come, and what the process says, from any thread."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from swift.launch.wire import Order, Stop, beat_line, read_order
from swift.mesh.epochs import Go

_BEAT_S = 0.5
_GONE = 70
"""Exit code of a process whose supervisor is gone."""


class Orders:
    """Listens to the supervisor in a thread of its own; ends the process when there is nobody to listen to.

    Args:
        source: where commands come from, a line each.
        abort: called when an epoch has to be left at once, also in the midst of a collective.
    """

    def __init__(self, source: TextIO, abort: Callable[[], None]):
        self._source, self._abort, self._changed = source, abort, threading.Condition()
        self._order: Order | None = None
        self._go: Go | None = None
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    @property
    def newest(self) -> Order | None:
        """The epoch that was ordered last."""
        return self._order

    def wait_for_order(self, after: int) -> Order:
        """The newest epoch, once it is newer than ``after``."""
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None and self._order.form.number > after)
            assert self._order is not None
            return self._order

    def wait_for_go(self, number: int) -> Go | None:
        """The leave to run an epoch; None if a newer epoch was ordered instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_gone(number) or self._is_old(number))
            return None if self._is_old(number) else self._go

    def _has_gone(self, number: int) -> bool:
        return self._go is not None and self._go.number == number

    def _is_old(self, number: int) -> bool:
        return self._order is not None and self._order.form.number > number

    def _listen(self) -> None:
        try:
            for line in self._source:
                self._hear(read_order(line))
        finally:  # other threads may be in XLA, which does not end in peace
            os._exit(_GONE)

    def _hear(self, order: Order | Go | Stop) -> None:
        if isinstance(order, Stop):
            os._exit(0)
        if isinstance(order, Order) and order.form.after is None:
            self._abort()  # before it is known: then the link is still that of the epoch to be left
        with self._changed:
            if isinstance(order, Order):
                self._order = order
            else:
                self._go = order
            self._changed.notify_all()


class Voice:
    """Speaks to the supervisor, and beats: the epoch, the iteration entered and the one finished are set from outside.

    It takes over standard output: whatever else is printed goes to standard error.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._lock = threading.Lock()
        self.epoch = self.entered = self.finished = 0
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def say(self, line: str) -> None:
        """Says a line of ``swift.launch.wire``."""
        with self._lock:
            self._out.write(line)
            self._out.flush()

    def tell_progress(self) -> None:
        """Beats now."""
        self.say(beat_line(self.epoch, self.entered, self.finished))

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT_S)
            try:
                self.tell_progress()
            except BrokenPipeError:
                os._exit(_GONE)
