"""Processes that make samples for another machine: the same ones, whoever dies, and only for those with the key."""

import json
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from swift.data.pipeline import Pipeline, plain_plan
from swift.data.records import Rows
from swift.data.sample_store import pipeline_facts
from swift.data.samples import Samples
from swift.data.survey import in_order
from swift.errors import SettingError
from swift.input import client
from swift.input.client import connect
from swift.input.server import find_key
from tests.input.hosts import KEY, serving, wait_for

ROWS = Rows([{"a": number} for number in range(30)])


def squared(sample):
    return {"a": sample["a"] ** 2, "pid": os.getpid()}


def squares() -> Pipeline:
    return Pipeline(ROWS).filter(lambda sample: sample["a"] % 7 > 0, name="some").map(squared, reads=("a",)).shuffle()


def served() -> list[Pipeline]:
    return [squares()]


@contextmanager
def connected(*addresses, facts=None, key=KEY, is_full=True):
    """Connections to hosts, and what is told; a host may still be busy with the caller before."""
    told = list[str]()
    for _ in range(3000):
        told.clear()
        hosts = connect(addresses, key, facts or pipeline_facts(squares()), told.append)
        if not is_full or hosts.num_workers == 2:
            break
        hosts.close()
        time.sleep(0.1)
    try:
        yield hosts, told
    finally:
        hosts.close()


def read(hosts, num: int = 60) -> tuple[list[int], set[int]]:
    """The values of samples that two threads make, and the processes that made them."""
    plan = replace(plain_plan(squares()), num_offloaded=2, num_threads=2, num_ahead=4, check_every=0)
    samples = in_order(Samples(plan, 5, hosts=hosts), plan)
    made = [next(samples) for _ in range(num)]
    samples.close()
    return [one["a"] for one in made], {one["pid"] for one in made}


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return read(None)[0]


@pytest.mark.slow
def test_samples_are_those_of_this_machine_whatever_happens_to_the_others(expected, monkeypatch):
    with serving(served, 2) as (address, said):
        pids = {one.pid for one in multiprocessing.active_children()}
        assert said == [f"127.0.0.1:{address[1]} is ready, with 2 processes"]
        with connected(address) as (hosts, told):
            assert read(hosts) == (expected, pids)
            with connected(address, is_full=False) as (others, others_told):
                assert others.num_workers == 0
                assert "has no process that is free" in others_told[0]
            assert told == []
        # One of them dies: the rest of its samples are made by others, and it is started again.
        with connected(address) as (hosts, told):
            victim = min(pids)
            os.kill(victim, signal.SIGKILL)
            assert read(hosts)[0] == expected
            assert told == [f"input host 127.0.0.1:{address[1]} is lost: what its processes made is made here"]
        wait_for(lambda: "a process has died (-9) and is started again" in said)
        # Both stand still, as on a machine that is cut off.
        monkeypatch.setattr(client, "_SILENCE_S", 0.5)
        with connected(address) as (hosts, told):
            pids = {one.pid for one in multiprocessing.active_children()}
            assert victim not in pids
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            assert read(hosts) == (expected, {os.getpid()})
            assert told == [
                f"input host 127.0.0.1:{address[1]} has not answered for 0.5 s: what its processes made is made here"
            ]
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        monkeypatch.undo()
        with connected(address) as (hosts, told):
            ending = threading.Thread(target=lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
            ending.start()
            assert read(hosts)[0] == expected
            ending.join()
    with connected(address, is_full=False) as (hosts, told):
        assert read(hosts) == (expected, {os.getpid()})
        assert told == [
            f"input host 127.0.0.1:{address[1]} cannot be reached (Connection refused): samples are made without it"
        ]


@pytest.mark.slow
def test_only_those_with_the_key_and_the_same_pipeline_are_served(expected):
    facts = pipeline_facts(squares())
    with serving(served, 2) as (address, _):
        for name in facts:
            other = facts | {name: "another"}
            with pytest.raises(
                SettingError, match=f"--input-hosts = '127.0.0.1:.*': has another {name}: all machines need"
            ):
                connect([address], KEY, other, print)
        with pytest.raises(SettingError, match="is no input host, or has another key than --key-file"):
            connect([address], KEY + "?", facts, print)
        with socket.create_connection(address) as stranger:  # who sends programs
            program = pickle.dumps(eval, protocol=0)
            stranger.sendall(struct.pack("<I", len(program)) + program + b"\n")
            stranger.settimeout(30)
            assert json.loads(stranger.recv(4096)).keys() == {"challenge"}
            assert is_ended(stranger)
        with connected(address) as (hosts, told):
            assert read(hosts)[0] == expected
            assert told == []


def is_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@contextmanager
def saying(line: bytes):
    """The address of a server that says one line to every caller."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        is_over = threading.Event()

        def work() -> None:
            listener.settimeout(0.05)
            while not is_over.is_set():
                try:
                    with listener.accept()[0] as caller:
                        caller.sendall(line)
                        caller.settimeout(1)
                        caller.recv(4096)
                except (TimeoutError, ConnectionResetError):  # the caller may not read to the end
                    pass

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize("said", [b"", b'{"chall', b'{"challenge": "a"}\n'])
def test_a_host_that_ends_the_handshake_is_done_without(said):
    told = list[str]()
    with saying(said) as address:
        assert connect([address], KEY, {}, told.append).num_workers == 0
    reason = "cannot be reached (the connection has ended): samples are made without it"
    assert told == [f"input host 127.0.0.1:{address[1]} {reason}"]


def test_a_host_with_another_key_is_refused_whether_or_not_it_has_processes():
    with serving(served, 0) as (address, _):
        with pytest.raises(SettingError, match="is no input host, or has another key than --key-file"):
            connect([address], KEY + "?", {}, print)
        told = list[str]()
        assert connect([address], KEY, {}, told.append).num_workers == 0
        assert "has no process that is free" in told[0]


@pytest.mark.parametrize("line", [b"SSH-2.0-OpenSSH_9.6\r\n", b"[[[\n", b'{"challenge": 3}\n', b"x" * 5000])
def test_what_is_no_input_host_is_refused(line):
    with saying(line) as address, pytest.raises(SettingError, match="is no input host"):
        connect([address], KEY, {}, print)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0o600, "cannot be read: No such file or directory"),
        (KEY, 0o640, "can be read by others than its owner: chmod 600 it"),
        ("short", 0o600, "must hold a key of at least 32 characters"),
    ],
)
def test_a_key_that_is_none_or_known_to_others_is_refused(tmp_path: Path, content, mode, said):
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(SettingError, match=f"--key-file = .*: {said}"):
        find_key(path)


def test_a_missing_key_is_made_once(tmp_path: Path):
    made = find_key(tmp_path / "key", makes=True)
    assert len(made) == 64
    assert find_key(tmp_path / "key") == find_key(tmp_path / "key", makes=True) == made
    assert find_key(tmp_path / "other", makes=True) != made
