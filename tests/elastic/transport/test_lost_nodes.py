"""Nodes that die, are cut off or stall: a node that is cut off ends its children itself."""

import os
import signal
import sys
import threading
import time
from contextlib import closing

import pytest

from swift.elastic.transport.children import LocalChildren
from swift.elastic.transport.connections import Admission, NodeConnection, Rendezvous
from swift.elastic.transport.messages import NODE_MESSAGES, ChildSent, NodeHeartbeat, StartChild
from swift.elastic.transport.nodes import MultiNodeChildren
from tests.elastic.transport.nodes import SILENCE_S, come, hear, is_alive, node, start, until_dead, until_gone


def test_the_children_of_a_node_die_with_it_and_it_may_come_back(fleet, tmp_path):
    with node(tmp_path) as first:
        hear(fleet)
        start(fleet, "far a", "import os; print(os.getpid(), flush=True); input()", tmp_path / "log")
        ((_, pid),) = hear(fleet)
        first.kill()
        assert until_dead(fleet) == [("far a", "node 1 is gone")]
        assert hear(fleet) == [come(is_there=False)]
        assert until_gone(pid)  # its standard input has ended
        start(fleet, "far b", "print()", tmp_path / "log")
        assert until_dead(fleet) == [("far b", "node 1 is gone")]
    with node(tmp_path):
        assert hear(fleet) == [come()]
        start(fleet, "far c", "print(1)", tmp_path / "log")
        assert hear(fleet) == [("far c", "1\n")]


def test_a_node_that_is_silent_is_lost_and_ends_its_children_before_it_comes_back(fleet, tmp_path):
    with node(tmp_path) as process:
        hear(fleet)
        code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
        start(fleet, "far", code, tmp_path / "log")
        ((_, pid),) = hear(fleet)
        process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        assert until_dead(fleet) == [("far", "node 1 is gone")]
        assert time.monotonic() - begun >= SILENCE_S - 1
        assert is_alive(pid)
        assert hear(fleet) == [come(is_there=False)]
        process.send_signal(signal.SIGCONT)
        assert hear(fleet) == [come()]
        assert not is_alive(pid)
        fleet.signal("far", signal.SIGKILL)  # which concerns nobody any more
        assert fleet.deaths() == []


def called(listener, key):
    """The connection of the node that calls next."""
    admitted = []
    admission = Admission(listener, key, lambda *_: None, lambda *call: admitted.append(call))
    while not admitted:
        admission.turn(1.0)
    admission.close()
    ((number, connection),) = admitted
    assert number == 1
    return connection


@pytest.mark.slow
def test_a_node_alone_ends_its_children_and_gives_up_in_time(listener, tmp_path):
    meeting = Rendezvous.of(listener, tmp_path / "scratch", SILENCE_S)
    with meeting.announced(tmp_path), node(tmp_path, patience_s=2.0) as process:
        with closing(NodeConnection(called(listener, meeting.key))) as wire:
            code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
            wire.send(NODE_MESSAGES.line(StartChild("far", [sys.executable, "-c", code], str(tmp_path / "log"))))
            for said in map(NODE_MESSAGES.read, wire.lines()):
                if isinstance(said, ChildSent):
                    break
                wire.send(NODE_MESSAGES.line(NodeHeartbeat()))
            assert until_gone(said.line)  # as nothing more is said to it
        listener.close()
        assert process.wait(30) == 1
        said = process.stderr.read()
    assert "lost the first node" in said
    assert "no first node was found in 2 s: stopped; 127.0.0.1" in said


def test_a_file_system_that_stalls_on_the_first_node_costs_no_other(listener, tmp_path):
    """Longer than both sides are patient: it still lets nodes know that it is there."""
    meeting, stalls = Rendezvous.of(listener, tmp_path / "scratch", 2.0), threading.Event()

    def is_first():
        return stalls.wait(60)

    with (
        meeting.announced(tmp_path),
        MultiNodeChildren(
            LocalChildren(os.environ, tmp_path),
            node_of=lambda _: 1,
            num_nodes=2,
            listener=listener,
            key=meeting.key,
            is_first=is_first,
            silence_s=30.0,
        ) as fleet,
        node(tmp_path) as process,
    ):
        assert hear(fleet) == [come()]
        start(fleet, "far", "import time; print('on', flush=True); time.sleep(1000)", tmp_path / "far")
        assert hear(fleet) == [("far", "on\n")]
        time.sleep(3)
        assert "far" in fleet
        assert fleet.deaths() == []
        assert process.poll() is None
        assert fleet.node_missing_s("far") == 0
        stalls.set()


@pytest.mark.slow
def test_a_log_that_stalls_on_another_node_does_not_silence_it(fleet, tmp_path):
    os.mkfifo(tmp_path / "stalled")  # to open it is to wait for who reads it
    with node(tmp_path):
        hear(fleet)
        start(fleet, "far stalled", "input()", tmp_path / "stalled")
        start(fleet, "far", "import time; print('on', flush=True); time.sleep(1000)", tmp_path / "far")
        assert hear(fleet) == [("far", "on\n")]
        deadline = time.monotonic() + SILENCE_S + 1
        while time.monotonic() < deadline:
            assert fleet.deaths() == []
            time.sleep(0.05)
        assert fleet.node_missing_s("far") == 0
        with open(tmp_path / "stalled", "rb"):
            fleet.signal("far stalled", signal.SIGKILL)
            assert until_dead(fleet) == [("far stalled", "signal 9")]
