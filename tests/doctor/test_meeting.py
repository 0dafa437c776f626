"""Machines that look for one another, here as threads: all of them are told what is wrong with any."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from swift.doctor.connectivity import ConnectivityCheck, attending

FACTS = {"program": "f00d", "devices": "4 x TPU"}


def met(directory, *changes, count=None):
    """Texts by verdict, of each node of a meeting; a node for each dict of changes."""
    count = count or len(changes)

    def attend(own, change):
        facts, examines_s = change.pop("facts", FACTS), change.pop("examines_s", 0)
        meeting = replace(ConnectivityCheck(directory, count, own, "127.0.0.1", deadline_s=20.0), **change)
        with attending(meeting) as attendance:
            time.sleep(examines_s)
            return [(finding.verdict, finding.text) for finding in attendance.meet(facts)]

    with ThreadPoolExecutor(len(changes)) as pool:
        return list(pool.map(attend, range(len(changes)), [dict(change) for change in changes]))


def test_all_reach_all(tmp_path):
    for findings in met(tmp_path, {}, {}, {}):
        ((verdict, text),) = findings
        assert verdict == "ok"
        assert text.startswith("all 3 reach one another")
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_does_not_come_is_named(tmp_path):
    for findings in met(tmp_path, {"deadline_s": 1.0}, {"deadline_s": 1.0}, count=3):
        assert [verdict for verdict, _ in findings] == ["missing"]
        assert findings[0][1].startswith("node 2: it has not come")


def test_a_node_that_examines_itself_for_long_is_waited_for(tmp_path):
    changes = [{"deadline_s": 0.5}, {"deadline_s": 0.5, "examines_s": 2}, {"deadline_s": 0.5}]
    assert [findings[0][0] for findings in met(tmp_path, *changes)] == ["ok"] * 3


def test_a_node_that_does_not_come_to_an_end_is_named(tmp_path):
    changes = [{"deadline_s": 0.5, "examining_s": 1}, {"deadline_s": 0.5, "examines_s": 3}]
    first, _ = met(tmp_path, *changes)
    assert first == [("missing", "node 1: it is there, but has not examined itself to the end")]


def test_many_nodes_on_a_slow_network_all_reach_all(tmp_path, monkeypatch):
    """None leaves while another one still asks it."""
    reach = socket.create_connection

    def create_connection(address, timeout):
        time.sleep(0.01)
        return reach(address, timeout=timeout)

    monkeypatch.setattr("swift.doctor.connectivity.socket.create_connection", create_connection)
    assert [findings[0][0] for findings in met(tmp_path, *[{}] * 12)] == ["ok"] * 12


def test_what_differs_is_told_on_both_sides(tmp_path):
    first, second, third = met(tmp_path, {}, {"facts": {**FACTS, "program": "beef"}}, {})
    assert first == [("missing", "node 1 has another program: beef, and not f00d")]
    assert second == [("missing", "node 0 has another program: f00d, and not beef")]
    assert third[0][0] == "ok"


def test_clocks_that_do_not_agree(tmp_path):
    first, second = met(tmp_path, {}, {"clock": lambda: time.time() + 90})
    assert first[0][1].startswith("node 1's is 90.0 s ahead of")
    assert second[0][1].startswith("node 0's is 90.0 s behind")


def test_two_nodes_of_the_same_number(tmp_path):
    found = met(
        tmp_path, {"deadline_s": 3.0}, {"own_node": 1, "deadline_s": 3.0}, {"own_node": 1, "deadline_s": 3.0}, count=3
    )
    texts = [text for findings in found[1:] for _, text in findings]
    assert "another process is node 1, too: each needs its own --node" in texts


@pytest.mark.parametrize("left", ["closed", pytest.param("another", marks=pytest.mark.slow), "nonsense"])
def test_what_an_earlier_meeting_left_behind(tmp_path, left):
    """A port that is closed, or somebody else's, or a file that is no file of a node."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        fields = {"host": "127.0.0.1", "port": other.getsockname()[1], "word": "old", "facts": {}}
        if left == "closed":
            other.close()
        (tmp_path / ".swift-doctor").mkdir()
        path = tmp_path / ".swift-doctor" / "node-1.json"
        path.write_text(json.dumps(fields) if left != "nonsense" else '["x"]')
        (findings,) = met(tmp_path, {"deadline_s": 1.0}, count=2)
        assert findings[0][1].startswith("node 1: ")
        path.write_text(json.dumps(fields) if left != "nonsense" else "{")
        assert [findings[0][0] for findings in met(tmp_path, {}, {})] == ["ok", "ok"]


def test_ports_that_are_closed_are_told_by_the_node_that_is_not_reached_too(tmp_path, monkeypatch):
    """Node 1 reaches node 0, but not the other way round."""
    reach = socket.create_connection

    def create_connection(address, timeout):
        if closed and address[1] == closed[0]:
            raise ConnectionRefusedError(111, "Connection refused")
        return reach(address, timeout=timeout)

    closed = []
    listen = socket.create_server

    def create_server(address):
        listener = listen(address)
        if not closed:  # that of the first one to come
            closed.append(listener.getsockname()[1])
        return listener

    monkeypatch.setattr("swift.doctor.connectivity.socket.create_connection", create_connection)
    monkeypatch.setattr("swift.doctor.connectivity.socket.create_server", create_server)
    texts = [text for findings in met(tmp_path, {"deadline_s": 2.0}, {"deadline_s": 2.0}) for _, text in findings]
    assert sum("it is not reached ([Errno 111] Connection refused)" in text for text in texts) == 1
    assert sum("does not reach this one's 127.0.0.1:" in text for text in texts) == 1
