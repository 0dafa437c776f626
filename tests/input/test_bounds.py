"""An input host and its callers at the edge of what they may send; no processes."""

import itertools
import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest

from swift.data.encoding import decoded
from swift.data.pipeline import Pipeline
from swift.data.sample_store import pipeline_facts
from swift.input import client, server
from swift.input.client import InputHostPool, _Connection
from swift.input.server import find_key, receive_frame, send_frame

LIMIT_S = 20.0


class Numbers:
    """A source of one record."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return {"x": np.zeros(1000)}

    def digest(self):
        return "numbers"

    def place(self, index):
        return f"number {index}"


@pytest.fixture
def caller(monkeypatch):
    """A connection to a process of an input host."""
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *_: None)  # which are TCP's
    here, there = socket.socketpair()
    link, of_process = socket.socketpair()
    served = server._Served(lambda: [Pipeline(Numbers())])

    def serve():
        with there:
            server._serve(served, there, of_process)

    thread = threading.Thread(target=serve, name="serving")
    thread.start()
    with here, there, link, of_process:
        yield here
        with suppress(OSError):  # the other side may have ended it
            here.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("first", [b"[1, 2]", b"7", b"{", b"[" * 100_000])
def test_a_caller_that_says_nonsense_ends_its_own_connection(caller, first):
    send_frame(caller, first, LIMIT_S)
    # The process goes on to the next caller: the thread ends without an exception, which would be an error here.


def test_what_is_too_large_is_an_answer_and_not_the_end(caller, monkeypatch):
    monkeypatch.setattr(server, "MOST_BYTES", 500)
    send_frame(caller, b"{}", LIMIT_S)
    assert json.loads(receive_frame(caller, LIMIT_S)) == []
    for _ in range(2):
        send_frame(caller, b'{"echo": 1000}', LIMIT_S)
        assert "bytes, and 500 can be sent" in decoded(receive_frame(caller, LIMIT_S))["reason"]


def test_an_echo_has_a_limit(caller):
    send_frame(caller, b"{}", LIMIT_S)
    receive_frame(caller, LIMIT_S)
    send_frame(caller, b'{"echo": 60000000000}', LIMIT_S)
    assert len(receive_frame(caller, LIMIT_S)) < 1 << 27


@pytest.fixture
def impatient(monkeypatch):
    """Limits of a second or less, however many bytes there are."""
    for module, name, value in ((server, "_STALL_S", 1.0), (client, "_SILENCE_S", 0.2), (server, "_LEAST_RATE", 1e12)):
        monkeypatch.setattr(module, name, value)


def is_ended(connection):
    """Whether the other side ends the connection, now or later; what it has sent before counts as well."""
    connection.settimeout(LIMIT_S)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("begun", [b"\x02", b"\x02\0\0\0{"])
def test_a_caller_that_stalls_within_a_frame_makes_room_for_another(caller, begun):
    caller.sendall(begun)
    assert is_ended(caller)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("asked", [b"\x02", b"\x02\0\0\0{", b'\x12\0\0\0{"echo": 50000000}'])
def test_so_does_one_that_stalls_within_a_request_or_does_not_take_the_answer(caller, asked):
    send_frame(caller, b"{}", LIMIT_S)
    assert json.loads(receive_frame(caller, LIMIT_S)) == []
    caller.sendall(asked)
    while any(one.name == "serving" for one in threading.enumerate()):  # the fixture waits no longer than LIMIT_S
        time.sleep(0.05)
    assert is_ended(caller)


def soon(function):
    """Returns what a function does within a limit."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    (value,) = found
    return value


@contextmanager
def trickling(connection, content):
    """Sends bytes one by one, without an end, each sooner than a limit."""
    is_over = threading.Event()

    def trickle():
        for one in itertools.chain(content, itertools.repeat(0)):
            if is_over.wait(0.02):
                return
            with suppress(OSError):
                connection.send(bytes([one]))

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("head", [b"\xff\xff\xff", b"\xff\xff\xff\0"])
def test_an_answer_that_trickles_is_none(head, monkeypatch):
    monkeypatch.setattr(client, "_SILENCE_S", 0.2 if len(head) == 4 else 0.03)
    here, there = socket.socketpair()
    told = []
    with here, there, trickling(there, head):
        hosts = InputHostPool([_Connection("host", here)], told.append)
        assert soon(lambda: hosts.ask(b"{}")) is None
        assert hosts.num_workers == 0
        assert hosts.ask(b"{}") is None
    assert told == [
        f"input host host has not answered for {client._SILENCE_S:g} s: what its processes made is made here"
    ]


def test_a_handshake_that_trickles_is_none(monkeypatch):
    monkeypatch.setattr(client, "_CONNECT_S", 0.2)
    told, taken = [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=lambda: taken.append(listener.accept()[0]))
        accepting.start()
        with ExitStack() as stack:

            def begin():
                accepting.join(LIMIT_S)
                stack.enter_context(taken[0])
                stack.enter_context(trickling(taken[0], b"{"))

            beginning = threading.Thread(target=begin)
            beginning.start()
            hosts = soon(lambda: client.connect([listener.getsockname()], "k" * 32, {}, told.append))
            beginning.join(LIMIT_S)
        assert hosts.num_workers == 0
    assert told[0].endswith(" cannot be reached (timed out): samples are made without it")


def test_what_callers_have_to_have_is_found_out_once_and_again_when_it_differs(monkeypatch):
    files, reads = ["numbers 0"], []
    monkeypatch.setattr(Numbers, "digest", lambda _: reads.append(0) or files[0])
    served = server._Served(lambda: [Pipeline(Numbers())])
    now = pipeline_facts(Pipeline(Numbers()))
    later = now | {"data": "numbers 1"}
    reads.clear()
    for _ in range(5):
        assert served.nearest(now)[1] == []
    assert reads == []
    files[0] = "numbers 1"
    assert served.nearest(later)[1] == []
    reads.clear()
    assert served.nearest(now)[1] == ["data"]
    assert reads
    reads.clear()
    assert served.nearest(later)[1] == []
    assert reads == []


def test_a_caller_gets_the_pipeline_that_it_has_itself():
    one, other = Pipeline(Numbers()), Pipeline(Numbers()).filter(bool)
    served = server._Served(lambda: [one, other])
    for pipeline in (one, other):
        facts = pipeline_facts(pipeline)
        assert served.nearest(facts) == (pipeline, [])
        assert served.nearest(facts | {"data": "numbers 1"}) == (pipeline, ["data"])


def test_a_pipeline_whose_facts_cannot_be_found_out_replaces_none(monkeypatch):
    served = server._Served(lambda: [Pipeline(Numbers())])
    (before, facts), *_ = served._all

    def forbidden(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Numbers, "digest", forbidden)
    assert served.nearest(facts | {"data": "numbers 1"})[1] == ["data"]
    pipeline, differing = served.nearest(facts)
    assert differing == []
    assert pipeline is before


def test_an_end_is_no_loss():
    here, there = socket.socketpair()
    told = []
    hosts = InputHostPool([_Connection("host", here)], told.append)
    asking = threading.Thread(target=hosts.ask, args=(b"{}",))
    asking.start()
    assert receive_frame(there, LIMIT_S) == b"{}"
    hosts.close()
    asking.join(20)
    there.close()
    assert told == []


def test_an_end_waits_until_the_process_serves_others():
    here, there = socket.socketpair()
    ended = []

    def serve():
        ended.append(there.recv(1))
        time.sleep(0.2)
        ended.append("free")
        there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    InputHostPool([_Connection("host", here)], print).close()
    assert ended == [b"", "free"]
    thread.join(LIMIT_S)


def test_hosts_that_make_a_key_at_once_have_the_same(tmp_path):
    path, found, at_once = tmp_path / "key", [], threading.Barrier(8)

    def make():
        at_once.wait()
        found.append(find_key(path, makes=True))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["key"]
    assert path.stat().st_mode & 0o777 == 0o600
