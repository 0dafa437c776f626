"""A node of a run that is not its first: starts children for the first node, and relays messages.

It decides nothing. Where it has lost the first node, it ends its children, and waits for one to come back: the run may
have gone on without them.
"""

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

from swift.deadlines import Deadlines
from swift.elastic.state import own_memory
from swift.elastic.transport.node_messages import (
    NODE_MESSAGES,
    End,
    Fell,
    NodeMessage,
    Pulse,
    Said,
    Say,
    Signal,
    Start,
)
from swift.elastic.transport.processes import Heard, OwnChildren
from swift.elastic.transport.rendezvous import Rendezvous, Wire, check_network
from swift.errors import RunError, SettingError
from swift.runlog import SUMMARY, last_beat

_FIRST = "first node"
_PULSE_S, _PAUSE_S, _RETRY_S, _CONNECT_S = 0.5, 0.02, 0.5, 5.0
_ASLEEP_S, _COMING_S = 1.0, 5.0
_LINGER_S = 10.0
"""How much longer than that a node that was asked to end waits for the first to end the run in order: it may have been
asked, too."""


def serve(
    run_dir: Path,
    number: int,
    deadlines: Deadlines,
    environment: Mapping[str, str],
    place: Path,
    corpus: Path | None,
    told: Callable[[], bool],
    *,
    is_trusted: bool = False,
) -> None:
    """Serves the first node until the run is over.

    Args:
        run_dir: the run directory.
        number: of this node, from 1.
        deadlines: of the run; how long to wait for a first node, and for the end of a run that stops.
        environment: of the children.
        place: in which the memory of this node is made, see ``own_memory``.
        corpus: the index of the corpus on this node, see ``find_index``.
        told: returns whether this node was asked to end.
        is_trusted: whether a network may be used.

    Raises:
        SettingError: the first node is on a network that may not be used, or has another version of this program.
        RunError: there is no first node, or it has stopped the run.
        KeyboardInterrupt: this node was asked to end, and has.
    """
    _tell(f"node {number}: waits for the first node")
    while True:
        met = _meet(run_dir, number, deadlines.start, told, is_trusted)
        if met is None:
            _tell(f"node {number}: the run is finished")
            return
        meeting, wire = met
        _tell(f"node {number}: found the first node at {meeting.host}:{meeting.port}")
        heard = SimpleQueue[Heard]()
        with own_memory(place, corpus) as memory, OwnChildren(environment, memory, heard) as children:
            end = _Relay(wire, children, heard, meeting.silence_s, deadlines.stopping + _LINGER_S).run(told)
        wire.end()
        if end is not None and end.is_finished:
            return
        if told():
            raise KeyboardInterrupt
        if end is not None:
            raise RunError(f"node {number}: the first node has stopped the run, and says why")
        _tell(f"node {number}: has lost the first node; its processes were ended")


def _meet(
    run_dir: Path, number: int, patience_s: float, told: Callable[[], bool], is_trusted: bool
) -> tuple[Rendezvous, Wire] | None:
    """The first node; None where the run is finished without this one."""
    deadline, why, beat = time.monotonic() + patience_s, "has it the same --run-dir?", None
    while time.monotonic() < deadline:
        if told():
            raise KeyboardInterrupt
        meeting = Rendezvous.find(run_dir)
        if meeting is None and (now := _beat(run_dir) or beat) != beat:  # it is there, and not ready yet
            beat, deadline = now, time.monotonic() + patience_s
        if meeting is None and (run_dir / SUMMARY).exists():
            return None
        if meeting is not None:
            check_network(meeting.host, is_trusted=is_trusted)
            meeting.check_program()
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


def _beat(run_dir: Path) -> int | None:
    """The last heartbeat of a first node; None where there is none, or where the file system does not tell just now."""
    with suppress(SettingError):
        return last_beat(run_dir)
    return None


@contextmanager
def coming(run_dir: Path, number: int, is_trusted: bool = False) -> Iterator[None]:
    """With the first node knowing, where there is one, that this one is on its way, however long that takes.

    Args:
        run_dir: the run directory.
        number: of this node, from 1.
        is_trusted: whether a network may be used.
    """
    is_over = threading.Event()

    def call() -> None:
        while not is_over.wait(_COMING_S):
            meeting = Rendezvous.find(run_dir)
            if meeting is None:
                continue
            with suppress(OSError, SettingError):
                check_network(meeting.host, is_trusted=is_trusted)
                connection = socket.create_connection((meeting.host, meeting.port), _CONNECT_S)
                with closing(Wire(connection)) as wire:
                    wire.call(meeting.key, number, is_ready=False)

    thread = threading.Thread(target=call, name="coming", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_CONNECT_S)


class _Relay:
    """Between the first node and the children that this one has for it."""

    def __init__(self, wire: Wire, children: OwnChildren, heard: SimpleQueue[Heard], silence_s: float, linger_s: float):
        self._wire, self._children, self._heard = wire, children, heard
        self._silence_s, self._linger_s = silence_s, linger_s

    def run(self, told: Callable[[], bool]) -> End | None:
        """Until it is not needed any more; None: until the first node is gone, or this one has lingered long enough."""
        threading.Thread(target=self._listen, daemon=True).start()
        seen = pulsed = now = time.monotonic()
        told_at: float | None = None
        while True:
            deaths = self._children.deaths()
            for who, line, when in self._children.heard(0.0 if deaths else _PAUSE_S):
                if who == _FIRST and not line:
                    return None
                if who == _FIRST:
                    seen, message = when, NODE_MESSAGES.read(line)
                    if isinstance(message, End):
                        return message
                    self._obey(message)
                else:
                    self._say(Said(str(who), line))
            for death in deaths:
                self._say(Fell(str(death.who), death.why))
            before, now = now, time.monotonic()
            if now - before > _ASLEEP_S:
                seen = now  # what has come meanwhile is about to be heard
            if now - pulsed >= _PULSE_S:
                pulsed = now
                self._say(Pulse())
            told_at = now if told_at is None and told() else told_at
            if now - seen > self._silence_s or (told_at is not None and now - told_at > self._linger_s):
                return None

    def _listen(self) -> None:
        with closing(self._wire):
            for line in self._wire.lines():
                self._heard.put(Heard(_FIRST, line, time.monotonic()))
        self._heard.put(Heard(_FIRST, "", time.monotonic()))  # it is gone

    def _obey(self, message: NodeMessage) -> None:
        match message:
            case Start(who, command, log):
                self._children.start(who, command, Path(log))
            case Say(who, line):
                self._children.say(who, line)
            case Signal(who, number):
                self._children.signal(who, signal.Signals(number))

    def _say(self, message: NodeMessage) -> None:
        self._wire.send(NODE_MESSAGES.line(message))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
