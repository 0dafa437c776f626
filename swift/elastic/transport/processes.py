"""Child processes of a supervisor: their interface, and those on its own node.

Those of other nodes are ``swift.elastic.transport.fleet``'s.
"""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NamedTuple, Protocol, Self

MEMORY = "{memory}"
"""In a command: the memory of the node on which it is started."""
_STOP_S, _KILL_S = 10.0, 2.0


class Heard(NamedTuple):
    """A line that a child has sent."""

    who: Hashable
    line: str
    time: float


class Death(NamedTuple):
    """A child that is gone for certain.

    Attributes:
        who: it is.
        why: in a few words.
        time: when it was found out.
        is_own: whether it died by itself, and not with its node.
    """

    who: Hashable
    why: str
    time: float
    is_own: bool = True


class Children(Protocol):
    """Children by any name that is never used twice."""

    def __contains__(self, who: object) -> bool:
        """Whether it was started and its death has not been reported yet."""

    def start(self, who: Hashable, command: Sequence[str], log: Path) -> None:
        """Starts a child whose standard error is added to a log; ``MEMORY`` in its command is that of its node.

        It is not waited for: what it is told meanwhile it hears when it is there, and where it cannot be started its
        death is told.
        """

    def say(self, who: Hashable, line: str) -> None:
        """Says a line to a child, if it still is there."""

    def signal(self, who: Hashable, number: signal.Signals) -> None:
        """Sends a signal to a child, if it still is there; its death follows, where that is deadly."""

    def heard(self, timeout_s: float) -> list[Heard]:
        """What was said since the last time; waits where nothing was."""

    def deaths(self) -> list[Death]:
        """Who has died since the last time; all that it has said can be heard by then."""

    def wait_for(self, whom: Collection[Hashable]) -> None:
        """Waits for the ends of children that have been told to end; by force, where they do not."""

    def abandon(self, who: Hashable) -> None:
        """Counts a child no more that was killed and does not die; where there are other nodes, its own is shunned."""

    def away_s(self, who: Hashable) -> float:
        """For how long there has been no node on which a child could be started; 0: there is one."""


class _Child:
    """A child that is being started, or was, by a thread of its own, which then reads what it says.

    To start a process is to read and write files (its program, its log). Whoever asks for it beats, and must not wait
    for a file system that does not answer.

    Args:
        who: it is.
        popen: starts it.
        heard: where to put what it says.
    """

    def __init__(self, who: Hashable, popen: Callable[[], subprocess.Popen[str]], heard: SimpleQueue[Heard]):
        self._who, self._heard = who, heard
        self._lock, self._is_there = threading.Lock(), threading.Event()
        self._popen: subprocess.Popen[str] | None = None
        self._trouble: str | None = None
        self._unsaid: list[str] = []
        self._unsent: list[signal.Signals] = []
        self._thread = threading.Thread(target=self._run, args=(popen,), daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """Says a line, once the child is there."""
        with self._lock:
            if self._popen is None:
                self._unsaid.append(line)
            else:
                self._write(self._popen, line)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, once the child is there."""
        with self._lock:
            if self._popen is None:
                self._unsent.append(number)
            else:
                self._popen.send_signal(number)

    def is_dead(self, timeout_s: float = 0.0) -> bool:
        """Whether it has ended, or could not be started; after so many seconds at most."""
        deadline = time.monotonic() + timeout_s
        if not self._is_there.wait(timeout_s):
            return False
        if self._popen is None or self._popen.poll() is not None:
            return True
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        try:
            self._popen.wait(left_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def bury(self) -> str:
        """Why it has ended; by then all that it has said was heard."""
        if self._popen is None:
            return self._trouble or ""
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._thread.join(timeout=1.0)
        code = self._popen.returncode
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _run(self, popen: Callable[[], subprocess.Popen[str]]) -> None:
        try:
            made = popen()
        except OSError as error:
            self._trouble = f"cannot be started: {error}"
            self._is_there.set()
            return
        with self._lock:
            self._popen = made
            for line in self._unsaid:
                self._write(made, line)
            for number in self._unsent:
                made.send_signal(number)
        self._is_there.set()
        assert made.stdout is not None
        with made.stdout:
            for line in made.stdout:
                if line.endswith("\n"):  # else it was killed in the midst of saying it
                    self._heard.put(Heard(self._who, line, time.monotonic()))

    def _write(self, popen: subprocess.Popen[str], line: str) -> None:
        assert popen.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # its death is on its way
            popen.stdin.write(line)
            popen.stdin.flush()


class OwnChildren:
    """Children on this node; a context manager, which leaves none behind.

    Args:
        environment: of all.
        memory: of this node; takes the place of ``MEMORY`` in commands.
        heard: where to put what they say.
    """

    def __init__(self, environment: Mapping[str, str], memory: Path, heard: SimpleQueue[Heard] | None = None):
        self._environment, self._memory = dict(environment), str(memory)
        self._children: dict[Hashable, _Child] = {}
        self._abandoned: dict[Hashable, _Child] = {}
        self._heard: SimpleQueue[Heard] = SimpleQueue() if heard is None else heard

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for who in list(self._children):
            self.signal(who, signal.SIGKILL)
        self.wait_for(list(self._children))

    def __contains__(self, who: object) -> bool:
        return who in self._children

    def away_s(self, who: Hashable) -> float:  # noqa: ARG002
        """See ``Children``: this node is here."""
        return 0.0

    def start(self, who: Hashable, command: Sequence[str], log: Path) -> None:
        """See ``Children``."""
        assert who not in self._children, f"{who} is there already"
        words = [self._memory if word == MEMORY else word for word in command]
        self._children[who] = _Child(who, lambda: self._popen(words, log), self._heard)

    def _popen(self, command: Sequence[str], log: Path) -> subprocess.Popen[str]:
        with log.open("ab") as errors:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the supervisor, which tells them
            )

    def say(self, who: Hashable, line: str) -> None:
        """See ``Children``."""
        if who in self._children:
            self._children[who].say(line)

    def signal(self, who: Hashable, number: signal.Signals) -> None:
        """See ``Children``."""
        child = self._children.get(who, self._abandoned.get(who))
        if child is not None:
            child.signal(number)

    def abandon(self, who: Hashable) -> None:
        """See ``Children``."""
        if who in self._children:
            self._abandoned[who] = self._children.pop(who)

    def heard(self, timeout_s: float) -> list[Heard]:
        """See ``Children``."""
        lines: list[Heard] = []
        with suppress(Empty):
            lines.append(self._heard.get(timeout=timeout_s))
            while True:
                lines.append(self._heard.get_nowait())
        return lines

    def deaths(self) -> list[Death]:
        """See ``Children``."""
        for who in [who for who, child in self._abandoned.items() if child.is_dead()]:
            self._abandoned.pop(who).bury()  # after all; nobody waits for that any more
        dead = [who for who, child in self._children.items() if child.is_dead()]
        return [Death(who, self._children.pop(who).bury(), time.monotonic()) for who in dead]

    def wait_for(self, whom: Collection[Hashable]) -> None:
        """See ``Children``."""
        left = self._wait_for(whom, _STOP_S)
        for who in left:
            self.signal(who, signal.SIGKILL)
        for who in self._wait_for(left, _KILL_S):
            self.abandon(who)

    def _wait_for(self, whom: Collection[Hashable], timeout_s: float) -> list[Hashable]:
        """Who is still there in the end."""
        deadline, left = time.monotonic() + timeout_s, []
        for who in whom:
            if self._children[who].is_dead(max(0.0, deadline - time.monotonic())):
                self._children.pop(who).bury()
            else:
                left.append(who)
        return left
