"""The client side of input hosts: one connection for each host process, shared by a plan's threads."""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from swift.elastic.transport.connections import MAX_BYTES, has_proof, line_of, proof
from swift.errors import SettingError
from swift.input.server import receive_bytes, receive_frame, send_frame

Address = tuple[str, int]
"""Host and port."""
_CONNECT_S = 5.0
_SILENCE_S = 10.0
"""Seconds for an answer to begin, and again for it to be complete; after that the host counts as lost."""
_MOST_WORKERS = 256
_LEAVE_S = 1.0
"""Maximum time in seconds that ``close`` waits for host processes to confirm that they are free again."""


@dataclass(eq=False)
class _Connection:
    """A connection to one process of a host.

    Attributes:
        host: address of the host, as text.
        socket: socket of the connection.
        is_lost: whether this process, or the whole host, is lost.
    """

    host: str
    socket: socket.socket
    is_lost: bool = False


class InputHostPool:
    """The connected input hosts; implements ``swift.data.remote_records.InputHosts``.

    Args:
        connections: connections to the processes of all hosts.
        report: called, from any thread, with a line about a host that is lost or cannot answer.
    """

    def __init__(self, connections: Sequence[_Connection], report: Callable[[str], None]):
        self._all, self._report = connections, report
        self._free = SimpleQueue[_Connection]()
        for connection in connections:
            self._free.put(connection)
        self._reported, self._lock, self._is_closed = set[str](), threading.Lock(), False

    @property
    def num_workers(self) -> int:
        """Number of host processes that are not lost."""
        return sum(not connection.is_lost for connection in self._all)

    def ask(self, request: bytes) -> tuple[str, bytes] | None:
        """Sends a request to a free process; returns (host, answer), or None if none is free or the process is lost."""
        while True:
            try:
                connection = self._free.get_nowait()
            except Empty:
                return None
            if not connection.is_lost:
                break
        try:
            send_frame(connection.socket, request, _SILENCE_S)
            answer = receive_frame(connection.socket, _SILENCE_S)
        except OSError as error:
            self._lose(connection, error)
            return None
        self._free.put(connection)
        return connection.host, answer

    def tell(self, host: str, line: str) -> None:
        """Reports that a host could not answer; only the first time for each host."""
        with self._lock:
            is_new = host not in self._reported
            self._reported.add(host)
        if is_new:
            self._report(f"input host {host} {line}; what it cannot make is made here")

    def close(self) -> None:
        """Closes all connections, including busy ones, whose answers are no longer needed.

        Waits until the idle processes are free for another caller, since the next caller may be this machine.
        """
        self._is_closed = True
        idle = list[_Connection]()
        with suppress(Empty):
            while True:
                idle.append(self._free.get_nowait())
        for connection in self._all:
            _end(
                connection.socket, socket.SHUT_WR if connection in idle and not connection.is_lost else socket.SHUT_RDWR
            )
        deadline = time.monotonic() + _LEAVE_S
        for connection in idle:
            with suppress(OSError):
                connection.socket.settimeout(max(deadline - time.monotonic(), 0.001))
                connection.socket.recv(1)
        for connection in self._all:
            connection.socket.close()

    def _lose(self, connection: _Connection, error: OSError) -> None:
        connection.is_lost = True
        if isinstance(error, TimeoutError):  # silence means that the machine is lost, not only this process
            for other in self._all:
                if other.host == connection.host:
                    other.is_lost = True
                    _end(other.socket)
        reason = f"has not answered for {_SILENCE_S:g} s" if isinstance(error, TimeoutError) else "is lost"
        with self._lock:
            is_new = not self._is_closed and f"lost {connection.host}" not in self._reported
            self._reported.add(f"lost {connection.host}")
        if is_new:
            self._report(f"input host {connection.host} {reason}: what its processes made is made here")
        connection.socket.close()


def connect(
    addresses: Sequence[Address],
    key: str,
    facts: Mapping[str, str],
    report: Callable[[str], None],
    report_missing: Callable[[str], None] | None = None,
) -> InputHostPool:
    """Connects to all free processes of input hosts.

    Args:
        addresses: addresses of the hosts.
        key: key that both sides must prove to have.
        facts: facts, by name, on which both sides must agree, see ``pipeline_facts``.
        report: called with a line about a host that cannot be reached, or is lost later.
        report_missing: called instead of ``report`` for a host that cannot be reached.

    Raises:
        SettingError: a host has a different key, or different facts than this machine.
    """
    connections = list[_Connection]()
    for address in addresses:
        name, num_before = "{}:{}".format(*address), len(connections)
        try:
            while (
                len(connections) < num_before + _MOST_WORKERS
                and (connection := _connected(name, address, key)) is not None
            ):
                connections.append(connection)
                _compare(connection, facts)
            if len(connections) == num_before:
                report(f"input host {name} has no process that is free: samples are made without it")
        except OSError as error:
            reason = f"cannot be reached ({error.strerror or error})"
            (report_missing or report)(f"input host {name} {reason}: samples are made without it")
            for connection in connections[num_before:]:
                connection.socket.close()
            del connections[num_before:]
        except SettingError:
            InputHostPool(connections, report).close()
            raise
    return InputHostPool(connections, report)


def _connected(name: str, address: Address, key: str) -> _Connection | None:
    """Connects to a free process of a host; returns None if all are busy.

    Raises:
        SettingError: the other side does not have the key.
        OSError: the host cannot be reached, or closes the connection before it has answered.
    """
    allowed = "is no input host, or has another key than --key-file"
    connection = socket.create_connection(address, _CONNECT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = secrets.token_hex(16)
        first = _line(connection).get("challenge")
        if not isinstance(first, str):
            raise SettingError("--input-hosts", name, allowed)
        own_proof = proof(key, f"node 0 {first}")
        connection.sendall(line_of(node=0, is_ready=True, challenge=challenge, proof=own_proof).encode())
        answer = _line(connection)
        if not has_proof(answer, key, f"first {challenge}"):
            raise SettingError("--input-hosts", name, allowed)
        if answer.get("refused") is not None:
            connection.close()
            return None
        return _Connection(name, connection)
    except BaseException:
        connection.close()
        raise


def _line(connection: socket.socket) -> Mapping[str, object]:
    """Reads a handshake line and returns its fields, or {} if it is not a JSON object."""
    received, deadline = bytearray(), time.monotonic() + _CONNECT_S
    while not received.endswith(b"\n") and len(received) < MAX_BYTES:
        # Byte by byte, since the bytes after the line belong to the next frame.
        received += receive_bytes(connection, 1, deadline - time.monotonic())
    with suppress(ValueError, RecursionError):
        fields = json.loads(received)
        return fields if isinstance(fields, dict) else {}
    return {}


def _compare(connection: _Connection, facts: Mapping[str, str]) -> None:
    try:
        send_frame(connection.socket, json.dumps(dict(facts)).encode(), _SILENCE_S)
        differing = json.loads(receive_frame(connection.socket, _SILENCE_S))
        names = [str(name) for name in differing]
    except (ValueError, TypeError) as error:
        raise ConnectionError("what it answers is no comparison") from error
    if names:
        raise SettingError(
            "--input-hosts", connection.host, f"has another {' and '.join(names)}: all machines need the same"
        )


def _end(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with suppress(OSError):
        connection.shutdown(how)
