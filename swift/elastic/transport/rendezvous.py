"""Rendezvous of the nodes of a run: a file in the run directory, which all nodes see, has the first one's address.

The file also has the key of the run, and both sides of a connection prove to each other that they have it. Later
messages are neither signed nor encrypted, and neither is the traffic among the processes of a generation (gloo): so
the use of a network has to be requested explicitly.
"""

import errno
import ipaddress
import json
import secrets
import socket
import struct
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from swift.elastic.transport.handshake import MAX_BYTES, has_proof, line_of, proof
from swift.errors import SettingError
from swift.files import replace_file
from swift.program import this_program
from swift.tasks import retried

_FILE = ".meeting.json"
_HANDSHAKE_S, _SEND_S = 5.0, 2


@dataclass(frozen=True)
class Rendezvous:
    """The information that the other nodes need about the first.

    Attributes:
        host: address on which it listens.
        port: port on which it listens.
        key: key of the run, known only to those who can read the run directory.
        scratch: directory that the processes share, see ``RunFiles``.
        silence_s: seconds without a message from it after which a node counts it as lost.
        program: digest of the program that it runs, see ``this_program``.
    """

    host: str
    port: int
    key: str
    scratch: str
    silence_s: float
    program: str = ""

    @classmethod
    def of(cls, listener: socket.socket, scratch: Path, silence_s: float) -> Self:
        """Makes a rendezvous with a new key."""
        host, port = listener.getsockname()[:2]
        return cls(host, port, secrets.token_hex(32), str(scratch), silence_s, this_program())

    @contextmanager
    def announced(self, run_dir: Path) -> Iterator[None]:
        """Writes the file for the duration of the block; only its owner can read it."""
        replace_file(run_dir / _FILE, json.dumps(asdict(self)).encode(), mode=0o600)
        try:
            yield
        finally:
            with suppress(
                OSError
            ):  # of a disk that fails: one that is left leads to nobody, and the next one replaces it
                if Rendezvous.find(run_dir) == self:
                    (run_dir / _FILE).unlink()

    @classmethod
    def find(cls, run_dir: Path) -> Self | None:
        """Reads the rendezvous of a run; returns None if there is none, or none that can be read."""
        try:
            found = cls(**json.loads((run_dir / _FILE).read_text()))
            ipaddress.ip_address(found.host)
        except (OSError, ValueError, TypeError):
            return None
        texts, is_number = (found.host, found.key, found.scratch, found.program), type(found.silence_s) in (int, float)
        is_sound = all(isinstance(text, str) for text in texts) and type(found.port) is int and is_number
        return found if is_sound else None

    def check_program(self) -> None:
        """Raises SettingError if the first node runs another program than this one."""
        if self.program != this_program():
            allowed = "its first node has another version of Swift, JAX, NumPy or Python: all nodes need the same"
            raise SettingError("--run-dir", str(Path(self.scratch).parent), allowed)


def check_network(host: str, *, is_trusted: bool) -> None:
    """Raises SettingError if the first node listens on a network that may not be used.

    Args:
        host: address of the first node.
        is_trusted: whether networks may be used.
    """
    if not is_trusted and not ipaddress.ip_address(host).is_loopback:
        allowed = "is a network, on which nothing is encrypted; add --insecure-network if you trust that network"
        raise SettingError("--listen", host, allowed)


class NodeConnection:
    """One end of a connection between two nodes; messages are lines.

    Args:
        connection: socket, which it owns from now on.
    """

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Time limit of sends only: a node that does not take what is sent is as good as lost.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        self._connection, self._reader = connection, connection.makefile("r", encoding="utf-8")
        self._sending = threading.Lock()

    def send(self, line: str) -> None:
        """Sends a line, from any thread. If the connection is broken its reader will notice."""
        with self._sending:
            try:
                self._connection.sendall(line.encode())
            except OSError:
                self.end()

    def lines(self) -> Iterator[str]:
        """Yields the lines received, until the connection ends."""
        with suppress(OSError, ValueError):
            for line in self._reader:
                if line.endswith("\n"):
                    yield line

    def end(self) -> None:
        """Ends the connection for both sides, from any thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection and releases the socket; only for the thread that reads from it."""
        self.end()
        self._reader.close()
        self._connection.close()

    def authenticate(self, key: str, node: int, *, is_ready: bool = True) -> str | None:
        """Joins the run as another node, after both sides have proved that they have its key.

        A node that is not ready is not admitted; the first node then knows that it will join.

        Returns:
            None if this node is admitted; otherwise the reason why it is not.
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
        """Reads a line of the handshake; returns an empty one if none comes in time."""
        timer = self._time_limit()
        try:
            fields = json.loads(self._reader.readline(MAX_BYTES) or "{}")
            return fields if isinstance(fields, dict) else {}
        except (OSError, ValueError):
            return {}
        finally:
            timer.cancel()

    def _time_limit(self) -> threading.Timer:
        """Ends the connection after a while, unless it is cancelled; raises OSError if no thread can be started."""

        def start() -> threading.Timer:
            timer = threading.Timer(_HANDSHAKE_S, self.end)
            timer.start()
            return timer

        try:
            return retried(start, _HANDSHAKE_S)
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error


@dataclass(eq=False)
class ConnectedNode:
    """A node that is connected to the first one.

    Attributes:
        number: number of the node, from 1.
        connection: connection to it.
        seen: when it last sent a message, in seconds.
        children: its children.
        abandoned: its children that were killed and do not die.
        held: children that it was told to hold ready.
    """

    number: int
    connection: NodeConnection
    seen: float
    children: set[Hashable] = field(default_factory=set)
    abandoned: set[Hashable] = field(default_factory=set)
    held: set[Hashable] = field(default_factory=set)
