"""Children of a run on several nodes, as seen by its first node: its own, and those that other nodes start for it.

A node that is silent for too long counts as lost, with all its children: their deaths are reported. It ends them itself
once it finds itself alone, before it reconnects (``swift.elastic.transport.remote_node``). So no child has two lives at
a time.
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
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from swift.elastic.transport.admission import Admission
from swift.elastic.transport.node_messages import (
    NODE_MESSAGES,
    NODE_NEWS,
    End,
    Fell,
    NodeMessage,
    NodeNews,
    Pulse,
    Said,
    Say,
    Signal,
    Start,
)
from swift.elastic.transport.processes import Death, Heard, OwnChildren
from swift.elastic.transport.rendezvous import Wire
from swift.errors import RunError

NODES = "nodes"
"""Who says, among what is heard, that a node has come or gone: lines of ``NodeNews``."""
_PULSE_S, _PAUSE_S, _ASLEEP_S = 0.5, 0.02, 1.0
_STOP_S, _KILL_S, _END_S = 10.0, 2.0, 1.0


@dataclass(eq=False)
class _Node:
    """A node that is there."""

    number: int
    wire: Wire
    seen: float
    children: set[Hashable] = field(default_factory=set)
    abandoned: set[Hashable] = field(default_factory=set)


class Fleet:
    """Children on the first node and on others; a context manager, which ends them all.

    Args:
        own: the children on this node.
        heard: where they put what they say.
        node_of: where a child has its place; 0 is this node.
        num_nodes: of the run, with this one.
        listener: on which the others call.
        key: that they have to know, see ``Rendezvous``.
        is_first: whether no other first node has taken the run over.
        silence_s: after which a node is lost.
    """

    def __init__(
        self,
        own: OwnChildren,
        heard: SimpleQueue[Heard],
        node_of: Callable[[Hashable], int],
        num_nodes: int,
        listener: socket.socket,
        key: str,
        is_first: Callable[[], bool],
        silence_s: float,
    ):
        self._own, self._heard = own, heard
        self._node_of, self._listener, self._silence_s = node_of, listener, silence_s
        self._is_first, self._is_followed = is_first, False
        self._lock = threading.Lock()
        self._nodes: dict[int, _Node] = {}
        self._away = dict.fromkeys(range(1, num_nodes), time.monotonic())
        self._deaths: list[Death] = []
        self._shunned: set[int] = set()
        self._names: dict[str, Hashable] = {}
        self._looked, self._is_closed = time.monotonic(), False
        self._admission = Admission(listener, key, self._refusal, self._let_in)
        self._serving: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._listen, name="nodes", daemon=True)
        self._watching = threading.Thread(target=self._watch, name="is first", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._watching.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_closed = True
        self._thread.join()
        self._admission.close()
        self._listener.close()
        for node in self._there():
            node.wire.send(NODE_MESSAGES.line(End(is_finished=kind is None)))
        for serving in self._serving:
            serving.join(_END_S)
        self._own.__exit__(kind, error, traceback)

    def __contains__(self, who: object) -> bool:
        with self._lock:
            is_untold = any(who == death.who for death in self._deaths)
        return is_untold or self._is_alive(who)

    def _is_alive(self, who: object) -> bool:
        """As far as is known; its death may not have been reported yet."""
        return who in self._own or any(who in node.children for node in self._there())

    def away_s(self, who: Hashable) -> float:
        """See ``Children``; for ever, where a child could not be killed."""
        if self._node_of(who) in self._shunned:
            return math.inf
        since = self._away.get(self._node_of(who))
        return 0.0 if since is None else time.monotonic() - since

    def start(self, who: Hashable, command: Sequence[str], log: Path) -> None:
        """See ``Children``; where the node is lost meanwhile the child's death is reported."""
        number = self._node_of(who)
        if number == 0:
            self._own.start(who, command, log)
            return
        name = repr(who)
        with self._lock:
            node, self._names[name] = self._nodes.get(number), who
            if node is None:
                self._deaths.append(Death(who, f"node {number} is gone", time.monotonic(), is_own=False))
            else:
                node.children.add(who)
                node.wire.send(NODE_MESSAGES.line(Start(name, list(command), str(log.absolute()))))

    def say(self, who: Hashable, line: str) -> None:
        """See ``Children``."""
        self._own.say(who, line)
        self._tell(who, Say(repr(who), line))

    def signal(self, who: Hashable, number: signal.Signals) -> None:
        """See ``Children``."""
        self._own.signal(who, number)
        self._tell(who, Signal(repr(who), number))

    def abandon(self, who: Hashable) -> None:
        """See ``Children``. This node cannot be shunned: the supervisor itself is here."""
        self._shunned |= {self._node_of(who)} - {0}
        self._own.abandon(who)
        with self._lock:
            for node in self._nodes.values():
                if who in node.children:
                    node.children.remove(who)
                    node.abandoned.add(who)

    def heard(self, timeout_s: float) -> list[Heard]:
        """See ``Children``."""
        return self._own.heard(timeout_s)

    def deaths(self) -> list[Death]:
        """See ``Children``; raises RunError where another first node has taken the run over."""
        if self._is_followed:
            raise RunError("another first node has taken this run over: stopped")
        self._look(time.monotonic())
        with self._lock:
            far, self._deaths = self._deaths, []
        return self._own.deaths() + far

    def wait_for(self, whom: Collection[Hashable]) -> None:
        """See ``Children``."""
        far = [who for who in whom if who not in self._own]
        self._own.wait_for([who for who in whom if who in self._own])
        self._until_dead(far, _STOP_S)
        for who in far:
            self.signal(who, signal.SIGKILL)
        self._until_dead(far, _KILL_S)
        with self._lock:  # nobody asks for these any more
            self._deaths = [death for death in self._deaths if death.who not in far]

    def _until_dead(self, whom: Collection[Hashable], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(map(self._is_alive, whom)) and time.monotonic() < deadline:
            self._look(time.monotonic())
            time.sleep(_PAUSE_S)

    def _tell(self, who: Hashable, message: NodeMessage) -> None:
        for node in self._there():
            if who in node.children | node.abandoned:
                node.wire.send(NODE_MESSAGES.line(message))

    def _there(self) -> list[_Node]:
        with self._lock:
            return list(self._nodes.values())

    def _look(self, now: float) -> None:
        """Gives up nodes that are silent, unless this one has just been asleep."""
        has_slept, self._looked = now - self._looked > _ASLEEP_S, now
        for node in self._there():
            if has_slept:
                node.seen = now
            elif now - node.seen > self._silence_s:
                node.wire.end()

    def _watch(self) -> None:
        """Looks whether this still is the first node. That is to read a file: whoever beats must not wait for it."""
        while not (self._is_closed or self._is_followed):
            self._is_followed = not self._is_first()
            time.sleep(_PULSE_S)

    def _listen(self) -> None:
        """Lets nodes in, and lets those that are there know that this one is. Touches no file, see ``_watch``."""
        pulsed = time.monotonic()
        while not self._is_closed:
            try:
                self._admission.turn(_PULSE_S)
            except OSError:  # no more connections can be had, or the network is not there now
                time.sleep(_PAUSE_S)
            if time.monotonic() - pulsed >= _PULSE_S:
                pulsed = time.monotonic()
                for node in self._there():
                    node.wire.send(NODE_MESSAGES.line(Pulse()))

    def _let_in(self, number: int, connection: socket.socket) -> None:
        serving = threading.Thread(target=self._serve, args=(number, Wire(connection)), daemon=True)
        self._serving = [*filter(threading.Thread.is_alive, self._serving), serving]
        serving.start()

    def _serve(self, number: int, wire: Wire) -> None:
        """A connection of a node that was let in, to its end."""
        with closing(wire):
            node = _Node(number, wire, time.monotonic())
            with self._lock:
                if self._is_closed or self._away.pop(number, None) is None:  # another has come meanwhile
                    return
                self._nodes[number] = node
                self._note(number, is_there=True)
            try:
                for line in wire.lines():
                    node.seen = time.monotonic()
                    self._hear(node, NODE_MESSAGES.read(line))
            except RunError as error:  # another version of this program: its children end with the connection
                print(f"node {number}: {error}", file=sys.stderr)
            finally:
                self._lose(node)

    def _refusal(self, number: int, is_ready: bool) -> str | None:
        """Why a node that calls is not let in; it may try again."""
        with self._lock:
            if not is_ready and number in self._away:
                self._away[number] = time.monotonic()  # it is on its way
                return "it is not ready"
            if self._is_closed:
                return "the run is over"
            if number in self._nodes:
                return f"node {number} is there already"  # or it has gone, and its silence is not long enough yet
            return None if number in self._away else f"there is no node {number}"

    def _hear(self, node: _Node, message: NodeMessage) -> None:
        match message:
            case Said(name, line):
                self._heard.put(Heard(self._names[name], line, node.seen))
            case Fell(name, why):
                with self._lock:
                    if (who := self._names[name]) in node.children:
                        node.children.remove(who)
                        self._deaths.append(Death(who, why, node.seen))

    def _lose(self, node: _Node) -> None:
        now = time.monotonic()
        with self._lock:
            if self._nodes.get(node.number) is not node:
                return
            del self._nodes[node.number]
            self._away[node.number] = now
            why = f"node {node.number} is gone"
            self._deaths += [Death(who, why, now, is_own=False) for who in node.children]
            node.children.clear()
            self._note(node.number, is_there=False)

    def _note(self, number: int, *, is_there: bool) -> None:
        self._heard.put(Heard(NODES, NODE_NEWS.line(NodeNews(number, is_there)), time.monotonic()))
