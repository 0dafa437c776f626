"""A node of a run other than the first one: starts children for the first node, and relays their messages.

It makes no decisions. If it loses the first node, it terminates its children, since the run may have continued without
them, and waits for a first node again.
"""

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from swift.deadlines import Deadlines
from swift.elastic.state.run_files import DirectoryMender, node_memory
from swift.elastic.transport.children import LocalChildren, ReceivedLine
from swift.elastic.transport.connections import NodeConnection, Rendezvous, check_network
from swift.elastic.transport.messages import (
    NODE_MESSAGES,
    ChildDied,
    ChildSent,
    EndNode,
    NodeHeartbeat,
    NodeMessage,
    PrespawnChild,
    SendToChild,
    SignalChild,
    StartChild,
)
from swift.errors import RunError, SettingError
from swift.runlog.lease import last_heartbeat
from swift.runlog.reading import SUMMARY
from swift.tasks import start_thread

_FIRST = "first node"
_HEARTBEAT_S, _PAUSE_S, _RETRY_S, _CONNECT_S = 0.5, 0.02, 0.5, 5.0
_ASLEEP_S, _ANNOUNCE_S = 1.0, 5.0
_LINGER_S = 10.0
"""Seconds beyond ``Deadlines.stopping`` for which a node that was asked to exit waits for the first node. The first one
may have been asked as well, and needs the processes on this node to stop the run cleanly."""


def serve_node(
    run_dir: Path,
    number: int,
    *,
    deadlines: Deadlines,
    environment: Mapping[str, str],
    storage: Path,
    corpus: Path | None,
    is_end_requested: Callable[[], bool],
    is_trusted: bool = False,
) -> None:
    """Serves the first node until the run is over; reconnects whenever the connection is lost.

    Args:
        run_dir: run directory.
        number: number of this node, from 1.
        deadlines: time limits of the run: ``start`` to find a first node, ``stopping`` to stop the run.
        environment: environment variables of the children.
        storage: directory in which the memory directory of this node is created, see ``node_memory``.
        corpus: index of the corpus on this node, see ``find_index``.
        is_end_requested: returns whether this node was asked to exit.
        is_trusted: whether the user trusts the network, see ``check_network``.

    Raises:
        SettingError: the first node is on a network that may not be used, or runs another version of this program.
        RunError: there is no first node, or it has stopped the run.
        KeyboardInterrupt: this node was asked to exit, and has terminated its children.
    """
    _print(f"node {number}: waiting for the first node")
    while True:
        first_node = _find_first(run_dir, number, deadlines.start, is_end_requested, is_trusted)
        if first_node is None:
            _print(f"node {number}: the run is finished")
            return
        rendezvous, connection = first_node
        _print(f"node {number}: found the first node at {rendezvous.host}:{rendezvous.port}")
        with (
            node_memory(storage, corpus) as memory,
            LocalChildren(environment, memory.path) as children,
            DirectoryMender(memory.mend),  # its news is not shown: workers report the states that they cannot store
        ):
            linger_s = deadlines.stopping + _LINGER_S
            relay = _Relay(connection, children, rendezvous.silence_s, linger_s)
            end = relay.run(is_end_requested)
        connection.end()
        if end is not None and end.is_finished:
            return
        if is_end_requested():
            raise KeyboardInterrupt
        if end is not None:
            raise RunError(f"node {number}: the first node has stopped the run; its output says why")
        _print(f"node {number}: lost the first node; the processes of this node were ended")


def _find_first(
    run_dir: Path, number: int, timeout_s: float, is_end_requested: Callable[[], bool], is_trusted: bool
) -> tuple[Rendezvous, NodeConnection] | None:
    """Finds and connects to the first node; returns None if the run has finished without this node."""
    deadline, reason, beat = time.monotonic() + timeout_s, "does it have the same --run-dir?", None
    while time.monotonic() < deadline:
        if is_end_requested():
            raise KeyboardInterrupt
        rendezvous = Rendezvous.find(run_dir)
        if rendezvous is None and (now := _heartbeat(run_dir) or beat) != beat:  # a first node is alive, not ready yet
            beat, deadline = now, time.monotonic() + timeout_s
        if rendezvous is None and (run_dir / SUMMARY).exists():
            return None
        if rendezvous is not None:
            check_network(rendezvous.host, is_trusted=is_trusted)
            rendezvous.check_program()
            try:
                with ExitStack() as unless_admitted:
                    connection = unless_admitted.enter_context(closing(_connect(rendezvous)))
                    refused = connection.authenticate(rendezvous.key, number)
                    if refused is None:
                        unless_admitted.pop_all()
                        return rendezvous, connection
                    reason = refused
            except OSError as error:
                reason = f"{rendezvous.host}:{rendezvous.port}: {error.strerror or error}"
        time.sleep(_RETRY_S)
    raise RunError(f"node {number}: no first node was found in {timeout_s:g} s: stopped; {reason}")


def _connect(rendezvous: Rendezvous) -> NodeConnection:
    connection = socket.create_connection((rendezvous.host, rendezvous.port), _CONNECT_S)
    connection.settimeout(None)
    return NodeConnection(connection)


def _heartbeat(run_dir: Path) -> int | None:
    """Returns the last heartbeat of a first node in the run directory, or None if it cannot be read."""
    with suppress(SettingError):
        return last_heartbeat(run_dir)
    return None


@contextmanager
def announcing_arrival(run_dir: Path, number: int, is_trusted: bool = False) -> Iterator[None]:
    """Tells the first node repeatedly during the ``with`` block that this node will join, so that it keeps waiting.

    Args:
        run_dir: run directory.
        number: number of this node, from 1.
        is_trusted: whether the user trusts the network, see ``check_network``.
    """
    is_over = threading.Event()

    def announce() -> None:
        while not is_over.wait(_ANNOUNCE_S):
            rendezvous = Rendezvous.find(run_dir)
            if rendezvous is None:
                continue
            with suppress(OSError, SettingError):
                check_network(rendezvous.host, is_trusted=is_trusted)
                with closing(_connect(rendezvous)) as connection:
                    connection.authenticate(rendezvous.key, number, is_ready=False)

    thread: threading.Thread | None = None
    with suppress(RunError):  # if no thread can be started, the first node just does not wait longer than usual
        thread = start_thread(announce, name="announcing")
    try:
        yield
    finally:
        is_over.set()
        if thread is not None:
            thread.join(_CONNECT_S)


class _Relay:
    """Relays messages between the first node and the children that this node runs for it."""

    def __init__(self, connection: NodeConnection, children: LocalChildren, silence_s: float, linger_s: float):
        self._connection, self._children = connection, children
        self._silence_s, self._linger_s = silence_s, linger_s

    def run(self, is_end_requested: Callable[[], bool]) -> EndNode | None:
        """Relays until the first node releases this node or is lost, or until a requested exit has waited long enough.

        Args:
            is_end_requested: returns whether this node was asked to exit.

        Returns:
            The last message of the first node, or None if it is lost or has not stopped the run in time.
        """
        try:
            start_thread(self._listen)
        except RunError as error:
            _print(f"cannot serve the first node: {error}")
            self._connection.close()
            return None
        seen = sent = now = time.monotonic()
        requested_at: float | None = None
        while True:
            deaths = self._children.deaths()
            for child, line, received in self._children.received(0.0 if deaths else _PAUSE_S):
                if child == _FIRST and not line:  # marks the end of the connection, see ``_listen``
                    return None
                if child == _FIRST:
                    seen, message = received, NODE_MESSAGES.read(line)
                    if isinstance(message, EndNode):
                        return message
                    self._carry_out(message)
                else:
                    self._send(ChildSent(str(child), line))
            for death in deaths:
                self._send(ChildDied(str(death.child), death.reason))
            before, now = now, time.monotonic()
            if now - before > _ASLEEP_S:
                seen = now  # this node was suspended: messages that were sent meanwhile are about to be read
            if now - sent >= _HEARTBEAT_S:
                sent = now
                self._send(NodeHeartbeat())
            requested_at = now if requested_at is None and is_end_requested() else requested_at
            if now - seen > self._silence_s or (requested_at is not None and now - requested_at > self._linger_s):
                return None

    def _listen(self) -> None:
        lines = self._children.lines
        with closing(self._connection):
            for line in self._connection.lines():
                lines.put(ReceivedLine(_FIRST, line, time.monotonic()))
        lines.put(ReceivedLine(_FIRST, "", time.monotonic()))  # the connection has ended

    def _carry_out(self, message: NodeMessage) -> None:
        match message:
            case StartChild(child, command, log):
                self._children.start(child, command, Path(log))
            case PrespawnChild(child, command, log):
                self._children.hold(child, command, Path(log))
            case SendToChild(child, line):
                self._children.send(child, line)
            case SignalChild(child, number):
                self._children.signal(child, signal.Signals(number))

    def _send(self, message: NodeMessage) -> None:
        self._connection.send(NODE_MESSAGES.line(message))


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
