"""How nodes find the first node, how long they wait for it, and whom it lets in."""

import json
import os
import socket
import threading
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from swift.elastic.transport import connections as rendezvous_module
from swift.elastic.transport import remote_node as node_module
from swift.elastic.transport.connections import NodeConnection, Rendezvous
from swift.elastic.transport.remote_node import announcing_arrival
from swift.errors import RunError, SettingError
from swift.runlog.lease import this_process
from tests.elastic.transport.nodes import SILENCE_S, come, hear, node, serve, until_dead


def test_a_node_that_comes_after_the_run_has_finished_is_not_needed(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    serve(tmp_path, 60.0)


def test_a_first_node_that_another_has_followed_stops(fleet, listener, tmp_path):
    other, told = Rendezvous.of(listener, tmp_path / "other", SILENCE_S), "another first node has taken over this run"
    with other.announced(tmp_path), pytest.raises(RunError, match=told):
        until_dead(fleet)


def test_only_who_has_the_key_and_a_place_is_let_in(fleet, listener, tmp_path):
    key = Rendezvous.find(tmp_path).key
    assert (tmp_path / ".meeting.json").stat().st_mode & 0o077 == 0

    def caller():
        return closing(NodeConnection(socket.create_connection(listener.getsockname())))

    with caller() as stranger:
        assert stranger.authenticate("another", 1) == "what answers at this address is not the first node of this run"
    with caller() as second:
        assert second.authenticate(key, 2) == "there is no node 2"
    with caller(), caller() as inside, caller() as double:  # the first says nothing, and holds up nobody
        assert inside.authenticate(key, 1) is None
        assert hear(fleet) == [come()]
        assert double.authenticate(key, 1) == "node 1 is connected already"


def test_who_finds_no_first_node_says_where_it_looked(tmp_path):
    with pytest.raises(
        RunError, match=r"node 1: no first node was found in 0.1 s: stopped; does it have the same --run-dir\?"
    ):
        serve(tmp_path, 0.1)
    with pytest.raises(KeyboardInterrupt):
        serve(tmp_path, 60.0, is_end_requested=True)


@pytest.mark.slow
def test_a_node_that_is_on_its_way_is_not_away(fleet, tmp_path, monkeypatch):
    """A node may have to read the corpus first."""
    monkeypatch.setattr(node_module, "_ANNOUNCE_S", 0.1)
    with announcing_arrival(tmp_path, 1):
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            fleet.deaths()
            time.sleep(0.05)
        assert 0 < fleet.node_missing_s("far") < 1
    assert fleet.received(0.0) == []
    with node(tmp_path):
        assert hear(fleet) == [come()]


def test_a_first_node_that_is_not_ready_is_waited_for_as_long_as_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(node_module, "_RETRY_S", 0.05)
    lease, begun = tmp_path / ".lease-1.json", time.monotonic()
    lease.write_bytes(this_process().encode())

    def beat():
        while time.monotonic() - begun < 2:
            os.utime(lease)
            time.sleep(0.1)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(RunError, match=r"no first node was found in 0.5 s"):
        serve(tmp_path, 0.5)
    assert time.monotonic() - begun > 2
    thread.join()


def test_a_file_system_that_fails_for_a_moment_does_not_end_the_wait(tmp_path, monkeypatch):
    def fails(_):
        raise SettingError("--run-dir", str(tmp_path), "cannot be read: Stale file handle")

    monkeypatch.setattr(node_module, "last_heartbeat", fails)
    with pytest.raises(RunError, match=r"no first node was found in 0.1 s"):
        serve(tmp_path, 0.1)


def refuse(*_, **__):
    raise RunError("can't start new thread")


def test_a_node_that_may_have_no_more_threads_tries_to_join_again(fleet, tmp_path, monkeypatch):  # noqa: ARG001
    """The time limit of an answer is kept by a thread."""
    monkeypatch.setattr(rendezvous_module, "retried", refuse)
    with pytest.raises(RunError, match=r"no first node was found in 1 s: stopped; .*can't start new thread"):
        serve(tmp_path, 1.0)


def test_a_node_that_may_have_no_more_threads_leaves_the_first_node(monkeypatch, capsys):
    closed = []
    monkeypatch.setattr(node_module, "start_thread", refuse)
    connection = SimpleNamespace(close=lambda: closed.append(1))
    assert node_module._Relay(connection, None, 1.0, 1.0).run(lambda: False) is None
    assert closed == [1]
    assert "cannot serve the first node: can't start new thread" in capsys.readouterr().err


def test_a_node_that_may_have_no_more_threads_comes_unannounced(tmp_path, monkeypatch):
    monkeypatch.setattr(node_module, "start_thread", refuse)
    with announcing_arrival(tmp_path, 1):
        pass


def test_a_node_with_another_version_of_the_program_is_refused(listener, tmp_path):
    meeting = replace(Rendezvous.of(listener, tmp_path / "scratch", SILENCE_S), program="another")
    with (
        meeting.announced(tmp_path),
        pytest.raises(SettingError, match=r"its first node has another version of Swift"),
    ):
        serve(tmp_path, 5)


def test_a_meeting_that_cannot_be_ended_hides_no_error(listener, tmp_path, monkeypatch):
    """The disk has become read-only, which is why the run ends."""

    def fails(*_, **__):
        raise OSError(30, "Read-only file system")

    meeting = Rendezvous.of(listener, tmp_path / "scratch", SILENCE_S)
    monkeypatch.setattr(Path, "unlink", fails)
    with pytest.raises(RunError, match="the record cannot be written"), meeting.announced(tmp_path):
        raise RunError("the record cannot be written")


@pytest.mark.parametrize("wrong", [{"host": 7}, {"host": "no address"}, {"port": "80"}, {"silence_s": None}, {"x": 1}])
def test_what_is_no_meeting_is_not_taken_for_one(listener, tmp_path, wrong):
    meeting = Rendezvous.of(listener, tmp_path / "scratch", SILENCE_S)
    (tmp_path / ".meeting.json").write_text(json.dumps(asdict(meeting) | wrong))
    assert Rendezvous.find(tmp_path) is None
