"""Connectivity check of a run's machines: each finds the others through a shared directory, and connects to all.

    DIR/.swift-doctor/node-1.json    address of node 1, its random word, and its facts once it has them

A node announces itself at the start, before it examines itself, which may take minutes. A file left by an earlier check
points to no listener, or to one with a different word; it is read again until the node has written a new one. A node
leaves once it has queried all others, and all others have received its answers.
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
    """The settings of a connectivity check on one node.

    Attributes:
        directory: directory that all nodes share.
        count: number of nodes.
        own_node: number of this node, from 0.
        host: address of this node.
        deadline_s: seconds to wait for further progress of any other node.
        examining_s: seconds from the start within which all nodes must finish examining themselves.
        clock: returns this node's time in seconds, which is compared with that of the other nodes.
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
    """The information that this node has about another node.

    Attributes:
        trouble: why the node has not been reached yet; "" once it was reached and its facts are known.
        facts: facts of the node, by name.
        round_trip_s: shortest round-trip time to the node, in seconds.
        ahead_s: seconds by which the node's clock is ahead of this one's.
    """

    trouble: str = _ABSENT
    facts: Mapping[str, Any] = field(default_factory=dict)
    round_trip_s: float = 0.0
    ahead_s: float = 0.0


class PeerServer:
    """This node's side of a connectivity check; created by ``attending``.

    Args:
        meeting: settings of the check.
        port: port on which this node listens.
        came: nodes that have received all their answers from this node; grows while the check runs.

    Attributes:
        word: random word by which others recognize this node, and not a leftover of an earlier check.
    """

    def __init__(self, meeting: ConnectivityCheck, port: int, came: set[int]):
        self._meeting, self._port, self._came, self.word = meeting, port, came, secrets.token_hex(16)

    def announce(self, facts: Mapping[str, str] | None) -> None:
        """Writes this node's file: its address, and its facts if they are known."""
        fields = {"host": self._meeting.host, "port": self._port, "word": self.word, "facts": facts and dict(facts)}
        replace_file(self._meeting.file(self._meeting.own_node), json.dumps(fields).encode())

    def meet(self, facts: Mapping[str, str]) -> Iterator[Finding]:
        """Connects to all other nodes and compares facts; raises OSError if the directory cannot be used.

        Args:
            facts: facts by name, which must be the same on all nodes.
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
    """Announces this node and answers the others for the duration of the block.

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
                path.parent.rmdir()  # succeeds only for the last node to leave


def _judged(
    meeting: ConnectivityCheck, facts: Mapping[str, str], peers: Mapping[int, _Node], came: set[int], port: int
) -> Iterator[Finding]:
    faults = [f"node {node}: {peer.trouble}" for node, peer in peers.items() if peer.trouble]
    reached = {node: peer for node, peer in peers.items() if not peer.trouble}
    where = f"this one's {meeting.host}:{port}"
    faults += [f"node {node} does not reach {where}: all ports have to be open" for node in reached if node not in came]
    for node, peer in reached.items():
        if 0 in (node, meeting.own_node):  # compare with node 0 only: every other node does so, too
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
    """Connects to a node that has announced itself; records its answers, or why it was not reached."""
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
    """Queries a node's time; returns the shortest round-trip time, and how far the node's clock is ahead, in seconds.

    Raises:
        OSError, ValueError, KeyError, TypeError: the node gives no valid answer, or does not know the word.
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
        # As in NTP: the clock was read half a round trip ago, so the shortest round trip gives the best estimate.
        rounds.append((took, float(answer["time"]) - before - took / 2))
    if is_enough:
        stream.write(b"thanks\n")
        stream.flush()
    return min(rounds)


def _answer(connection: socket.socket, word: str, clock: Callable[[], float], came: set[int]) -> None:
    """Answers a node with the time whenever it asks; adds it to ``came`` once it says thanks."""
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
