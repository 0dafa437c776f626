"""Where the nodes of a run meet: a file in the run directory, which all of them see, tells where the first listens.

Who can read the file holds its key, and each side proves to the other that it does. What is said after is neither
signed nor encrypted, nor is what processes send each other in an epoch (gloo): networks have to be asked for.
"""

import hmac
import ipaddress
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from swift.errors import SettingError
from swift.files import replace_file
from swift.mesh.distributed import LOOPBACK

_FILE = ".meeting.json"
_HANDSHAKE_S, _SEND_S = 5.0, 2
_LONGEST = 1024
"""Of the lines before the caller is known."""


@dataclass(frozen=True)
class Meeting:
    """What the other nodes have to know of the first.

    Attributes:
        host, port: where it listens.
        key: only who can read the run directory knows it.
        scratch: what the processes share, see ``Scratch``.
        silence_s: after how long without a word from it a node is on its own.
    """

    host: str
    port: int
    key: str
    scratch: str
    silence_s: float

    @classmethod
    def of(cls, listener: socket.socket, scratch: Path, silence_s: float) -> Self:
        """A new one, with a new key."""
        host, port = listener.getsockname()[:2]
        return cls(host, port, secrets.token_hex(32), str(scratch), silence_s)

    @contextmanager
    def announced(self, run_dir: Path) -> Iterator[None]:
        """With the file, which only its owner can read."""
        replace_file(run_dir / _FILE, json.dumps(asdict(self)).encode(), mode=0o600)
        try:
            yield
        finally:
            if Meeting.find(run_dir) == self:
                (run_dir / _FILE).unlink()

    @classmethod
    def find(cls, run_dir: Path) -> Self | None:
        """The meeting of a run; None while there is none, or none that can be read."""
        try:
            return cls(**json.loads((run_dir / _FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return None


def check_network(host: str, *, is_trusted: bool) -> None:
    """Whether this node may and can be one of a run.

    Args:
        host: the address of the first node.
        is_trusted: whether the network may be used.

    Raises:
        SettingError: it may not, or the others could not reach its processes.
    """
    if ipaddress.ip_address(host).is_loopback:
        return
    if not is_trusted:
        allowed = "is a network, on which nothing is encrypted; add --insecure-network where that can be trusted"
        raise SettingError("--listen", host, allowed)
    name = socket.gethostname()
    try:
        own = socket.gethostbyname(name)
    except OSError:
        own = LOOPBACK
    if ipaddress.ip_address(own).is_loopback:
        allowed = f"processes listen at the name of their machine, and {name} stands for {own} here; see /etc/hosts"
        raise SettingError("--listen", host, allowed)


class Wire:
    """One end of a connection between two nodes; messages are lines.

    Args:
        connection: which it owns from now on.
    """

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Of sending only: whoever does not take what is sent is as good as gone.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        self._connection, self._reader = connection, connection.makefile("r", encoding="utf-8")
        self._sending = threading.Lock()

    def send(self, line: str) -> None:
        """Says a line; from any thread. Where the connection is broken its reader finds out."""
        with self._sending:
            try:
                self._connection.sendall(line.encode())
            except OSError:
                self.end()

    def lines(self) -> Iterator[str]:
        """What comes, until the connection ends."""
        with suppress(OSError, ValueError):
            for line in self._reader:
                if line.endswith("\n"):
                    yield line

    def end(self) -> None:
        """Ends the connection for both sides; from any thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it and gives back what it holds; for who reads it, and no other thread."""
        self.end()
        self._reader.close()
        self._connection.close()

    def receive(self, key: str, refusal: Callable[[int], str | None]) -> int | None:
        """As the first node: which node calls; None if it does not prove to be one, or is refused for a reason."""
        challenge = secrets.token_hex(16)
        self.send(_line(challenge=challenge))
        called = self._next()
        node = called.get("node")
        if not isinstance(node, int) or not _proves(called, key, f"node {node} {challenge}"):
            return None
        refused = refusal(node)
        self.send(_line(proof=_proof(key, f"first {called.get('challenge')}"), refused=refused))
        return node if refused is None else None

    def call(self, key: str, node: int) -> str | None:
        """As another node: None if the first has let it in, and proved to be it; or why it has not."""
        challenge = secrets.token_hex(16)
        proof = _proof(key, f"node {node} {self._next().get('challenge')}")
        self.send(_line(node=node, challenge=challenge, proof=proof))
        answer = self._next()
        if not _proves(answer, key, f"first {challenge}"):
            return "it does not answer as the first node does"
        refused = answer.get("refused")
        return None if refused is None else str(refused)

    def _next(self) -> dict[str, object]:
        """A line of the handshake; nothing where none comes in time."""
        watch = threading.Timer(_HANDSHAKE_S, self.end)
        watch.start()
        try:
            said = json.loads(self._reader.readline(_LONGEST) or "{}")
            return said if isinstance(said, dict) else {}
        except (OSError, ValueError):
            return {}
        finally:
            watch.cancel()


def _line(**said: object) -> str:
    return json.dumps(said) + "\n"


def _proof(key: str, text: str) -> str:
    return hmac.digest(key.encode(), text.encode(), "sha256").hex()


def _proves(said: dict[str, object], key: str, text: str) -> bool:
    return hmac.compare_digest(str(said.get("proof")).encode(), _proof(key, text).encode())
