"""Lets in the nodes that prove that they have the key of a run, however many others call.

A caller that has not proved it has one of a limited number of places, for a limited time, and may say a limited number
of bytes. Where all places are taken, whoever has had one for the longest time loses it: a node with the key needs one
for a moment. No caller has a thread or a file of its own before it is let in.
"""

import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from swift.elastic.transport.handshake import LONGEST, line_of, proof, proves

_NUM_PLACES, _PATIENCE_S = 128, 5.0
_NUM_AT_ONCE = 64
"""Calls that are taken before those who are waiting are heard."""


class _Caller(NamedTuple):
    connection: socket.socket
    challenge: str
    deadline: float
    said: bytearray


class Admission:
    """The places of those who have not proved yet that they have the key.

    Args:
        listener: on which nodes call.
        key: that they have to prove to have, see ``Rendezvous``.
        refusal: why a node that has the key is not let in all the same; None: it is. Is told the node's number, and
            whether it is ready to come in.
        let_in: is given the number of a node, and its connection.
        patience_s: for a caller to prove that it has the key.
        num_places: callers at a time.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: str,
        refusal: Callable[[int, bool], str | None],
        let_in: Callable[[int, socket.socket], None],
        patience_s: float = _PATIENCE_S,
        num_places: int = _NUM_PLACES,
    ):
        self._listener, self._key, self._refusal, self._let_in = listener, key, refusal, let_in
        self._patience_s, self._num_places = patience_s, num_places
        self._callers: dict[int, _Caller] = {}  # by descriptor; the first has been here for the longest time
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __len__(self) -> int:
        """How many callers there are that may be anybody."""
        return len(self._callers)

    def turn(self, timeout_s: float) -> None:
        """Hears whoever calls or says something, and waits for that at most so long.

        Raises:
            OSError: nobody can call at present.
        """
        ready = {key.fd for key, _ in self._selector.select(timeout_s)}
        for descriptor in ready & self._callers.keys():
            self._hear(self._callers[descriptor])
        now = time.monotonic()
        while self._callers and (oldest := next(iter(self._callers.values()))).deadline < now:
            self._drop(oldest)
        if self._listener.fileno() in ready:
            with suppress(BlockingIOError):
                for _ in range(_NUM_AT_ONCE):
                    self._take(self._listener.accept()[0], now)

    def close(self) -> None:
        """Ends all calls; those who were let in stay."""
        for caller in list(self._callers.values()):
            self._drop(caller)
        self._selector.close()

    def _take(self, connection: socket.socket, now: float) -> None:
        if len(self._callers) == self._num_places:
            self._drop(next(iter(self._callers.values())))
        connection.setblocking(False)
        caller = _Caller(connection, secrets.token_hex(16), now + self._patience_s, bytearray())
        self._callers[connection.fileno()] = caller
        self._selector.register(connection, selectors.EVENT_READ)
        if not _say(connection, challenge=caller.challenge):
            self._drop(caller)

    def _hear(self, caller: _Caller) -> None:
        try:
            said = caller.connection.recv(LONGEST - len(caller.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        caller.said.extend(said)
        if caller.said.endswith(b"\n"):
            self._judge(caller)
        elif not said or len(caller.said) >= LONGEST:
            self._drop(caller)

    def _judge(self, caller: _Caller) -> None:
        """Lets a caller in that has said all that it has to, or drops it."""
        called = _read(bytes(caller.said))
        node = called.get("node")
        if not isinstance(node, int) or not proves(called, self._key, f"node {node} {caller.challenge}"):
            self._drop(caller)
            return
        refused = self._refusal(node, called.get("is_ready") is True)
        answer = proof(self._key, f"first {called.get('challenge')}")
        if not _say(caller.connection, proof=answer, refused=refused) or refused is not None:
            self._drop(caller)
            return
        self._forget(caller)
        caller.connection.setblocking(True)
        self._let_in(node, caller.connection)

    def _drop(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        del self._callers[caller.connection.fileno()]


def _say(connection: socket.socket, **said: object) -> bool:
    """Says a line, for which an open connection has always room. Whether it could."""
    line = line_of(**said).encode()
    try:
        return connection.send(line) == len(line)
    except OSError:
        return False


def _read(line: bytes) -> dict[str, object]:
    with suppress(ValueError, RecursionError):
        said = json.loads(line)
        return said if isinstance(said, dict) else {}
    return {}
