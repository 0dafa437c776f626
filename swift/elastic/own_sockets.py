"""The TCP sockets of this process, which belong to libraries that give no other access to them."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

Address = tuple[str, int]
"""Host and port."""


def listening_at() -> set[Address]:
    """Returns the addresses on which this process listens."""
    return {found.getsockname()[:2] for found in _sockets() if _listens(found)}


def connections() -> Iterator[tuple[Address, Address, socket.socket]]:
    """Yields the TCP connections of this process: its own address, the other side's, and the connection."""
    for found in _sockets():
        with suppress(OSError):
            if not _listens(found):
                yield found.getsockname()[:2], found.getpeername()[:2], found


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[socket.socket]:
    """Yields the TCP sockets of this process, each as a duplicate that is closed when the next one is requested."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            # The original may be closed meanwhile, and its number reused: therefore only the duplicate is inspected.
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found
