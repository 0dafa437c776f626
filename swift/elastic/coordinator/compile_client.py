"""The preparer as the supervisor has it: told what to make ready, ended where it is silent, started again so often."""

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
    """Has programs prepared by a process of its own, without which the run goes on, and compiles for itself.

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
        self._is_told = False
        self._due: float | None = None  # when it has to be heard next; None: it is not there, or is being ended
        self._num_lives = 0  # in a row that have made nothing ready

    def ask(self, wish: CompileRequest) -> None:
        """Notes what is to be made ready from now on, see ``follow``."""
        self._wish, self._is_told = wish, False

    def follow(self) -> None:
        """Tells the preparer what it was not told yet; starts it where it is not there, unless it is given up."""
        if self._command is None or self._wish is None or self._is_told:
            return
        if PREPARER not in self._children:
            if self._num_lives == _MAX_LIVES:
                return
            self._num_lives += 1
            self._children.start(PREPARER, self._command, self._log)
            self._due = self._clock() + self._start_s
        self._children.say(PREPARER, COMPILE_REQUESTS.line(self._wish))
        self._is_told = True

    def hear(self, line: str, when: float) -> Prepared | CompileFailed | None:
        """What the preparer has said; None: that it is alive."""
        said = COMPILE_NEWS.read(line)
        if self._due is not None:
            self._due = when + self._silence_s
        if isinstance(said, Prepared) and said.compiled:
            self._num_lives = 1
        return None if isinstance(said, Alive) else said

    def end_if_silent(self) -> bool:
        """Kills a preparer that was not heard in time; its death is on its way then. Whether it was."""
        if self._due is None or self._clock() <= self._due:
            return False
        self._due = None
        self._children.signal(PREPARER, signal.SIGKILL)
        return True

    def died(self) -> bool:
        """The preparer has died: the next one is to be told the same. Whether there will be one."""
        self._due, self._is_told = None, False
        return self._num_lives < _MAX_LIVES
