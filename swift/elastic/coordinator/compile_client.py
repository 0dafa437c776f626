"""Client of the compile service: requests programs, kills a silent service, and restarts it a few times."""

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from swift.elastic.transport import (
    COMPILE_NEWS,
    COMPILE_REQUESTS,
    Alive,
    Children,
    CompileFailed,
    CompileRequest,
    Prepared,
)

PREPARER = "preparer"
"""The name of the preparer among the children."""
_MAX_LIVES = 3


class CompileClient:
    """Has programs prepared by a process of its own, without which the run continues, and compiles for itself.

    Args:
        children: among which the preparer is.
        command: that starts it; None: nothing is prepared.
        log: for what it prints.
        start_s: from its start to its first sign of life.
        silence_s: between two of them. One that is silent for longer is ended: it may have the lock of a program.
        clock: in seconds.
    """

    def __init__(
        self,
        children: Children,
        command: Sequence[str] | None,
        log: Path,
        start_s: float,
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._children, self._command, self._log = children, command, log
        self._start_s, self._silence_s, self._clock = start_s, silence_s, clock
        self._wish: CompileRequest | None = None
        self._is_sent = False
        self._due: float | None = None  # when it has to be heard next; None: it is not there, or is being ended
        self._num_lives = 0  # in a row that have made nothing ready

    def ask(self, wish: CompileRequest) -> None:
        """Sets what is to be made ready from now on, see ``follow``."""
        self._wish, self._is_sent = wish, False

    def follow(self) -> None:
        """Sends the newest request, once; starts the service where it does not run, unless it is given up."""
        if self._command is None or self._wish is None or self._is_sent:
            return
        if PREPARER not in self._children:
            if self._num_lives == _MAX_LIVES:
                return
            self._num_lives += 1
            self._children.start(PREPARER, self._command, self._log)
            self._due = self._clock() + self._start_s
        self._children.say(PREPARER, COMPILE_REQUESTS.line(self._wish))
        self._is_sent = True

    def hear(self, line: str, when: float) -> Prepared | CompileFailed | None:
        """Takes a message of the service; None: a sign of life."""
        said = COMPILE_NEWS.read(line)
        if self._due is not None:
            self._due = when + self._silence_s
        if isinstance(said, Prepared) and said.compiled:
            self._num_lives = 1
        return None if isinstance(said, Alive) else said

    def end_if_silent(self) -> bool:
        """Kills a service that was not heard in time, and returns whether it was; its death follows."""
        if self._due is None or self._clock() <= self._due:
            return False
        self._due = None
        self._children.signal(PREPARER, signal.SIGKILL)
        return True

    def died(self) -> bool:
        """Has a next life of the service get the same request; returns whether there will be one."""
        self._due, self._is_sent = None, False
        return self._num_lives < _MAX_LIVES
