"""Connections between the nodes of a run: how nodes find each other, authenticate, and exchange lines.

``Rendezvous`` is a file in the run directory, which all nodes see, with the address of the first node and the key of
the run. In the handshake both sides prove that they have the key, without sending it:

1. The first node sends a challenge.
2. The other node answers with its number, a challenge of its own, and the proof for the first challenge.
3. The first node answers with its own proof, and says whether it admits the node. If the other node's proof is false,
   the first node answers with a refusal, without a proof of its own.

Later messages are neither signed nor encrypted, and neither is the traffic between the processes of a generation
(gloo). The use of a network therefore has to be requested explicitly, see ``check_network``.

``Admission`` is the first node's side of the handshake. It withstands any number of unauthorized connections: the
number of pending callers, which have not yet proved that they have the key, is limited, and so are the time and the
bytes of each. At the limit, a new caller replaces the one that has been pending longest, since a node with the key
needs only a moment. No caller gets its own thread or file object before it is admitted.
"""

import errno
import hmac
import ipaddress
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Self

from swift.errors import SettingError
from swift.files import replace_file, this_program
from swift.tasks import retried

MAX_BYTES = 1024
"""Maximum size of a line of the handshake, in bytes."""
_FILE = ".meeting.json"
_HANDSHAKE_S, _SEND_S, _MAX_PENDING = 5.0, 2, 128
_MAX_ACCEPTED = 64
"""Maximum number of connections that are accepted before pending callers are read again."""
_FALSE_PROOF = "the proof is false"
"""The only answer to a caller without the key; it distinguishes a wrong key from a lost connection."""


@dataclass(frozen=True)
class Rendezvous:
    """The information that other nodes need about the first node, in a file in the run directory.

    Attributes:
        host: address at which the first node listens.
        port: port at which the first node listens.
        key: key of the run, known only to users who can read this file.
        scratch: directory that the processes share, see ``RunFiles``.
        silence_s: seconds without a message after which another node considers the first one lost.
        program: digest of the program that the first node runs, see ``this_program``.
    """

    host: str
    port: int
    key: str
    scratch: str
    silence_s: float
    program: str = ""

    @classmethod
    def of(cls, listener: socket.socket, scratch: Path, silence_s: float) -> Self:
        """Returns a rendezvous for a listening socket, with a new key."""
        host, port = listener.getsockname()[:2]
        return cls(host, port, secrets.token_hex(32), str(scratch), silence_s, this_program())

    @contextmanager
    def announced(self, run_dir: Path) -> Iterator[None]:
        """Writes the file for the duration of the ``with`` block, readable only by its owner."""
        replace_file(run_dir / _FILE, json.dumps(asdict(self)).encode(), mode=0o600)
        try:
            yield
        finally:
            with suppress(OSError):  # the disk fails: a leftover file is harmless, and the next run replaces it
                if Rendezvous.find(run_dir) == self:
                    (run_dir / _FILE).unlink()

    @classmethod
    def find(cls, run_dir: Path) -> Self | None:
        """Reads the rendezvous of a run; returns None if the file is missing or damaged."""
        try:
            rendezvous = cls(**json.loads((run_dir / _FILE).read_text()))
            ipaddress.ip_address(rendezvous.host)
        except (OSError, ValueError, TypeError):
            return None
        texts = (rendezvous.host, rendezvous.key, rendezvous.scratch, rendezvous.program)
        is_number = type(rendezvous.silence_s) in (int, float)
        is_sound = all(isinstance(text, str) for text in texts) and type(rendezvous.port) is int and is_number
        return rendezvous if is_sound else None

    def check_program(self) -> None:
        """Raises SettingError if the first node runs another version of the program than this node."""
        if self.program != this_program():
            allowed = "its first node has another version of Swift, JAX, NumPy or Python: all nodes need the same"
            raise SettingError("--run-dir", str(Path(self.scratch).parent), allowed)


def check_network(host: str, *, is_trusted: bool) -> None:
    """Raises SettingError if the first node listens on a network and the user has not allowed that.

    Args:
        host: address of the first node.
        is_trusted: whether the user trusts the network (``--insecure-network``).
    """
    if not is_trusted and not ipaddress.ip_address(host).is_loopback:
        allowed = "is a network, on which nothing is encrypted; add --insecure-network if you trust that network"
        raise SettingError("--listen", host, allowed)


class NodeConnection:
    """One end of a connection between two nodes, on which messages are lines.

    Args:
        connection: socket, owned by this object from now on.
    """

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Limits sends only, not reads: a node that does not receive what is sent is as good as lost.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        self._connection, self._reader = connection, connection.makefile("r", encoding="utf-8")
        self._sending = threading.Lock()

    def send(self, line: str) -> None:
        """Sends a line; any thread may call this. A broken connection is shut down, so that ``lines`` ends."""
        with self._sending:
            try:
                self._connection.sendall(line.encode())
            except OSError:
                self.end()

    def lines(self) -> Iterator[str]:
        """Yields received lines until the connection ends."""
        with suppress(OSError, ValueError):
            for line in self._reader:
                if line.endswith("\n"):
                    yield line

    def end(self) -> None:
        """Shuts the connection down for both sides; any thread may call this."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shuts the connection down and releases the socket; only the reading thread may call this."""
        self.end()
        self._reader.close()
        self._connection.close()

    def authenticate(self, key: str, node: int, *, is_ready: bool = True) -> str | None:
        """Performs the handshake as node ``node``: both sides prove that they have the key.

        With ``is_ready=False``, the node only announces that it will join, and is not admitted.

        Returns:
            None if this node is admitted, otherwise the reason why it is not.
        """
        challenge = secrets.token_hex(16)
        own_proof = proof(key, f"node {node} {self._next().get('challenge')}")
        self.send(line_of(node=node, is_ready=is_ready, challenge=challenge, proof=own_proof))
        answer = self._next()
        if not has_proof(answer, key, f"first {challenge}"):
            return "what answers at this address is not the first node of this run"
        refused = answer.get("refused")
        return None if refused is None else str(refused)

    def _next(self) -> dict[str, object]:
        """Reads a line of the handshake; returns an empty dict if no valid line arrives in time."""
        timer = self._time_limit()
        try:
            return _parse(self._reader.readline(MAX_BYTES))
        except (OSError, ValueError):
            return {}
        finally:
            timer.cancel()

    def _time_limit(self) -> threading.Timer:
        """Starts a timer that shuts the connection down unless canceled; raises OSError if no thread can be started."""

        def start() -> threading.Timer:
            timer = threading.Timer(_HANDSHAKE_S, self.end)
            timer.start()
            return timer

        try:
            return retried(start, _HANDSHAKE_S)
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error


class _Caller(NamedTuple):
    connection: socket.socket
    challenge: str
    deadline: float
    received: bytearray


class Admission:
    """The first node's side of the handshake, with all callers that have not yet proved that they have the key.

    Args:
        listener: socket on which nodes connect.
        key: key of the run, see ``Rendezvous``.
        refusal: maps (node, whether it is ready to join) to the reason why a node with the key is refused, or to None
            if it is admitted.
        admit: called with the number of an admitted node and its connection.
        timeout_s: time limit for a caller to prove that it has the key, in seconds.
        max_pending: maximum number of pending callers.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: str,
        refusal: Callable[[int, bool], str | None],
        admit: Callable[[int, socket.socket], None],
        timeout_s: float = _HANDSHAKE_S,
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
        """Accepts new callers and reads from pending ones; waits at most ``timeout_s`` seconds for either.

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
        """Admits or drops a caller that has sent a complete line."""
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


def line_of(**fields: object) -> str:
    """Returns a line of the handshake."""
    return json.dumps(fields) + "\n"


def proof(key: str, text: str) -> str:
    """Returns the HMAC of a text, which can only be computed with the key."""
    return hmac.digest(key.encode(), text.encode(), "sha256").hex()


def has_proof(fields: Mapping[str, object], key: str, text: str) -> bool:
    """Returns whether a received line has the right proof for a text; compares in constant time."""
    return hmac.compare_digest(str(fields.get("proof")).encode(errors="replace"), proof(key, text).encode())


def _send(connection: socket.socket, **fields: object) -> bool:
    """Sends a line without waiting, as it fits into the buffer of a new connection; returns whether it was sent."""
    line = line_of(**fields).encode()
    try:
        return connection.send(line) == len(line)
    except OSError:
        return False


def _parse(line: str | bytes) -> dict[str, object]:
    """Parses a line of the handshake; returns an empty dict if it is not a JSON object."""
    with suppress(ValueError, RecursionError):
        fields = json.loads(line)
        return fields if isinstance(fields, dict) else {}
    return {}
