"""A node of a run that is not its first: starts children for the first node, and passes on what is said.

It decides nothing. Where it has lost the first node, it ends its children, and waits for one to come back: the run may
have gone on without them.
"""

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

from swift.errors import RunError
from swift.launch.children import Heard, OwnChildren
from swift.launch.meeting import Meeting, Wire, unreachable
from swift.launch.node_wire import End, Fell, Message, Pulse, Said, Say, Signal, Start, message_line, read_message
from swift.launch.scratch import Scratch

_FIRST = "first node"
_PULSE_S, _PAUSE_S, _RETRY_S, _CONNECT_S = 0.5, 0.02, 0.5, 5.0
_LINGER_S = 10.0
"""How long a node that is told to end waits for the first to end the run in order: it may have been told the same."""


def serve(
    run_dir: Path, number: int, patience_s: float, environment: Mapping[str, str], told: Callable[[], bool]
) -> None:
    """Serves the first node until the run is over.

    Args:
        run_dir: the run directory.
        number: of this node, from 1.
        patience_s: how long to wait for a first node.
        environment: of the children.
        told: whether this node was told to end.

    Raises:
        RunError: there is no first node.
        KeyboardInterrupt: this node was told to end, and has.
    """
    while True:
        meeting, wire = _meet(run_dir, number, patience_s, told)
        reason = unreachable(meeting.host)
        if reason is not None:
            raise RunError(f"node {number}: {reason}: stopped")
        _tell(f"node {number}: found the first node at {meeting.host}:{meeting.port}")
        scratch = Scratch(Path(meeting.scratch), number)
        with scratch.on_this_node(), OwnChildren(environment, heard := SimpleQueue[Heard]()) as children:
            is_over = _Relay(wire, children, heard, meeting.silence_s).run(told)
        wire.end()
        if is_over:
            return
        if told():
            raise KeyboardInterrupt
        _tell(f"node {number}: has lost the first node; its processes were ended")


def _meet(run_dir: Path, number: int, patience_s: float, told: Callable[[], bool]) -> tuple[Meeting, Wire]:
    deadline, why = time.monotonic() + patience_s, "has it the same --run-dir?"
    while time.monotonic() < deadline:
        if told():
            raise KeyboardInterrupt
        meeting = Meeting.find(run_dir)
        if meeting is not None:
            try:
                connection = socket.create_connection((meeting.host, meeting.port), _CONNECT_S)
                connection.settimeout(None)
                wire = Wire(connection)
                refused = wire.call(meeting.key, number)
                if refused is None:
                    return meeting, wire
                wire.close()
                why = refused
            except OSError as error:
                why = f"{meeting.host}:{meeting.port}: {error.strerror or error}"
        time.sleep(_RETRY_S)
    raise RunError(f"node {number}: no first node was found in {patience_s:g} s: stopped; {why}")


class _Relay:
    """Between the first node and the children that this one has for it."""

    def __init__(self, wire: Wire, children: OwnChildren, heard: SimpleQueue[Heard], silence_s: float):
        self._wire, self._children, self._silence_s = wire, children, silence_s
        self._heard = heard
        self._is_over = False

    def run(self, told: Callable[[], bool]) -> bool:
        """Until the run is over; False: until the first node is gone, or this one has lingered long enough."""
        threading.Thread(target=self._listen, daemon=True).start()
        seen = pulsed = time.monotonic()
        told_at: float | None = None
        while not self._is_over:
            deaths = self._children.deaths()
            for who, line, when in self._children.heard(0.0 if deaths else _PAUSE_S):
                if who == _FIRST and not line:
                    return False
                if who == _FIRST:
                    seen = when
                    self._obey(read_message(line))
                    if self._is_over:
                        return True
                else:
                    self._say(Said(str(who), line))
            for death in deaths:
                self._say(Fell(str(death.who), death.why))
            now = time.monotonic()
            if now - pulsed >= _PULSE_S:
                pulsed = now
                self._say(Pulse())
            told_at = now if told_at is None and told() else told_at
            if now - seen > self._silence_s or (told_at is not None and now - told_at > _LINGER_S):
                return False
        return self._is_over

    def _listen(self) -> None:
        with closing(self._wire):
            for line in self._wire.lines():
                self._heard.put(Heard(_FIRST, line, time.monotonic()))
        self._heard.put(Heard(_FIRST, "", time.monotonic()))  # it is gone

    def _obey(self, message: Message) -> None:
        match message:
            case Start(who, command, log):
                try:
                    self._children.start(who, command, Path(log))
                except OSError as error:
                    self._say(Fell(who, f"cannot be started: {error}"))
            case Say(who, line):
                self._children.say(who, line)
            case Signal(who, number):
                self._children.signal(who, signal.Signals(number))
            case End():
                self._is_over = True

    def _say(self, message: Message) -> None:
        self._wire.send(message_line(message))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
