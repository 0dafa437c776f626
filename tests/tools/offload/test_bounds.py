"""An input host and its callers at the edge of what they may send; no processes."""

import json
import socket
import threading

import numpy as np
import pytest

from swift.data.pipeline import Pipeline, decoded
from swift.tools.offload import server
from swift.tools.offload.client import ConnectedHosts, _Connection
from swift.tools.offload.frames import receive_frame, send_frame
from swift.tools.offload.keys import find_key


class Numbers:
    """A source of one record."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return {"x": np.zeros(1000)}

    def digest(self):
        return "numbers"


@pytest.fixture
def caller(monkeypatch):
    """A connection to a process of an input host."""
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *_: None)  # which are TCP's
    here, there = socket.socketpair()
    link, of_process = socket.socketpair()
    thread = threading.Thread(target=server._serve, args=(Pipeline(Numbers()), there, of_process))
    thread.start()
    with here, there, link, of_process:
        here.settimeout(20)
        yield here
        here.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("first", [b"[1, 2]", b"7", b"{", b"[" * 100_000])
def test_a_caller_that_says_nonsense_ends_its_own_connection(caller, first):
    send_frame(caller, first)
    # The process goes on to the next caller: the thread ends without an exception, which would be an error here.


def test_what_is_too_large_is_an_answer_and_not_the_end(caller, monkeypatch):
    monkeypatch.setattr(server, "MOST_BYTES", 500)
    send_frame(caller, b"{}")
    assert json.loads(receive_frame(caller)) == []
    for _ in range(2):
        send_frame(caller, b'{"echo": 1000}')
        assert "bytes, and 500 can be sent" in decoded(receive_frame(caller))["why"]


def test_an_echo_has_a_limit(caller):
    send_frame(caller, b"{}")
    receive_frame(caller)
    send_frame(caller, b'{"echo": 60000000000}')
    assert len(receive_frame(caller)) < 1 << 27


def test_an_end_is_no_loss():
    here, there = socket.socketpair()
    told = []
    hosts = ConnectedHosts([_Connection("host", here)], told.append)
    asking = threading.Thread(target=hosts.ask, args=(b"{}",))
    asking.start()
    assert receive_frame(there) == b"{}"
    hosts.close()
    asking.join(20)
    there.close()
    assert told == []


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
