"""Hosts that are stopped, killed or frozen, and hosts that cannot join: none of the others is left waiting."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from faults.machines import MAY_BE_POSSIBLE, BridgedMachines

from swift.checkpoint.manifest import checkpoint_steps
from tests.elastic.runs import losses
from tests.train.hosts.runs import PATIENCE_S, alone, ended, free_port, start, write_config

pytestmark = pytest.mark.slow
SMALL = {"ModelConfig__num_layers": 1, "ModelConfig__moe_pattern": (True,), "Experiment__num_microbatches": 2}


@contextmanager
def under_way(tmp_path, num_hosts, **options):
    """A run that would take hours, a pipeline on each host, once it has saved a checkpoint."""
    config = write_config(tmp_path, (num_hosts, 1, 1), 10**6, CheckpointConfig__every=3, **SMALL)
    processes = start(config, tmp_path / "run", num_hosts, **options)
    try:
        while not checkpoint_steps(tmp_path / "run" / "checkpoints"):
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


def below(pid):
    """All processes that were started by one, and by those."""
    found = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return found + [other for child in found for other in below(child)]


def is_running(pid):
    """Whether a process runs; a dead one of which nobody has asked how it ended does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_sigterm_to_one_host_stops_all_with_a_checkpoint(tmp_path):
    with under_way(tmp_path, 2) as processes:
        processes[1].send_signal(signal.SIGTERM)
        hosts = ended(processes)
    assert [host.code for host in hosts] == [130, 130], hosts
    last = len(losses(tmp_path / "run"))
    assert f"interrupted after iteration {last}, which is saved; --resume continues from it" in hosts[0].err
    assert checkpoint_steps(tmp_path / "run" / "checkpoints")[-1] == last


def test_a_number_in_use_is_refused_once_the_run_is_under_way_and_the_run_continues(tmp_path):
    """JAX's coordination service would end all hosts when a second one of a number connects."""
    with under_way(tmp_path, 2) as processes:
        for process in processes:
            late = subprocess.run(process.args, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            assert (late.returncode, late.stderr.count("\n")) == (2, 1), late.stderr
            assert "the run is under way, by process " in late.stderr
        before = len(losses(tmp_path / "run"))
        while len(losses(tmp_path / "run")) < before + 3:
            assert [process.poll() for process in processes] == [None, None]
            time.sleep(0.2)
        processes[1].send_signal(signal.SIGTERM)
        hosts = ended(processes)
    assert [host.code for host in hosts] == [130, 130], hosts


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_others_end_when_a_host_is_killed_and_resume(tmp_path, lost):
    with under_way(tmp_path, 3) as processes:
        children = [pid for process in processes for pid in below(process.pid)]
        assert len(children) >= 4  # a trainer on each, and on the first a process that writes checkpoints
        processes[lost].kill()
        hosts = ended(processes)
        assert [host.code for host in hosts] == [-signal.SIGKILL if host == lost else 3 for host in range(3)], hosts
        until = time.monotonic() + PATIENCE_S
        while any(map(is_running, children)):
            assert time.monotonic() < until, [child for child in children if is_running(child)]
            time.sleep(0.2)
    for host in {0, 1, 2} - {lost}:
        assert "is kept; continue with --run-dir" in hosts[host].err.splitlines()[-1]
    if lost != 1:
        return
    last = checkpoint_steps(tmp_path / "run" / "checkpoints")[-1] + 2
    fewer = "--set", "Topology.num_pipelines=2", "--set", "Experiment.num_microbatches=3"
    config = tmp_path / "kill.gin"
    survivors = ended(start(config, tmp_path / "run", 2, "--resume", "--stop-at", last, *fewer))
    assert [host.code for host in survivors] == [0, 0], survivors
    expected = alone(config, tmp_path / "alone", "--stop-at", last)
    np.testing.assert_allclose(losses(tmp_path / "run"), expected, rtol=1e-8)


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


@pytest.mark.skipif(not MAY_BE_POSSIBLE, reason="only root can make networks, with ip and unshare")
def test_both_sides_end_when_the_wire_between_them_is_cut(tmp_path):
    with (
        BridgedMachines(tmp_path) as machines,
        under_way(tmp_path, 2, address="node0", inside=machines.wrap) as processes,
    ):
        machines.cut(1)
        hosts = ended(processes)
    assert [host.code for host in hosts] == [3, 3], hosts
    for number, host in enumerate(hosts):
        assert host.err.splitlines()[-1].startswith(f"swift: host {number}: another host ")
        assert "is kept; continue with --run-dir" in host.err.splitlines()[-1]


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
