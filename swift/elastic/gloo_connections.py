"""Connections that gloo waits for: made in the place of a process that has died, so that nobody waits for it.

Each process publishes a host, an address, and a number for each other process, with which that connects to it. Gloo
waits for the other side without a limit, and without a socket that could be shut down. If XLA published it in another
way, a process that waits to be connected to by a dead one could not be released, and would end after a time limit (see
``swift.elastic.worker.worker``).
"""

import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np

from swift.elastic.own_sockets import Address

GLOO = "cpu:gloo"
"""XLA's own directory of what gloo publishes."""
_NUMBER, _MAX_NUMBER = np.dtype("=i8"), 1 << 14
"""Numbers count a process's connections from 0; a larger one is none of gloo's, but of a layout that is not known."""
_CONNECT_S = 1.0


def connect_as_all(published: Mapping[str, bytes], addresses: Iterable[Address]) -> None:
    """Connects to a process at its addresses with every number with which another process could.

    Args:
        published: what gloo has published, by key.
        addresses: addresses at which the process listens.
    """
    most = max((largest_number(key, value) for key, value in published.items()), default=-1)
    for address in addresses:
        for number in range(1 + most):
            with suppress(OSError), socket.create_connection(address, _CONNECT_S) as connection:
                connection.sendall(_NUMBER.type(number).tobytes())


def largest_number(key: str, value: bytes) -> int:
    """Returns the largest number with which a process is connected to, of those at the end of what gloo publishes.

    -1 where what is published has another layout.
    """
    size = (key.count(",") + 1) * _NUMBER.itemsize  # the key lists the processes
    number = int(np.frombuffer(value[-size:], _NUMBER).max()) if len(value) >= size else -1
    return number if number <= _MAX_NUMBER else -1
