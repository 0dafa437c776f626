"""Children on another node are as those of one's own, and end as the run does."""

import math
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from swift.elastic.state.run_files import node_memory
from swift.errors import RunError
from tests.elastic.transport.nodes import come, hear, is_alive, node, start, until_dead, until_gone


def test_children_here_and_there_are_heard_spoken_to_and_mourned_alike(fleet, tmp_path):
    assert fleet.node_missing_s("far") > 0
    with node(tmp_path):
        assert hear(fleet) == [come()]
        assert fleet.node_missing_s("far") == fleet.node_missing_s("near") == 0
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
        ((who, reason),) = until_dead(fleet)
        assert (who, reason.split(":")[0]) == ("far b", "cannot be started")
        start(fleet, "far c", "input()", tmp_path / "log")
        fleet.send("far c", "\n")
        fleet.wait_for(["far c"])
        assert "far c" not in fleet


@pytest.mark.slow
def test_where_a_child_cannot_be_killed_none_is_started_any_more(fleet, tmp_path):
    with node(tmp_path):
        hear(fleet)
        start(fleet, "far", "import os, time; print(os.getpid(), flush=True); time.sleep(1000)", tmp_path / "far")
        ((_, pid),) = hear(fleet)
        fleet.abandon("far")
        assert "far" not in fleet
        assert fleet.node_missing_s("far too") == math.inf
        assert fleet.node_missing_s("near") == 0
        fleet.signal("far", signal.SIGKILL)
        assert until_gone(pid), "it is killed again where it speaks"
        fleet.abandon("near")
        assert fleet.node_missing_s("near") == 0, "the supervisor itself is here"


@pytest.mark.parametrize(("error", "code", "said"), [(None, 0, ""), (RunError("no"), 1, "has stopped the run")])
def test_a_node_ends_as_the_run_does(fleet, tmp_path, error, code, said):
    with node(tmp_path) as process:
        hear(fleet)
        fleet.__exit__(type(error) if error else None, error, None)
        assert process.wait(30) == code
        assert said in process.stderr.read()


def test_memory_that_nobody_holds_any_more_is_given_back(tmp_path):
    with node_memory(tmp_path) as held_memory:
        held = held_memory.path
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
