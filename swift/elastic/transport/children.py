"""Child processes of the supervisor: the interface ``Children``, and the implementation for one node.

The exit of a child is detected here, which is how most failures are detected. ``swift.elastic.transport.nodes``
implements the interface for several nodes.
"""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, Self

from swift.errors import RunError
from swift.machine import num_memory_kills
from swift.tasks import retried, start_thread

MEMORY = "{memory}"
"""Placeholder in a command for the memory directory of the node on which it is started."""
_STOP_S, _KILL_S = 10.0, 2.0
_THREAD_S, _PROCESS_S = 4.0, 20.0
"""Seconds for which starting a thread or a process is retried; the supervisor only waits for the thread."""


class ReceivedLine(NamedTuple):
    """A line that a child has sent, and when it was received, in seconds."""

    child: Hashable
    line: str
    time: float


class Death(NamedTuple):
    """The death of a child.

    Attributes:
        child: name of the child.
        reason: cause, in a few words.
        time: when the death was detected, in seconds.
        is_own: whether the child itself failed, rather than its node.
    """

    child: Hashable
    reason: str
    time: float
    is_own: bool = True


class Children(Protocol):
    """Child processes by name. A name may be reused once the death of its child has been reported."""

    def __contains__(self, child: object) -> bool:
        """Returns whether a child was started and its death has not been reported by ``deaths`` yet."""

    def start(self, child: Hashable, command: Sequence[str], log: Path) -> None:
        """Starts a child without waiting until it runs.

        Lines and signals that are sent meanwhile are delivered once it runs. A child that cannot be started is reported
        as dead.

        Args:
            child: name of the child.
            command: command with its arguments; ``MEMORY`` stands for the memory directory of the child's node.
            log: file to which the child's standard error is appended.
        """

    def hold(self, child: Hashable, command: Sequence[str], log: Path) -> None:
        """Prespawns a process for a child, which ``start`` then uses; does nothing if there already is one.

        Until then the process is not a child: nothing is sent to it, and its death is not reported. If it has died by
        then, ``start`` starts another one. It must not send anything before it has received its first line.
        """

    def send(self, child: Hashable, line: str) -> None:
        """Sends a line to a child if it is alive."""

    def signal(self, child: Hashable, number: signal.Signals) -> None:
        """Sends a signal to a child if it is alive."""

    def received(self, timeout_s: float) -> list[ReceivedLine]:
        """Returns the lines received since the last call; waits for at most ``timeout_s`` seconds for the first."""

    def deaths(self) -> list[Death]:
        """Returns the deaths since the last call; all lines of these children are then ready for ``received``."""

    def wait_for(self, children: Collection[Hashable]) -> None:
        """Waits for children that were asked to exit, and kills those that do not exit in time."""

    def abandon(self, child: Hashable) -> None:
        """Gives up on a killed child that does not die. Its node gets no more children, unless it is the first node."""

    def node_missing_s(self, child: Hashable) -> float:
        """Returns for how many seconds a child's node has been missing; 0 if it is present."""


class _Child:
    """A child process with a thread that starts it and then reads its output.

    Starting a process accesses files (its program and its log). The calling thread sends heartbeats, so it must not
    wait for a file system that does not respond.

    Args:
        name: name of the child.
        popen: function that starts the process.
        lines: queue to which the lines from the child are added.
        limit_s: seconds for which starting the thread is retried.

    Attributes:
        has_thread: whether the thread could be started.
    """

    def __init__(
        self,
        name: Hashable,
        popen: Callable[[], subprocess.Popen[str]],
        lines: SimpleQueue[ReceivedLine],
        limit_s: float,
    ):
        self._name, self._lines = name, lines
        self._lock, self._is_started = threading.Lock(), threading.Event()
        self._popen: subprocess.Popen[str] | None = None
        self._start_error = ""
        self._pending_lines: list[str] = []
        self._pending_signals: list[signal.Signals] = []
        self._memory_kills = num_memory_kills()
        try:
            self._thread = start_thread(self._run, popen, limit_s=limit_s)
            self.has_thread = True
        except RunError as error:
            self.has_thread, self._start_error = False, f"cannot be started: {error}"
            self._is_started.set()

    def send(self, line: str) -> None:
        """Sends a line, as soon as the child runs if it is still being started."""
        with self._lock:
            if self._popen is None:
                self._pending_lines.append(line)
            else:
                self._write(self._popen, line)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, as soon as the child runs if it is still being started."""
        with self._lock:
            if self._popen is None:
                self._pending_signals.append(number)
            else:
                self._popen.send_signal(number)

    def is_dead(self, timeout_s: float = 0.0) -> bool:
        """Returns whether the child has exited or could not be started; waits up to ``timeout_s`` seconds for this."""
        deadline = time.monotonic() + timeout_s
        if not self._is_started.wait(timeout_s):
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

    def reap(self) -> str:
        """Waits for a dead child's last lines to be read, and returns the cause of its death."""
        if self._popen is None:
            return self._start_error
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._thread.join(timeout=1.0)
        code = self._popen.returncode
        if code == -signal.SIGKILL and num_memory_kills() > self._memory_kills:
            return f"signal {-code}, as its control group was out of memory"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _run(self, popen: Callable[[], subprocess.Popen[str]]) -> None:
        try:
            process = retried(lambda: self._try(popen), _PROCESS_S)
        except (OSError, RuntimeError) as error:
            self._start_error = f"cannot be started: {error}"
            self._is_started.set()
            return
        with self._lock:
            self._popen = process
            for line in self._pending_lines:
                self._write(process, line)
            for number in self._pending_signals:
                process.send_signal(number)
        self._is_started.set()
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.endswith("\n"):  # otherwise the child was killed while it wrote the line
                    self._lines.put(ReceivedLine(self._name, line, time.monotonic()))

    def _try(self, popen: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
        """Tries once to start the child; ends the retries if the child was sent SIGKILL in the meantime."""
        try:
            return popen()
        except BlockingIOError as error:
            with self._lock:
                if signal.SIGKILL in self._pending_signals:
                    raise ChildProcessError(f"{error.strerror}, until it was killed") from error
            raise

    def _write(self, popen: subprocess.Popen[str], line: str) -> None:
        assert popen.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # the child has died, which is about to be detected
            popen.stdin.write(line)
            popen.stdin.flush()


class LocalChildren:
    """Children on this node; a context manager that leaves no process behind.

    Args:
        environment: environment variables of the children.
        memory: memory directory of this node; replaces ``MEMORY`` in commands.

    Attributes:
        lines: queue of the lines that children have sent; other sources may add lines.
    """

    def __init__(self, environment: Mapping[str, str], memory: Path):
        self._environment, self._memory = dict(environment), str(memory)
        self._children: dict[Hashable, _Child] = {}
        self._abandoned: dict[Hashable, _Child] = {}
        self._held: dict[Hashable, _Child] = {}
        self._no_wait_before = 0.0
        self.lines = SimpleQueue[ReceivedLine]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._children |= self._held
        self._held.clear()
        for child in list(self._children):
            self.signal(child, signal.SIGKILL)
        self.wait_for(list(self._children))

    def __contains__(self, child: object) -> bool:
        return child in self._children

    def node_missing_s(self, child: Hashable) -> float:  # noqa: ARG002
        """See ``Children``; this node is never missing."""
        return 0.0

    def start(self, child: Hashable, command: Sequence[str], log: Path) -> None:
        """See ``Children``."""
        assert child not in self._children, f"{child} is running already"
        process = self._held.pop(child, None)
        if process is not None and process.is_dead():
            process.reap()
            process = None
        self._children[child] = process or self._process(child, command, log)

    def hold(self, child: Hashable, command: Sequence[str], log: Path) -> None:
        """See ``Children``."""
        if child not in self._children and child not in self._held:
            self._held[child] = self._process(child, command, log)

    def _process(self, child: Hashable, command: Sequence[str], log: Path) -> _Child:
        words = [self._memory if word == MEMORY else word for word in command]
        # If no thread can be started, retry for the first child only: the caller must not wait for each of them.
        limit_s = _THREAD_S if time.monotonic() > self._no_wait_before else 0.0
        process = _Child(child, lambda: _popen(words, log, self._environment), self.lines, limit_s)
        if not process.has_thread:
            self._no_wait_before = time.monotonic() + _THREAD_S
        return process

    def send(self, child: Hashable, line: str) -> None:
        """See ``Children``."""
        if child in self._children:
            self._children[child].send(line)

    def signal(self, child: Hashable, number: signal.Signals) -> None:
        """See ``Children``."""
        process = self._children.get(child, self._abandoned.get(child))
        if process is not None:
            process.signal(number)

    def abandon(self, child: Hashable) -> None:
        """See ``Children``."""
        if child in self._children:
            self._abandoned[child] = self._children.pop(child)

    def received(self, timeout_s: float) -> list[ReceivedLine]:
        """See ``Children``."""
        lines: list[ReceivedLine] = []
        with suppress(Empty):
            lines.append(self.lines.get(timeout=timeout_s))
            while True:
                lines.append(self.lines.get_nowait())
        return lines

    def deaths(self) -> list[Death]:
        """See ``Children``."""
        for child in [child for child, abandoned in self._abandoned.items() if abandoned.is_dead()]:
            self._abandoned.pop(child).reap()  # not reported: it has counted as dead since it was abandoned
        dead = [child for child, process in self._children.items() if process.is_dead()]
        return [Death(child, self._children.pop(child).reap(), time.monotonic()) for child in dead]

    def wait_for(self, children: Collection[Hashable]) -> None:
        """See ``Children``."""
        left = self._wait_for(children, _STOP_S)
        for child in left:
            self.signal(child, signal.SIGKILL)
        for child in self._wait_for(left, _KILL_S):
            self.abandon(child)

    def _wait_for(self, children: Collection[Hashable], timeout_s: float) -> list[Hashable]:
        """Waits for children to exit, and returns those that are still alive after ``timeout_s`` seconds."""
        deadline, left = time.monotonic() + timeout_s, []
        for child in children:
            if self._children[child].is_dead(max(0.0, deadline - time.monotonic())):
                self._children.pop(child).reap()
            else:
                left.append(child)
        return left


def _popen(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    with log.open("ab") as errors:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C must reach only the supervisor, which then stops the children cleanly
        )
