"""The first node's child processes in a run on several nodes: its own, and those on other nodes.

A node that is silent for too long counts as lost, and the deaths of all its children are reported. A node that was only
cut off terminates its children before it reconnects (``swift.elastic.transport.remote_node``), so two incarnations of a
child never run at the same time.
"""

import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from swift.elastic.transport.children import Death, LocalChildren, ReceivedLine
from swift.elastic.transport.connections import Admission, NodeConnection
from swift.elastic.transport.messages import (
    NODE_MESSAGES,
    NODE_UPDATES,
    ChildDied,
    ChildSent,
    EndNode,
    NodeHeartbeat,
    NodeMessage,
    NodeUpdate,
    PrespawnChild,
    SendToChild,
    SignalChild,
    StartChild,
)
from swift.errors import RunError
from swift.tasks import start_thread

NODES = "nodes"
"""Sender name of received lines with a ``NodeUpdate``, which report that a node has connected or is lost."""
_HEARTBEAT_S, _PAUSE_S, _ASLEEP_S = 0.5, 0.02, 1.0
_STOP_S, _KILL_S, _END_S = 10.0, 2.0, 1.0


@dataclass(eq=False)
class _ConnectedNode:
    """A node that is connected to the first one.

    Attributes:
        number: number of the node, from 1.
        connection: connection to the node.
        seen: when the node last sent a message, in seconds.
        children: live children on the node.
        abandoned: children that were killed and do not die.
        standby: children that the node has prespawned.
    """

    number: int
    connection: NodeConnection
    seen: float
    children: set[Hashable] = field(default_factory=set)
    abandoned: set[Hashable] = field(default_factory=set)
    standby: set[Hashable] = field(default_factory=set)


class MultiNodeChildren:
    """Children on the first node and on others; a context manager that terminates all of them.

    Args:
        local_children: children on this node.
        node_of: returns the node of a child; 0 is this node.
        num_nodes: number of nodes of the run, including this one.
        listener: socket on which the other nodes connect.
        key: key of the run, see ``Rendezvous``; other nodes have to prove that they have it.
        is_first: returns whether this is still the first node, that is, no other node has taken over the run.
        silence_s: seconds without a message after which a node counts as lost.
    """

    def __init__(
        self,
        local_children: LocalChildren,
        *,
        node_of: Callable[[Hashable], int],
        num_nodes: int,
        listener: socket.socket,
        key: str,
        is_first: Callable[[], bool],
        silence_s: float,
    ):
        self._local, self._node_of, self._listener, self._silence_s = local_children, node_of, listener, silence_s
        self._is_first, self._is_superseded = is_first, False
        self._lock = threading.Lock()
        self._nodes: dict[int, _ConnectedNode] = {}
        self._away = dict.fromkeys(range(1, num_nodes), time.monotonic())
        self._deaths: list[Death] = []
        self._excluded: set[int] = set()
        self._names: dict[str, Hashable] = {}
        self._checked, self._is_closed = time.monotonic(), False
        self._admission = Admission(listener, key, self._refusal, self._admit)
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._thread = start_thread(self._listen, name="nodes")
        start_thread(self._watch, name="is first")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._is_closed = True
        self._thread.join()
        self._admission.close()
        self._listener.close()
        for node in self._connected():
            node.connection.send(NODE_MESSAGES.line(EndNode(is_finished=kind is None)))
        for reader in self._readers:
            reader.join(_END_S)
        self._local.__exit__()

    def __contains__(self, child: object) -> bool:
        with self._lock:
            is_unreported = any(child == death.child for death in self._deaths)
        return is_unreported or self._is_alive(child)

    def _is_alive(self, child: object) -> bool:
        """Returns whether a child is alive as far as this node knows."""
        return child in self._local or any(child in node.children for node in self._connected())

    def node_missing_s(self, child: Hashable) -> float:
        """See ``Children``; infinite for a node with a child that could not be killed, so that nothing starts there."""
        if self._node_of(child) in self._excluded:
            return math.inf
        since = self._away.get(self._node_of(child))
        return 0.0 if since is None else time.monotonic() - since

    def start(self, child: Hashable, command: Sequence[str], log: Path) -> None:
        """See ``Children``; if the node is lost, the child is reported as dead."""
        number = self._node_of(child)
        if number == 0:
            self._local.start(child, command, log)
            return
        name = repr(child)
        with self._lock:
            node, self._names[name] = self._nodes.get(number), child
            if node is None:
                self._deaths.append(Death(child, f"node {number} is gone", time.monotonic(), is_own=False))
            else:
                node.standby.discard(child)
                node.children.add(child)
                node.connection.send(NODE_MESSAGES.line(StartChild(name, list(command), str(log.absolute()))))

    def hold(self, child: Hashable, command: Sequence[str], log: Path) -> None:
        """See ``Children``; a node that loses this one also terminates its prespawned processes."""
        number = self._node_of(child)
        if number == 0:
            self._local.hold(child, command, log)
            return
        with self._lock:
            node = self._nodes.get(number)
            if node is not None and child not in node.children | node.standby:
                name = repr(child)
                self._names[name] = child
                node.standby.add(child)
                node.connection.send(NODE_MESSAGES.line(PrespawnChild(name, list(command), str(log.absolute()))))

    def send(self, child: Hashable, line: str) -> None:
        """See ``Children``."""
        self._local.send(child, line)
        self._send(child, SendToChild(repr(child), line))

    def signal(self, child: Hashable, number: signal.Signals) -> None:
        """See ``Children``."""
        self._local.signal(child, number)
        self._send(child, SignalChild(repr(child), number))

    def abandon(self, child: Hashable) -> None:
        """See ``Children``. This node itself cannot be excluded, since the supervisor runs here."""
        self._excluded |= {self._node_of(child)} - {0}
        self._local.abandon(child)
        with self._lock:
            for node in self._nodes.values():
                if child in node.children:
                    node.children.remove(child)
                    node.abandoned.add(child)

    def received(self, timeout_s: float) -> list[ReceivedLine]:
        """See ``Children``."""
        return self._local.received(timeout_s)

    def deaths(self) -> list[Death]:
        """See ``Children``; raises RunError if another first node has taken over the run."""
        if self._is_superseded:
            raise RunError("another first node has taken over this run: stopped")
        self._drop_silent(time.monotonic())
        with self._lock:
            remote, self._deaths = self._deaths, []
        return self._local.deaths() + remote

    def wait_for(self, children: Collection[Hashable]) -> None:
        """See ``Children``."""
        remote = [child for child in children if child not in self._local]
        self._local.wait_for([child for child in children if child in self._local])
        self._until_dead(remote, _STOP_S)
        for child in remote:
            self.signal(child, signal.SIGKILL)
        self._until_dead(remote, _KILL_S)
        with self._lock:  # the caller has waited for these deaths: do not report them again
            self._deaths = [death for death in self._deaths if death.child not in remote]

    def _until_dead(self, children: Collection[Hashable], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(map(self._is_alive, children)) and time.monotonic() < deadline:
            self._drop_silent(time.monotonic())
            time.sleep(_PAUSE_S)

    def _send(self, child: Hashable, message: NodeMessage) -> None:
        for node in self._connected():
            if child in node.children | node.abandoned:
                node.connection.send(NODE_MESSAGES.line(message))

    def _connected(self) -> list[_ConnectedNode]:
        with self._lock:
            return list(self._nodes.values())

    def _drop_silent(self, now: float) -> None:
        """Drops nodes that are silent, unless this node was just suspended and has not read their messages yet."""
        was_suspended, self._checked = now - self._checked > _ASLEEP_S, now
        for node in self._connected():
            if was_suspended:
                node.seen = now
            elif now - node.seen > self._silence_s:
                node.connection.end()

    def _watch(self) -> None:
        """Checks repeatedly whether this is still the first node.

        The check reads a file, so it has its own thread: the file system may not respond, and the thread that sends
        heartbeats must not wait for it.
        """
        while not (self._is_closed or self._is_superseded):
            self._is_superseded = not self._is_first()
            time.sleep(_HEARTBEAT_S)

    def _listen(self) -> None:
        """Admits nodes and sends heartbeats to connected ones; must not access any file, see ``_watch``."""
        sent = time.monotonic()
        while not self._is_closed:
            try:
                self._admission.turn(_HEARTBEAT_S)
            except (OSError, RuntimeError):  # out of file descriptors or threads, or the network is down: try again
                time.sleep(_PAUSE_S)
            if time.monotonic() - sent >= _HEARTBEAT_S:
                sent = time.monotonic()
                for node in self._connected():
                    node.connection.send(NODE_MESSAGES.line(NodeHeartbeat()))

    def _admit(self, number: int, connection: socket.socket) -> None:
        try:
            reader = start_thread(self._read_from, number, NodeConnection(connection), limit_s=0.0)
        except RunError:  # no retry here, since other nodes wait for heartbeats; this node will connect again
            connection.close()
            raise
        self._readers = [*filter(threading.Thread.is_alive, self._readers), reader]

    def _read_from(self, number: int, connection: NodeConnection) -> None:
        """Reads from an admitted node until its connection ends."""
        with closing(connection):
            node = _ConnectedNode(number, connection, time.monotonic())
            with self._lock:
                if self._is_closed or self._away.pop(number, None) is None:  # None: the node has connected twice
                    return
                self._nodes[number] = node
                self._report(number, is_there=True)
            try:
                for line in connection.lines():
                    node.seen = time.monotonic()
                    self._take(node, NODE_MESSAGES.read(line))
            except RunError as error:  # unknown messages; the node terminates its children once disconnected
                print(f"node {number}: {error}", file=sys.stderr)
            finally:
                self._lose(node)

    def _refusal(self, number: int, is_ready: bool) -> str | None:
        """Returns why a node is not admitted at present, or None if it is."""
        with self._lock:
            if not is_ready and number in self._away:
                self._away[number] = time.monotonic()  # it will join soon: restart the time that it has been missing
                return "it is not ready"
            if self._is_closed:
                return "the run is over"
            if number in self._nodes:
                return f"node {number} is connected already"  # or was lost, but has not been silent for long enough
            return None if number in self._away else f"there is no node {number}"

    def _take(self, node: _ConnectedNode, message: NodeMessage) -> None:
        match message:
            case ChildSent(name, line):
                self._local.lines.put(ReceivedLine(self._names[name], line, node.seen))
            case ChildDied(name, reason):
                with self._lock:
                    if (child := self._names[name]) in node.children:
                        node.children.remove(child)
                        self._deaths.append(Death(child, reason, node.seen))

    def _lose(self, node: _ConnectedNode) -> None:
        now = time.monotonic()
        with self._lock:
            if self._nodes.get(node.number) is not node:
                return
            del self._nodes[node.number]
            self._away[node.number] = now
            reason = f"node {node.number} is gone"
            self._deaths += [Death(child, reason, now, is_own=False) for child in node.children]
            node.children.clear()
            self._report(node.number, is_there=False)

    def _report(self, number: int, *, is_there: bool) -> None:
        self._local.lines.put(ReceivedLine(NODES, NODE_UPDATES.line(NodeUpdate(number, is_there)), time.monotonic()))
