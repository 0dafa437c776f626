"""Client of the compile service: requests programs, kills a silent service, and restarts it a few times."""

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from swift.elastic.transport.child_processes import Children
from swift.elastic.transport.compile_messages import (
    COMPILE_ANSWERS,
    COMPILE_REQUESTS,
    Alive,
    CompileFailed,
    CompileRequest,
    CutPrepared,
    Prepared,
)
from swift.topology import Worker

COMPILE_SERVICE = "preparer"
"""Name of the compile service among the children, in logs and in events."""
_MAX_STARTS = 3


class CompileClient:
    """Has programs prepared by the compile service. Without it the run continues, and members compile for themselves.

    Args:
        children: processes among which the service runs.
        command: command that starts it; None: no programs are prepared.
        log: log file of the service.
        start_s: time limit from its start to its first heartbeat, in seconds.
        silence_s: time limit between two heartbeats, in seconds. A service that is silent for longer is killed, since
            it may hold the lock of a program.
        clock: function that returns the time, in seconds.
    """

    def __init__(
        self,
        *,
        children: Children,
        command: Sequence[str] | None,
        log: Path,
        start_s: float,
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._children, self._command, self._log = children, command, log
        self._start_s, self._silence_s, self._clock = start_s, silence_s, clock
        self._request: CompileRequest | None = None
        self._is_sent = False
        self._prepared: set[CompileRequest] = set()
        self._due: float | None = None  # time limit of the next heartbeat; None: not running, or being killed
        self._num_starts = 0  # in a row, without a program compiled in between

    def request(self, request: CompileRequest) -> None:
        """Sets the newest request, see ``send_request``."""
        self._request, self._is_sent = request, False

    def send_request(self) -> None:
        """Sends the newest request, once; starts the service if it is not running, unless it has died too often."""
        if self._command is None or self._request is None or self._is_sent:
            return
        if COMPILE_SERVICE not in self._children:
            if self._num_starts == _MAX_STARTS:
                return
            self._num_starts += 1
            self._children.start(COMPILE_SERVICE, self._command, self._log)
            self._due = self._clock() + self._start_s
        self._children.send(COMPILE_SERVICE, COMPILE_REQUESTS.line(self._request))
        self._is_sent = True

    def take_answer(self, line: str, time: float) -> Prepared | CutPrepared | CompileFailed | None:
        """Reads a message of the service, received at ``time``; returns None for a mere heartbeat."""
        answer = COMPILE_ANSWERS.read(line)
        if self._due is not None:
            self._due = time + self._silence_s
        if isinstance(answer, Prepared):
            self._prepared.add(CompileRequest(answer.failed, answer.num_ranks, answer.before))
            self._num_starts = 1 if answer.compiled else self._num_starts
        return None if isinstance(answer, Alive) else answer

    def is_prepared(self, worker: Worker) -> bool:
        """Returns whether the programs are prepared for the loss of a process of a worker, on top of those lost."""
        if self._request is None:
            return False
        failed, num_ranks, cut, _ = self._request
        lost = CompileRequest(failed | {worker}, cut=cut)
        if num_ranks is not None:
            lost = CompileRequest(failed, num_ranks - 1)
        return lost in self._prepared

    @property
    def has_ended(self) -> bool:
        """Returns whether the service has died too often to be started again."""
        return self._num_starts == _MAX_STARTS and COMPILE_SERVICE not in self._children

    def kill_if_silent(self) -> bool:
        """Kills the service if it has been silent for too long, and returns whether it was; its death follows."""
        if self._due is None or self._clock() <= self._due:
            return False
        self._due = None
        self._children.signal(COMPILE_SERVICE, signal.SIGKILL)
        return True

    def died(self) -> bool:
        """Lets the next incarnation of the service get the same request; returns False if it has died too often."""
        self._due, self._is_sent = None, False
        return self._num_starts < _MAX_STARTS
