"""Connections to input hosts, one for each of their processes, which the threads of a plan take in turns."""

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
"""The host and the port."""
_CONNECT_S = 5.0
_SILENCE_S = 10.0
"""Seconds in which an answer has to begin, and then be whole, or the host is lost; what takes longer is made here."""
_MOST_WORKERS = 256
_LEAVE_S = 1.0
"""Seconds at most in which processes confirm that they are free again."""


@dataclass(eq=False)
class _Connection:
    """A connection to a process of a host.

    Attributes:
        host: address of the host, as text.
        socket: connection.
        is_lost: whether it, or the whole host, is lost.
    """

    host: str
    socket: socket.socket
    is_lost: bool = False


class InputHostPool:
    """Input hosts that have the pipeline; see ``swift.data.remote_records.InputHosts``.

    Args:
        connections: connections to their processes.
        report: called with a line on a host that is lost, or cannot answer; from any thread.
    """

    def __init__(self, connections: Sequence[_Connection], report: Callable[[str], None]):
        self._all, self._report = connections, report
        self._free = SimpleQueue[_Connection]()
        for connection in connections:
            self._free.put(connection)
        self._told, self._lock, self._is_closed = set[str](), threading.Lock(), False

    @property
    def num_workers(self) -> int:
        """Number of processes that are not lost."""
        return sum(not one.is_lost for one in self._all)

    def ask(self, request: bytes) -> tuple[str, bytes] | None:
        """Returns the name of a host and its answer; None: none is free, or the one that was asked is lost."""
        while True:
            try:
                one = self._free.get_nowait()
            except Empty:
                return None
            if not one.is_lost:
                break
        try:
            send_frame(one.socket, request, _SILENCE_S)
            answer = receive_frame(one.socket, _SILENCE_S)
        except OSError as error:
            self._lose(one, error)
            return None
        self._free.put(one)
        return one.host, answer

    def tell(self, host: str, line: str) -> None:
        """Reports the first line about a host that could not answer."""
        with self._lock:
            is_new = host not in self._told
            self._told.add(host)
        if is_new:
            self._report(f"input host {host} {line}; what it cannot make is made here")

    def close(self) -> None:
        """Ends all connections, also those that are in use: what they answer is not wanted any longer.

        Waits until the processes that were not in use serve another caller: the next one may be this machine.
        """
        self._is_closed = True
        idle = list[_Connection]()
        with suppress(Empty):
            while True:
                idle.append(self._free.get_nowait())
        for one in self._all:
            _end(one.socket, socket.SHUT_WR if one in idle and not one.is_lost else socket.SHUT_RDWR)
        deadline = time.monotonic() + _LEAVE_S
        for one in idle:
            with suppress(OSError):
                one.socket.settimeout(max(deadline - time.monotonic(), 0.001))
                one.socket.recv(1)
        for one in self._all:
            one.socket.close()

    def _lose(self, one: _Connection, error: OSError) -> None:
        one.is_lost = True
        if isinstance(error, TimeoutError):  # the machine is lost, and not only this process of it
            for other in self._all:
                if other.host == one.host:
                    other.is_lost = True
                    _end(other.socket)
        why = f"has not answered for {_SILENCE_S:g} s" if isinstance(error, TimeoutError) else "is lost"
        with self._lock:
            is_new = not self._is_closed and f"lost {one.host}" not in self._told
            self._told.add(f"lost {one.host}")
        if is_new:
            self._report(f"input host {one.host} {why}: what its processes made is made here")
        one.socket.close()


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
        key: key that both sides prove to have.
        facts: what both sides have to have in common, by its name.
        report: called with a line on a host that cannot be reached, or is lost later.
        report_missing: called instead of ``report`` for a host that cannot be reached.

    Raises:
        SettingError: a host has another key, or something else than this machine.
    """
    found = list[_Connection]()
    for address in addresses:
        name, before = "{}:{}".format(*address), len(found)
        try:
            while len(found) < before + _MOST_WORKERS and (one := _connected(name, address, key)) is not None:
                found.append(one)
                _compare(one, facts)
            if len(found) == before:
                report(f"input host {name} has no process that is free: samples are made without it")
        except OSError as error:
            why = f"cannot be reached ({error.strerror or error})"
            (report_missing or report)(f"input host {name} {why}: samples are made without it")
            for one in found[before:]:
                one.socket.close()
            del found[before:]
        except SettingError:
            InputHostPool(found, report).close()
            raise
    return InputHostPool(found, report)


def _connected(name: str, address: Address, key: str) -> _Connection | None:
    """Connects to a process of a host; None: none is free.

    Raises:
        SettingError: what answers does not have the key.
        OSError: it cannot be reached, or ends the connection before it has answered.
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
    """Reads a line of the handshake; an empty one if what comes is none."""
    received, deadline = bytearray(), time.monotonic() + _CONNECT_S
    while not received.endswith(b"\n") and len(received) < MAX_BYTES:
        # What follows the line is not part of it.
        received += receive_bytes(connection, 1, deadline - time.monotonic())
    with suppress(ValueError, RecursionError):
        fields = json.loads(received)
        return fields if isinstance(fields, dict) else {}
    return {}


def _compare(one: _Connection, facts: Mapping[str, str]) -> None:
    try:
        send_frame(one.socket, json.dumps(dict(facts)).encode(), _SILENCE_S)
        differing = json.loads(receive_frame(one.socket, _SILENCE_S))
        names = [str(name) for name in differing]
    except (ValueError, TypeError) as error:
        raise ConnectionError("what it answers is no comparison") from error
    if names:
        raise SettingError("--input-hosts", one.host, f"has another {' and '.join(names)}: all machines need the same")


def _end(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with suppress(OSError):
        connection.shutdown(how)
