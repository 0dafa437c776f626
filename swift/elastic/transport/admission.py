"""Admission of nodes that prove that they have the key of a run, however many other callers there are.

The number of callers that have not proved it yet is limited, and so are the time and the bytes that each has for it.
When the number is reached, a new caller replaces the one that has been pending longest: a node with the key needs only
a moment. No caller gets a thread or a file of its own before it is admitted.
"""

import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from swift.elastic.transport.handshake import MAX_BYTES, has_proof, line_of, proof

_MAX_PENDING, _TIMEOUT_S = 128, 5.0
_MAX_ACCEPTED = 64
"""Connections accepted before pending callers are read from again."""
_FALSE_PROOF = "the proof is false"
"""All that a caller without the key is told: it can tell a wrong key from a connection that has ended."""


class _Caller(NamedTuple):
    connection: socket.socket
    challenge: str
    deadline: float
    received: bytearray


class Admission:
    """The callers that have not proved yet that they have the key.

    Args:
        listener: socket on which nodes connect.
        key: key of the run, see ``Rendezvous``.
        refusal: function of (node, whether it is ready to join) that returns why a node is refused although it has the
            key; None: it is admitted.
        admit: function that takes the number of an admitted node, and its connection.
        timeout_s: time limit of a caller to prove that it has the key, in seconds.
        max_pending: largest number of pending callers.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: str,
        refusal: Callable[[int, bool], str | None],
        admit: Callable[[int, socket.socket], None],
        timeout_s: float = _TIMEOUT_S,
        max_pending: int = _MAX_PENDING,
    ):
        self._listener, self._key, self._refusal, self._admit = listener, key, refusal, admit
        self._timeout_s, self._max_pending = timeout_s, max_pending
        self._callers: dict[int, _Caller] = {}  # by file descriptor, the oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __len__(self) -> int:
        """Number of pending callers."""
        return len(self._callers)

    def turn(self, timeout_s: float) -> None:
        """Accepts and reads from callers; waits for them for at most ``timeout_s`` seconds.

        Raises:
            OSError: no connection can be accepted at present.
        """
        ready = {key.fd for key, _ in self._selector.select(timeout_s)}
        for descriptor in ready & self._callers.keys():
            self._receive(self._callers[descriptor])
        now = time.monotonic()
        while self._callers and (oldest := next(iter(self._callers.values()))).deadline < now:
            self._drop(oldest)
        if self._listener.fileno() in ready:
            with suppress(BlockingIOError):
                for _ in range(_MAX_ACCEPTED):
                    self._accept(self._listener.accept()[0], now)

    def close(self) -> None:
        """Drops all pending callers; admitted ones stay connected."""
        for caller in list(self._callers.values()):
            self._drop(caller)
        self._selector.close()

    def _accept(self, connection: socket.socket, now: float) -> None:
        if len(self._callers) == self._max_pending:
            self._drop(next(iter(self._callers.values())))
        connection.setblocking(False)
        caller = _Caller(connection, secrets.token_hex(16), now + self._timeout_s, bytearray())
        self._callers[connection.fileno()] = caller
        self._selector.register(connection, selectors.EVENT_READ)
        if not _send(connection, challenge=caller.challenge):
            self._drop(caller)

    def _receive(self, caller: _Caller) -> None:
        try:
            received = caller.connection.recv(MAX_BYTES - len(caller.received))
        except BlockingIOError:
            return
        except OSError:
            received = b""
        caller.received.extend(received)
        if caller.received.endswith(b"\n"):
            self._decide(caller)
        elif not received or len(caller.received) >= MAX_BYTES:
            self._drop(caller)

    def _decide(self, caller: _Caller) -> None:
        """Admits a caller that has sent its whole line, or drops it."""
        call = _parse(bytes(caller.received))
        node = call.get("node")
        if not isinstance(node, int):
            self._drop(caller)
            return
        if not has_proof(call, self._key, f"node {node} {caller.challenge}"):
            _send(caller.connection, refused=_FALSE_PROOF)
            self._drop(caller)
            return
        refused = self._refusal(node, call.get("is_ready") is True)
        answer = proof(self._key, f"first {call.get('challenge')}")
        if not _send(caller.connection, proof=answer, refused=refused) or refused is not None:
            self._drop(caller)
            return
        self._forget(caller)
        caller.connection.setblocking(True)
        self._admit(node, caller.connection)

    def _drop(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        del self._callers[caller.connection.fileno()]


def _send(connection: socket.socket, **fields: object) -> bool:
    """Sends a line, for which a new connection always has room; returns whether it was sent."""
    line = line_of(**fields).encode()
    try:
        return connection.send(line) == len(line)
    except OSError:
        return False


def _parse(line: bytes) -> dict[str, object]:
    with suppress(ValueError, RecursionError):
        fields = json.loads(line)
        return fields if isinstance(fields, dict) else {}
    return {}
