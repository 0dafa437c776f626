"""Hosts that are stopped, killed or frozen, and hosts that cannot join: none of the others is left waiting."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.train.hosts.runs import PATIENCE_S, ended, free_port, start, write_config

pytestmark = pytest.mark.slow
SMALL = {"ModelConfig__num_layers": 1, "ModelConfig__moe_pattern": (True,), "Experiment__num_microbatches": 1}


@contextmanager
def under_way(tmp_path, num_hosts):
    """A run that would take hours, once it has done some iterations."""
    settings = SMALL | {"Experiment__sequences_per_microbatch": num_hosts}
    config, path = write_config(tmp_path, (1, 1, num_hosts), 10**6, **settings), tmp_path / "run" / "metrics.jsonl"
    processes = start(config, tmp_path / "run", num_hosts)
    try:
        while not path.exists() or path.read_bytes().count(b"\n") < 3:
            assert [process.poll() for process in processes] == [None] * num_hosts
            time.sleep(0.2)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


def trainer_of(process):
    """The process that trains, of which the one that was started is the parent."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def test_sigterm_to_one_host_stops_all(tmp_path):
    with under_way(tmp_path, 2) as processes:
        processes[1].send_signal(signal.SIGTERM)
        hosts = ended(processes)
    assert [host.code for host in hosts] == [130, 130], hosts
    assert "nothing is saved on several hosts" in hosts[0].err


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_others_end_when_a_host_is_killed(tmp_path, lost):
    with under_way(tmp_path, 3) as processes:
        children = list(map(trainer_of, processes))
        processes[lost].kill()
        hosts = ended(processes)
        assert [host.code for host in hosts] == [-signal.SIGKILL if host == lost else 3 for host in range(3)], hosts
        assert all(not Path(f"/proc/{child}").exists() for child in children if child != children[lost])


def test_the_others_end_when_a_host_is_silent(tmp_path):
    with under_way(tmp_path, 2) as processes:
        frozen = trainer_of(processes[1])
        os.kill(frozen, signal.SIGSTOP)
        try:
            (other,) = ended(processes[:1])
        finally:
            os.kill(frozen, signal.SIGKILL)
        assert other.code == 3, other
        assert "host 0" in other.err.splitlines()[-1]


def test_a_host_number_that_is_used_twice_is_refused(tmp_path):
    config = write_config(tmp_path, (1, 1, 2), 3, **SMALL)
    coordinator = f"127.0.0.1:{free_port()}"
    place = ["--run-dir", str(tmp_path / "run"), "--coordinator", coordinator, "--num-hosts", "2", "--host"]
    command = [sys.executable, "-m", "swift", "train", str(config), *place]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    twice = [subprocess.Popen([*command, "0"], **pipes) for _ in range(2)]
    hosts = ended(twice, PATIENCE_S)
    assert [host.code for host in hosts] == [2, 2], hosts
    assert all("--coordinator = " in host.err and "host 0" in host.err and host.err.count("\n") == 1 for host in hosts)


def test_a_coordinator_that_is_not_there_is_told(tmp_path):
    config = write_config(tmp_path, (1, 1, 2), 3, **SMALL)
    (host,) = ended(start(config, tmp_path / "run", 2, hosts=[1]))
    assert host.code == 2
    assert host.err.startswith("swift: host 1: --coordinator = '127.0.0.1:")
    assert "not all hosts have joined in time; host 0 has to be reachable there" in host.err
    assert host.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
