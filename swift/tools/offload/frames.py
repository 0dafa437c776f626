"""Frames of bytes on a connection: each begins with its length, and is whole within a time limit."""

import socket
import struct
import time

_HEAD = struct.Struct("<I")
MOST_BYTES = 1 << 28
_LEAST_RATE = 1 << 23
"""Bytes of a frame in a second, below which a connection counts as broken."""


class Ended(ConnectionError):
    """The other side has ended the connection."""


def send_frame(connection: socket.socket, content: bytes, limit_s: float) -> None:
    """Sends a frame.

    Args:
        connection: connection, whose time limit for a single read or write is left changed.
        content: content of the frame.
        limit_s: seconds for all of it, besides those that its bytes take.

    Raises:
        TimeoutError: the other side does not take it in time.
        OSError: the connection is broken.
    """
    if len(content) > MOST_BYTES:
        raise OSError(f"{len(content)} bytes are more than a frame may have")
    connection.settimeout(limit_s + len(content) / _LEAST_RATE)
    connection.sendall(_HEAD.pack(len(content)) + content)


def receive_frame(connection: socket.socket, limit_s: float) -> bytes:
    """Receives a frame.

    Args:
        connection: see ``send_frame``.
        limit_s: seconds until it begins, and for the rest besides those that its bytes take.

    Raises:
        TimeoutError: it is not whole in time, however often a part of it comes.
        OSError: the connection ends before.
    """
    (size,) = _HEAD.unpack(receive_bytes(connection, _HEAD.size, limit_s))
    if size > MOST_BYTES:
        raise OSError(f"{size} bytes are more than a frame may have")
    return receive_bytes(connection, size, limit_s + size / _LEAST_RATE)


def receive_bytes(connection: socket.socket, size: int, limit_s: float) -> bytes:
    """Receives so many bytes; see ``receive_frame``, the limit is for all of them."""
    received, deadline = bytearray(size), time.monotonic() + limit_s
    view = memoryview(received)
    while view:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        num = connection.recv_into(view)
        if not num:
            raise Ended("the connection has ended")
        view = view[num:]
    return bytes(received)
