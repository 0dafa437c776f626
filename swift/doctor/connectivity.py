"""A meeting of the machines of a run: each finds the others in the shared directory, and connects to all of them.

    DIR/.swift-doctor/node-1.json    where node 1 listens, a random word of its own, and its facts once it has them

A node is found from the start, also while it still examines itself, which may take minutes. A file that an earlier
meeting left behind leads to nobody, or to somebody without its word, and is read again until the node has written a
new one. A node leaves once it has asked all others, and all others have got their answers.
"""

import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from swift.elastic.device_probe import Finding
from swift.files import read_regular, replace_file

_DIRECTORY = ".swift-doctor"
_TOPIC = "nodes"
_PAUSE_S, _CONNECT_S = 0.2, 3.0
_MOST_BYTES = 4096
_ROUNDS, _CLOCKS_APART_S = 3, 2.0
_MOST_AT_ONCE = 16
_EXAMINING = "it is there, but has not examined itself to the end"
_ABSENT = "it has not come; does it see this directory, and was it started?"


@dataclass(frozen=True)
class ConnectivityCheck:
    """A meeting, from the side of one of its nodes.

    Attributes:
        directory: directory that all of them see.
        count: number of nodes.
        own_node: number of this one, from 0.
        host: address of this one.
        deadline_s: seconds after the last sign of another node in which the next one has to come.
        examining_s: seconds in which all nodes have to have examined themselves.
        clock: clock in seconds, which should agree with those of the others.
    """

    directory: Path
    count: int
    own_node: int
    host: str
    deadline_s: float = 60.0
    examining_s: float = 300.0
    clock: Callable[[], float] = time.time

    def file(self, node: int) -> Path:
        """Returns the path of a node's file."""
        return self.directory / _DIRECTORY / f"node-{node}.json"


@dataclass
class _Node:
    """Knowledge of another node.

    Attributes:
        trouble: why nothing is known of it so far; empty: all is.
        facts: its facts.
        round_trip_s: shortest time until it answered.
        ahead_s: how far its clock is ahead of this one's.
    """

    trouble: str = _ABSENT
    facts: Mapping[str, Any] = field(default_factory=dict)
    round_trip_s: float = 0.0
    ahead_s: float = 0.0


class PeerServer:
    """This node's part in a meeting, see ``attending``.

    Args:
        meeting: the meeting.
        port: port on which this node listens.
        came: nodes that have got their answers from this one; it grows.

    Attributes:
        word: word by which the others know that it is this node that answers.
    """

    def __init__(self, meeting: ConnectivityCheck, port: int, came: set[int]):
        self._meeting, self._port, self._came, self.word = meeting, port, came, secrets.token_hex(16)

    def announce(self, facts: Mapping[str, str] | None) -> None:
        """Writes where this node is found, with its facts if it has them."""
        fields = {"host": self._meeting.host, "port": self._port, "word": self.word, "facts": facts and dict(facts)}
        replace_file(self._meeting.file(self._meeting.own_node), json.dumps(fields).encode())

    def meet(self, facts: Mapping[str, str]) -> Iterator[Finding]:
        """Meets the other nodes; raises OSError where the directory cannot be used.

        Args:
            facts: what has to be the same on all of them, by its name.
        """
        self.announce(facts)
        meeting, start_time, news = self._meeting, time.monotonic(), time.monotonic()
        peers = {node: _Node() for node in range(meeting.count) if node != meeting.own_node}
        with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
            while True:
                unreached = {node: peer for node, peer in peers.items() if peer.trouble}
                before = {node: peer.trouble for node, peer in unreached.items()}, len(self._came)
                list(pool.map(lambda node: _reach(meeting, node, peers[node]), unreached))
                if self._came >= peers.keys() and not any(peer.trouble for peer in peers.values()):
                    break
                if _read(meeting.file(meeting.own_node)).get("word", self.word) != self.word:
                    text = f"another process is node {meeting.own_node}, too: each needs its own --node"
                    yield Finding(_TOPIC, "missing", text)
                    return
                now = time.monotonic()
                if before != ({node: peers[node].trouble for node in unreached}, len(self._came)):
                    news = now
                is_examining = any(peer.trouble == _EXAMINING for peer in peers.values())
                if now > news + meeting.deadline_s and not (is_examining and now < start_time + meeting.examining_s):
                    break
                time.sleep(_PAUSE_S)
        yield from _judged(meeting, facts, peers, self._came, self._port)


@contextmanager
def attending(meeting: ConnectivityCheck) -> Iterator[PeerServer]:
    """Lets the other nodes find this one for the duration of the block.

    Raises:
        OSError: the directory or the address cannot be used.
    """
    came, has_ended = set[int](), threading.Event()
    with socket.create_server((meeting.host, 0)) as listener:
        listener.settimeout(_PAUSE_S)
        attendance = PeerServer(meeting, listener.getsockname()[1], came)

        def serve() -> None:
            while not has_ended.is_set():
                with suppress(OSError):
                    connection, _ = listener.accept()
                    words = (connection, attendance.word, meeting.clock, came)
                    threading.Thread(target=_answer, args=words, daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        path = meeting.file(meeting.own_node)
        try:
            path.parent.mkdir(exist_ok=True)
            attendance.announce(None)
            yield attendance
        finally:
            has_ended.set()
            thread.join()
            with suppress(OSError):
                if _read(path).get("word") == attendance.word:
                    path.unlink(missing_ok=True)
                path.parent.rmdir()  # by the last one to leave


def _judged(
    meeting: ConnectivityCheck, facts: Mapping[str, str], peers: Mapping[int, _Node], came: set[int], port: int
) -> Iterator[Finding]:
    faults = [f"node {node}: {peer.trouble}" for node, peer in peers.items() if peer.trouble]
    reached = {node: peer for node, peer in peers.items() if not peer.trouble}
    where = f"this one's {meeting.host}:{port}"
    faults += [f"node {node} does not reach {where}: all ports have to be open" for node in reached if node not in came]
    for node, peer in reached.items():
        if 0 in (node, meeting.own_node):  # the others compare theirs with the first one's, too
            names = [name for name, fact in facts.items() if peer.facts.get(name) != fact]
            faults += [f"node {node} has another {_difference(facts, peer.facts, name)}" for name in names]
    yield from (Finding(_TOPIC, "missing", text) for text in faults)
    for node, peer in reached.items():
        if abs(peer.ahead_s) > _CLOCKS_APART_S:
            direction = "ahead of" if peer.ahead_s > 0 else "behind"
            text = f"node {node}'s is {abs(peer.ahead_s):.1f} s {direction} this one's: records will not agree on times"
            yield Finding("clock", "note", text)
    if not faults:
        slowest = max((peer.round_trip_s for peer in reached.values()), default=0.0)
        text = f"all {meeting.count} reach one another, within {1000 * slowest:.1f} ms, and run the same"
        yield Finding(_TOPIC, "ok", text)


def _difference(ours: Mapping[str, str], theirs: Mapping[str, Any], name: str) -> str:
    return f"{name}: {str(theirs.get(name))[:200]}, and not {ours[name]}"


def _reach(meeting: ConnectivityCheck, node: int, peer: _Node) -> None:
    """Asks a node that has come, a few times; keeps what it says, or why it was not reached."""
    record = _read(meeting.file(node))
    host, port, facts = record.get("host"), record.get("port"), record.get("facts")
    if not record or type(port) is not int:
        return
    try:
        address = str(ipaddress.ip_address(str(host)))
        with socket.create_connection((address, port), timeout=_CONNECT_S) as connection:
            is_enough = isinstance(facts, dict)
            peer.round_trip_s, peer.ahead_s = _asked(connection.makefile("rwb"), meeting, record["word"], is_enough)
    except (OSError, ValueError, KeyError, TypeError) as error:
        peer.trouble = f"at {host}:{port} it is not reached ({error}): all ports have to be open"
        return
    peer.trouble, peer.facts = ("", facts) if isinstance(facts, dict) else (_EXAMINING, {})


def _asked(stream: BufferedRWPair, meeting: ConnectivityCheck, word: str, is_enough: bool) -> tuple[float, float]:
    """Asks a node for the time; returns the shortest round trip and how far it is ahead.

    Raises:
        OSError, ValueError, KeyError, TypeError: it gives no answer, or none of a node with this word.
    """
    rounds = []
    for _ in range(_ROUNDS):
        start_time, before = time.monotonic(), meeting.clock()
        stream.write(f"{meeting.own_node}\n".encode())
        stream.flush()
        answer = json.loads(stream.readline(_MOST_BYTES))
        took = time.monotonic() - start_time
        if answer["word"] != word:
            raise ValueError("somebody else answers there")
        rounds.append((took, float(answer["time"]) - before - took / 2))
    if is_enough:
        stream.write(b"thanks\n")
        stream.flush()
    return min(rounds)


def _answer(connection: socket.socket, word: str, clock: Callable[[], float], came: set[int]) -> None:
    """Tells a node the time as often as it asks; it has come once it says that this was enough."""
    with suppress(OSError, ValueError), connection:
        connection.settimeout(_CONNECT_S)
        stream, node = connection.makefile("rwb"), -1
        while (line := stream.readline(_MOST_BYTES)) and line != b"thanks\n":
            node = int(line)
            stream.write(json.dumps({"word": word, "time": clock()}).encode() + b"\n")
            stream.flush()
        if line:
            came.add(node)


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(read_regular(path))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
