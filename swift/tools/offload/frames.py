"""Frames of bytes on a connection: each begins with its length."""

import socket
import struct

_HEAD = struct.Struct("<I")
MOST_BYTES = 1 << 28


def send_frame(connection: socket.socket, content: bytes) -> None:
    """Sends a frame; raises OSError if the connection is broken."""
    if len(content) > MOST_BYTES:
        raise OSError(f"{len(content)} bytes are more than a frame may have")
    connection.sendall(_HEAD.pack(len(content)) + content)


def receive_frame(connection: socket.socket) -> bytes:
    """Receives a frame; raises OSError if the connection ends before it is whole."""
    (size,) = _HEAD.unpack(_receive(connection, _HEAD.size))
    if size > MOST_BYTES:
        raise OSError(f"{size} bytes are more than a frame may have")
    return _receive(connection, size)


def _receive(connection: socket.socket, size: int) -> bytes:
    received = bytearray(size)
    view = memoryview(received)
    while view:
        num = connection.recv_into(view)
        if not num:
            raise ConnectionError("the connection has ended")
        view = view[num:]
    return bytes(received)
