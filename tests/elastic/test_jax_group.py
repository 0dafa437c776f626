"""Real processes that form a group, lose members, form another one, and take members back."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Queue

import jax
import numpy as np
import pytest

from swift.elastic import jax_group
from swift.elastic.jax_group import CoordinationService, check_support, largest_number
from swift.errors import RunError
from swift.mesh.process_group import LOOPBACK
from swift.tasks import start_thread

WAIT_S = 120


class Group:
    """Processes by name, and the generations that they are told."""

    def __init__(self, where, elsewhere=()):
        self.where, self.elsewhere = where, elsewhere
        self.processes, self.heard, self.services, self.generation = {}, {}, [], 0

    def start(self, name):
        command = [*self.elsewhere, sys.executable, str(Path(__file__).parent / "jax_group_member.py")]
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.processes[name], self.heard[name] = process, Queue()
        threading.Thread(target=self._listen, args=(process, self.heard[name]), daemon=True).start()

    def _listen(self, process, heard):
        with process.stdout:
            for line in process.stdout:
                if line.startswith("{"):
                    heard.put(json.loads(line))

    def form(self, names, **more):
        self.generation += 1
        self.services.append(CoordinationService(len(names), self.where))
        for index, name in enumerate(names):
            order = {
                "generation": self.generation,
                "address": self.services[-1].address,
                "index": index,
                "count": len(names),
            }
            self.processes[name].stdin.write(json.dumps(order | more.get(name, {})) + "\n")
            self.processes[name].stdin.flush()

    def hear(self, name, key):
        return self.hear_all(name, key)[key]

    def hear_all(self, name, key):
        said = {}
        while key not in said:
            said = self.heard[name].get(timeout=WAIT_S)
        assert said["generation"] == self.generation or key in ("broken", "away")
        return said

    def kill(self, name):
        process = self.processes[name]
        process.kill()
        process.wait()
        with suppress(BrokenPipeError):
            process.stdin.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in self.processes:
            self.kill(name)
        for service in self.services:
            service.close()


@pytest.fixture
def group(sockets):
    with Group(sockets) as group:
        for name in "abc":
            group.start(name)
        yield group


def test_survivors_of_any_death_go_on_and_take_the_dead_back(group):
    group.form("abc")
    first_ids = [group.hear(name, "ids") for name in "abc"]
    survivors = {name: group.processes[name].pid for name in "bc"}
    group.kill("a")  # the first one, too: the service is not in any of them
    group.form("bc")
    assert [group.hear(name, "total") for name in "bc"] == [1.0 + 2.0] * 2
    group.start("a")
    group.form("bca")
    assert [group.hear(name, "ids") for name in "abc"] == first_ids  # so that programs of the first generation fit
    assert {name: group.processes[name].pid for name in "bc"} == survivors
    assert all(process.poll() is None for process in group.processes.values())


@pytest.mark.slow
def test_a_member_that_waits_for_a_living_one_is_set_free(group):
    group.form("abc", b={"stays_away": True})
    assert group.hear("b", "away")
    assert [group.hear(name, "going_on") for name in "ac"] == [True] * 2
    group.form("ac")  # b lives, and will never come: without an abort, a and c would wait for it for ever
    assert [group.hear(name, "broken") for name in "ac"] == [True] * 2
    assert [group.hear(name, "total") for name in "ac"] == [1.0 + 2.0] * 2


@pytest.mark.parametrize("dead", ["a", pytest.param("c", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dies", ["before it connects", pytest.param("connected", marks=pytest.mark.slow)])
def test_who_waits_for_the_devices_of_the_dead_is_set_free(group, dead, dies):
    """The first process gathers all devices, the others wait for it."""
    group.form("abc", **{dead: {"dies": dies}})
    group.processes[dead].wait(WAIT_S)
    time.sleep(0.5)  # so that the others wait; else they are set free a little sooner
    others = [name for name in "abc" if name != dead]
    group.form(others)
    assert [group.hear(name, "broken") for name in others] == [True] * 2
    assert [group.hear(name, "total") for name in others] == [1.0 + 2.0] * 2


@pytest.mark.parametrize(
    ("dies", "dead"),
    [("joined", "a"), ("published", "c")]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in zip(["joined", "published"] * 2, "bbca", strict=True)],
)
def test_who_waits_for_the_dead_to_connect_is_set_free(group, dead, dies):
    """Connections are made by the first sum: gloo waits for where the others are, then for those that connect to it."""
    group.form("abc", **{dead: {"dies": dies}})
    group.processes[dead].wait(WAIT_S)
    time.sleep(0.5)  # so that the others wait; else they are set free a little sooner
    others = [name for name in "abc" if name != dead]
    group.form(others)
    for name in others:
        reason = group.hear_all(name, "broken")["reason"]
        assert "Gloo" in reason
        assert "DEADLINE_EXCEEDED" not in reason  # the limits of the runtime and of gloo, of 30 s
        assert "imed out waiting" not in reason
    assert [group.hear(name, "total") for name in others] == [1.0 + 2.0] * 2


def test_numbers_in_an_unknown_layout_are_not_connected_with():
    published = np.array([7, 0, 5], "=i8").tobytes()
    assert largest_number("cpu:gloo/0,1,2/1", b"host and address" + published) == 7
    assert largest_number("cpu:gloo/0,1,2/1", published[:-8]) == -1
    assert largest_number("cpu:gloo/0,1,2/1", b"a text where the numbers would be") == -1


def test_an_unknown_jax_is_told_before_anything_starts(monkeypatch):
    check_support()
    monkeypatch.delattr("jax._src.distributed.global_state")
    with pytest.raises(RunError, match=f"jax {jax.__version__} lacks"):
        check_support()


def test_a_port_that_somebody_else_has_taken_is_not_insisted_on(monkeypatch):
    made, real = [], CoordinationService._start_service

    def taken(service, num_processes):
        made.append(service.address)
        if len(made) < 3:
            raise RuntimeError("in use")
        return real(service, num_processes)

    monkeypatch.setattr(CoordinationService, "_start_service", taken)
    CoordinationService(1, LOOPBACK).close()
    assert len(set(made)) == 3

    def never(*_):
        raise RuntimeError("in use")

    monkeypatch.setattr(CoordinationService, "_start_service", never)
    with pytest.raises(RunError, match=r"no coordination service could be started.*in use"):
        CoordinationService(1, LOOPBACK)


@pytest.mark.parametrize("lasts", [False, True])
def test_a_limit_on_tasks_keeps_nobody_waiting_for_those_that_could_not_connect(sockets, monkeypatch, lasts):
    """JAX's service lets a first process in when all have connected, however long that takes."""
    starts = []

    def refuse_second(*words, **named):
        starts.append(words)
        if len(starts) == 2 or (lasts and len(starts) % 2 == 0):
            raise RunError("can't start new thread")
        return start_thread(*words, **named)

    monkeypatch.setattr(jax_group, "start_thread", refuse_second)
    if lasts:
        with pytest.raises(RunError, match=r"no coordination service could be started: .*can't start new thread"):
            CoordinationService(2, sockets)
    else:
        CoordinationService(2, sockets).close()
    assert len(starts) == (6 if lasts else 4)
    assert not any(sockets.iterdir())


@pytest.fixture
def another_name(tmp_path):
    """Prefix of a command that is to run where the machine's name stands for no address to listen at."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can give itself another name, with unshare")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.0.9 elsewhere\n")
    inside = 'mount --bind "$0" /etc/hosts && hostname elsewhere && exec "$@"'
    return "unshare", "--uts", "--mount", "sh", "-c", inside, str(tmp_path / "hosts")


@pytest.mark.parametrize("is_on_network", [False, True])
def test_processes_listen_where_the_service_is_whatever_the_name_of_the_machine(
    another_name, sockets, listening_at, is_on_network
):
    where = "127.0.0.3" if is_on_network else sockets
    with Group(where, another_name) as group:
        for name in "ab":
            group.start(name)
        group.form("ab")
        assert [group.hear(name, "total") for name in "ab"] == [3.0] * 2
        for name in "ab":
            assert listening_at(group.processes[name].pid) == {"127.0.0.1"}
        if not is_on_network:
            (path,) = sockets.iterdir()
            assert path.is_socket()
    assert not any(sockets.iterdir())


def test_a_directory_that_was_removed_is_made_again(sockets):
    service = CoordinationService(1, sockets / "removed" / "sockets")
    assert service.address.startswith(f"unix:{sockets}/removed/sockets/")
    assert (sockets / "removed" / "sockets").stat().st_mode & 0o077 == 0
    service.close()


@pytest.mark.parametrize("where", ["/proc/none", "/tmp/" + "long" * 30])
def test_another_directory_is_taken_where_no_socket_can_be_made(where):
    """As in one without inodes, where JAX's own service ends the process with SIGSEGV."""
    service = CoordinationService(1, Path(where))
    directory = Path(service.address.removeprefix("unix:")).parent
    assert directory.parent == Path("/dev/shm")
    assert directory.stat().st_mode & 0o077 == 0
    service.close()
    assert not directory.exists()
