"""Where the nodes of a run meet: a file in the run directory, which all of them see, tells where the first listens.

Who can read the file holds its key, and each side proves to the other that it does. What is said after is neither
signed nor encrypted, nor is what processes send each other in a generation (gloo): networks have to be asked for.
"""

import hashlib
import importlib.metadata
import ipaddress
import json
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Self

import swift
from swift.elastic.transport.handshake import LONGEST, line_of, proof, proves
from swift.errors import SettingError
from swift.files import replace_file

_FILE = ".meeting.json"
_HANDSHAKE_S, _SEND_S = 5.0, 2


@dataclass(frozen=True)
class Rendezvous:
    """What the other nodes have to know of the first.

    Attributes:
        host, port: where it listens.
        key: only who can read the run directory knows it.
        scratch: what the processes share, see ``RunFiles``.
        silence_s: after how long without a word from it a node is on its own.
        program: what it runs, see ``this_program``.
    """

    host: str
    port: int
    key: str
    scratch: str
    silence_s: float
    program: str = ""

    @classmethod
    def of(cls, listener: socket.socket, scratch: Path, silence_s: float) -> Self:
        """A new one, with a new key."""
        host, port = listener.getsockname()[:2]
        return cls(host, port, secrets.token_hex(32), str(scratch), silence_s, this_program())

    @contextmanager
    def announced(self, run_dir: Path) -> Iterator[None]:
        """With the file, which only its owner can read."""
        replace_file(run_dir / _FILE, json.dumps(asdict(self)).encode(), mode=0o600)
        try:
            yield
        finally:
            if Rendezvous.find(run_dir) == self:
                (run_dir / _FILE).unlink()

    @classmethod
    def find(cls, run_dir: Path) -> Self | None:
        """The meeting of a run; None while there is none, or none that can be read."""
        try:
            found = cls(**json.loads((run_dir / _FILE).read_text()))
            ipaddress.ip_address(found.host)
        except (OSError, ValueError, TypeError):
            return None
        texts, is_number = (found.host, found.key, found.scratch, found.program), type(found.silence_s) in (int, float)
        is_sound = all(isinstance(text, str) for text in texts) and type(found.port) is int and is_number
        return found if is_sound else None

    def check_program(self) -> None:
        """Raises SettingError where the first node runs another program than this one."""
        if self.program != this_program():
            allowed = "its first node has another version of this program, of JAX or of Python: all nodes need the same"
            raise SettingError("--run-dir", str(Path(self.scratch).parent), allowed)


@cache
def this_program() -> str:
    """A digest of what all nodes need to have alike, as they read each other's messages and compiled programs."""
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")]
    known = hashlib.sha256(repr((sys.version_info[:2], versions)).encode())
    package = Path(swift.__file__).parent
    for path in sorted(package.rglob("*.py")):
        known.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return known.hexdigest()[:32]


def check_network(host: str, *, is_trusted: bool) -> None:
    """Raises SettingError where the first node listens on a network that may not be used.

    Args:
        host: the address of the first node.
        is_trusted: whether networks may be used.
    """
    if not is_trusted and not ipaddress.ip_address(host).is_loopback:
        allowed = "is a network, on which nothing is encrypted; add --insecure-network where that can be trusted"
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

    def call(self, key: str, node: int, *, is_ready: bool = True) -> str | None:
        """As another node: None if the first has let it in, and proved to be it; or why it has not.

        Who is not ready is not let in; the first then knows that it is coming.
        """
        challenge = secrets.token_hex(16)
        proved = proof(key, f"node {node} {self._next().get('challenge')}")
        self.send(line_of(node=node, is_ready=is_ready, challenge=challenge, proof=proved))
        answer = self._next()
        if not proves(answer, key, f"first {challenge}"):
            return "it does not answer as the first node does"
        refused = answer.get("refused")
        return None if refused is None else str(refused)

    def _next(self) -> dict[str, object]:
        """A line of the handshake; nothing where none comes in time."""
        watch = threading.Timer(_HANDSHAKE_S, self.end)
        watch.start()
        try:
            said = json.loads(self._reader.readline(LONGEST) or "{}")
            return said if isinstance(said, dict) else {}
        except (OSError, ValueError):
            return {}
        finally:
            watch.cancel()
