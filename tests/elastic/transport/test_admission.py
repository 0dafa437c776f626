"""Callers with the key are admitted at once, however many have none; those take up little, and not for long."""

import json
import resource
import socket
import threading
import time
from contextlib import closing, contextmanager

import pytest

from swift.elastic.transport.connections import MAX_BYTES, Admission, NodeConnection

KEY, NUM_STRANGERS = "the key", 10_000


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        yield listener


@contextmanager
def admitting(listener, **limits):
    """An admission at work in a thread, and those whom it has let in."""
    inside, is_over = [], threading.Event()
    admission = Admission(listener, KEY, lambda *_: None, lambda *who: inside.append(who), **limits)

    def work():
        while not is_over.is_set():
            admission.turn(0.05)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield admission, inside
    finally:
        is_over.set()
        thread.join()
        admission.close()
        for _, connection in inside:
            connection.close()


def stranger(listener):
    return socket.create_connection(listener.getsockname(), 10.0)


def is_ended(connection):
    """Whether the other side ends a connection, after what it has said."""
    connection.settimeout(10.0)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def come(inside, number=1):
    """Waits until so many are admitted, and returns them: a node hears it a little sooner than it is so."""
    deadline = time.monotonic() + 10
    while len(inside) < number and time.monotonic() < deadline:
        time.sleep(0.01)
    return [node for node, _ in inside]


@pytest.fixture
def strangers(listener):
    """Connects as many as this process may have files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(NUM_STRANGERS, hard - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 500), hard))
    connected = []

    def connect():
        connected.extend(stranger(listener) for _ in range(count))
        return connected

    yield connect
    for connection in connected:
        connection.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_has_the_key_comes_in_past_ten_thousand_who_say_nothing(listener, strangers):
    before = set(threading.enumerate())
    with admitting(listener, timeout_s=60.0) as (admission, inside):
        connected = strangers()
        begun = time.monotonic()
        with closing(NodeConnection(socket.create_connection(listener.getsockname()))) as node:
            assert node.authenticate(KEY, 7) is None
        assert time.monotonic() - begun < 60
        assert come(inside) == [7]
        assert len(admission) <= 128
        new = set(threading.enumerate()) - before
        assert len(new) < 5, new  # its own, and what else this process does: callers have none
        assert is_ended(connected[0])


def test_who_is_slow_loses_its_place(listener):
    with admitting(listener, timeout_s=0.4) as (admission, inside), stranger(listener) as slow:
        begun = time.monotonic()
        while (took_s := time.monotonic() - begun) < 60:
            try:
                slow.sendall(b"{")
            except OSError:
                break
            time.sleep(0.05)
        assert 0.3 < took_s < 60
        assert len(admission) == 0
        assert inside == []


@pytest.mark.parametrize(
    "said",
    [
        b"x" * (MAX_BYTES + 1),
        b"[" * (MAX_BYTES - 1) + b"\n",
        b"\xff\n",
        b'"text"\n',
        b'{"node": "1", "proof": ""}\n',
        b'{"node": 1, "proof": "\\ud800"}\n',
        b'{"node": 1}\n{"node": 1}\n',
    ],
)
def test_who_says_something_else_is_not_heard_to_the_end(listener, said):
    with admitting(listener) as (admission, inside), stranger(listener) as other:
        other.sendall(said)
        assert is_ended(other)
        assert len(admission) == 0
        assert inside == []


def test_a_false_proof_is_refused_in_a_line_that_says_nothing_else(listener):
    with admitting(listener) as (admission, inside):
        with stranger(listener) as other, other.makefile("rw") as lines:
            assert json.loads(lines.readline()).keys() == {"challenge"}
            lines.write('{"node": 1, "challenge": "mine", "proof": "false"}\n')
            lines.flush()
            assert json.loads(lines.readline()) == {"refused": "the proof is false"}
            assert lines.readline() == ""
        with closing(NodeConnection(stranger(listener))) as node:  # nor does it pass for the first node
            reason = "what answers at this address is not the first node of this run"
            assert node.authenticate("another", 1) == reason
        deadline = time.monotonic() + 30
        while len(admission) and time.monotonic() < deadline:  # it has answered, and may not have dropped it yet
            time.sleep(0.01)
        assert len(admission) == 0
        assert inside == []


def test_where_all_places_are_taken_the_longest_there_goes(listener):
    with admitting(listener, max_pending=2) as (admission, inside):
        first, second, third = (stranger(listener) for _ in range(3))
        assert is_ended(first)
        deadline = time.monotonic() + 10
        while len(admission) < 2 and time.monotonic() < deadline:  # the first goes before the third comes
            time.sleep(0.01)
        assert len(admission) == 2
        for one in (second, third):
            with closing(NodeConnection(one)) as node:
                assert node.authenticate(KEY, 1) is None
        assert come(inside, 2) == [1, 1]
    first.close()
