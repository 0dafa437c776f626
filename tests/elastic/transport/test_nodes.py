"""Children on another node are as those of one's own, and die with it; a node that is cut off ends them itself."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from swift.deadlines import Deadlines
from swift.elastic.state.run_files import node_memory
from swift.elastic.transport import remote_node as node_module
from swift.elastic.transport.admission import Admission
from swift.elastic.transport.child_processes import LocalChildren
from swift.elastic.transport.multi_node_children import NODES, MultiNodeChildren
from swift.elastic.transport.node_messages import (
    NODE_MESSAGES,
    NODE_UPDATES,
    ChildSent,
    NodeHeartbeat,
    NodeUpdate,
    StartChild,
)
from swift.elastic.transport.remote_node import announcing_arrival, serve_node
from swift.elastic.transport.rendezvous import NodeConnection, Rendezvous
from swift.errors import RunError, SettingError
from swift.runlog.lock import this_process

NODE = """
import os, sys
from pathlib import Path
from swift.errors import RunError
from swift.elastic.transport.remote_node import serve_node
from swift.elastic.state.run_files import node_memory
from swift.deadlines import Deadlines
try:
    serve_node(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        deadlines=Deadlines(start=float(sys.argv[3])),
        environment=os.environ,
        storage=Path("/dev/shm"),
        corpus=None,
        is_end_requested=lambda: False,
    )
except RunError as error:
    sys.exit(str(error))
"""
SILENCE_S = 3.0


@contextmanager
def node(run_dir, number=1, patience_s=60.0):
    command = [sys.executable, "-c", NODE, str(run_dir), str(number), str(patience_s)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def serve(run_dir, start_s, *, is_end_requested=False):
    serve_node(
        run_dir,
        1,
        deadlines=Deadlines(start=start_s),
        environment=os.environ,
        storage=run_dir,
        corpus=None,
        is_end_requested=lambda: is_end_requested,
    )


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def fleet(listener, tmp_path):
    """Children of this node and of another, whose names begin with 'far'."""
    meeting = Rendezvous.of(listener, tmp_path / "scratch", SILENCE_S)

    def is_first():
        return Rendezvous.find(tmp_path) == meeting

    def place(who):
        return int(who.startswith("far"))

    with (
        meeting.announced(tmp_path),
        MultiNodeChildren(
            LocalChildren(os.environ, tmp_path),
            node_of=place,
            num_nodes=2,
            listener=listener,
            key=meeting.key,
            is_first=is_first,
            silence_s=SILENCE_S,
        ) as fleet,
    ):
        yield fleet


def start(fleet, who, code, log):
    fleet.start(who, [sys.executable, "-c", code], log)


def hear(fleet, number=1):
    """So many lines, by whom."""
    deadline, heard = time.monotonic() + 30, []
    while len(heard) < number and time.monotonic() < deadline:
        fleet.deaths()  # as a supervisor does all the time
        heard += [(line.child, line.line) for line in fleet.received(0.05)]
    return heard


def until_dead(fleet):
    deadline, dead = time.monotonic() + 30, []
    while not dead and time.monotonic() < deadline:
        dead = fleet.deaths()
        time.sleep(0.02)
    return [(death.child, death.why) for death in dead]


def come(number=1, *, is_there=True):
    return NODES, NODE_UPDATES.line(NodeUpdate(number, is_there))


def is_alive(pid):
    with suppress(OSError):
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until_gone(pid):
    deadline = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def test_children_here_and_there_are_heard_spoken_to_and_mourned_alike(fleet, tmp_path):
    assert fleet.away_s("far") > 0
    with node(tmp_path):
        assert hear(fleet) == [come()]
        assert fleet.away_s("far") == fleet.away_s("near") == 0
        for who in ("near", "far"):
            start(
                fleet,
                who,
                "import sys; print(input(), flush=True); sys.stdout.write('brok'); sys.exit(3)",
                tmp_path / who,
            )
            assert who in fleet
            fleet.send(who, f"hello {who}\n")
            assert hear(fleet) == [(who, f"hello {who}\n")]
            assert until_dead(fleet) == [(who, "exit code 3")]
            assert who not in fleet


def test_a_child_is_held_there_as_it_is_here(fleet, tmp_path):
    code = "import os; print(os.getpid(), flush=True); print(input(), flush=True); input()"
    with node(tmp_path):
        assert hear(fleet) == [come()]
        for who in ("near", "far"):
            for _ in range(2):
                fleet.hold(who, [sys.executable, "-c", code], tmp_path / who)
            ((_, held),) = hear(fleet)
            assert who not in fleet
            start(fleet, who, code, tmp_path / who)
            fleet.send(who, "hello\n")
            assert hear(fleet) == [(who, "hello\n")]
            assert who in fleet
            assert is_alive(held)
            fleet.signal(who, signal.SIGKILL)
            assert until_dead(fleet) == [(who, "signal 9")]
            assert until_gone(held)


@pytest.mark.parametrize("what", ["the child", "its node"])
def test_who_has_died_there_is_among_the_children_until_that_is_told(fleet, tmp_path, what):
    """Otherwise it would be started again by who does not know yet that it is dead."""
    with node(tmp_path) as other:
        assert hear(fleet) == [come()]
        start(fleet, "far", "print(flush=True); input()", tmp_path / "far")
        assert hear(fleet) == [("far", "\n")]
        if what == "the child":
            fleet.signal("far", signal.SIGKILL)
        else:
            other.kill()
        time.sleep(1)  # by now it is dead, and known to be
        assert "far" in fleet
        assert until_dead(fleet) == [("far", "signal 9" if what == "the child" else "node 1 is gone")]
        assert "far" not in fleet


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
        assert fleet.away_s("far") == 0
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
        assert fleet.away_s("far") == 0
        with open(tmp_path / "stalled", "rb"):
            fleet.signal("far stalled", signal.SIGKILL)
            assert until_dead(fleet) == [("far stalled", "signal 9")]


@pytest.mark.slow
def test_where_a_child_cannot_be_killed_none_is_started_any_more(fleet, tmp_path):
    with node(tmp_path):
        hear(fleet)
        start(fleet, "far", "import os, time; print(os.getpid(), flush=True); time.sleep(1000)", tmp_path / "far")
        ((_, pid),) = hear(fleet)
        fleet.abandon("far")
        assert "far" not in fleet
        assert fleet.away_s("far too") == math.inf
        assert fleet.away_s("near") == 0
        fleet.signal("far", signal.SIGKILL)
        assert until_gone(pid), "it is killed again where it speaks"
        fleet.abandon("near")
        assert fleet.away_s("near") == 0, "the supervisor itself is here"


@pytest.mark.parametrize(("error", "code", "said"), [(None, 0, ""), (RunError("no"), 1, "has stopped the run")])
def test_a_node_ends_as_the_run_does(fleet, tmp_path, error, code, said):
    with node(tmp_path) as process:
        hear(fleet)
        fleet.__exit__(type(error) if error else None, error, None)
        assert process.wait(30) == code
        assert said in process.stderr.read()


def test_a_node_that_comes_after_the_run_has_finished_is_not_needed(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    serve(tmp_path, 60.0)


def test_a_first_node_that_another_has_followed_stops(fleet, listener, tmp_path):
    other, told = Rendezvous.of(listener, tmp_path / "other", SILENCE_S), "another first node has taken over this run"
    with other.announced(tmp_path), pytest.raises(RunError, match=told):
        until_dead(fleet)


def test_memory_that_nobody_holds_any_more_is_given_back(tmp_path):
    with node_memory(tmp_path) as held:
        left = held.with_name(f"{held.name}-left")
        left.mkdir()
        (left / "lock").touch()
        disk = tempfile.mkdtemp(prefix="swift-0-")
        (left / "swift-spill").symlink_to(disk)
        with node_memory(tmp_path):
            assert held.is_dir()
            assert not left.exists()
            assert not Path(disk).exists()
    assert not held.exists()


@pytest.mark.slow
def test_all_that_a_far_child_has_said_is_heard_with_its_death(fleet, tmp_path):
    with node(tmp_path):
        hear(fleet)
        start(fleet, "far", "for number in range(1000): print(number)", tmp_path / "log")
        assert until_dead(fleet) == [("far", "exit code 0")]
        assert [int(line.line) for line in fleet.received(0.0)] == list(range(1000))


@pytest.mark.slow
def test_a_far_child_is_killed_waited_for_and_can_fail_to_start(fleet, tmp_path):
    with node(tmp_path):
        hear(fleet)
        start(fleet, "far a", "input()", tmp_path / "log")
        fleet.signal("far a", signal.SIGKILL)
        assert until_dead(fleet) == [("far a", "signal 9")]
        fleet.start("far b", ["no/such/program"], tmp_path / "log")
        ((who, why),) = until_dead(fleet)
        assert (who, why.split(":")[0]) == ("far b", "cannot be started")
        start(fleet, "far c", "input()", tmp_path / "log")
        fleet.send("far c", "\n")
        fleet.wait_for(["far c"])
        assert "far c" not in fleet


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
        assert 0 < fleet.away_s("far") < 1
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

    monkeypatch.setattr(node_module, "last_beat", fails)
    with pytest.raises(RunError, match=r"no first node was found in 0.1 s"):
        serve(tmp_path, 0.1)


def test_a_node_with_another_version_of_the_program_is_refused(listener, tmp_path):
    meeting = replace(Rendezvous.of(listener, tmp_path / "scratch", SILENCE_S), program="another")
    with (
        meeting.announced(tmp_path),
        pytest.raises(SettingError, match=r"its first node has another version of Swift"),
    ):
        serve(tmp_path, 5)


@pytest.mark.parametrize("wrong", [{"host": 7}, {"host": "no address"}, {"port": "80"}, {"silence_s": None}, {"x": 1}])
def test_what_is_no_meeting_is_not_taken_for_one(listener, tmp_path, wrong):
    meeting = Rendezvous.of(listener, tmp_path / "scratch", SILENCE_S)
    (tmp_path / ".meeting.json").write_text(json.dumps(asdict(meeting) | wrong))
    assert Rendezvous.find(tmp_path) is None
