"""A host that joins the others: where it listens, which devices it takes, and what JAX must not take over."""

import argparse
import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count

import pytest

from swift.cli.train import joined
from swift.errors import SettingError
from swift.runlog.lease import acquire_lease, living_owner, this_process
from swift.train.hosts import HostSettings, shares_machine
from tests.train.hosts.runs import free_port

JOINED = """
import os, signal, sys, time
from swift.train import HostSettings, join_hosts

join_hosts(HostSettings(sys.argv[1], 1, 0))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
LISTENING = """
import json, os, sys, time
import jax
from jax._src import xla_bridge
from swift.train import HostSettings, join_hosts

jax.config.update("jax_platforms", "cpu")
address, count, own = (json.loads(word) for word in sys.argv[1:])
hosts = join_hosts(HostSettings(address, count, own))
assert len(hosts.gather(None)) == hosts.count
files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
own = {os.readlink(file) for file in files if os.path.lexists(file)}
rows = [line.split() for name in ("tcp", "tcp6") for line in list(open(f"/proc/self/net/{name}"))[1:]]
bound = sorted(row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own)
print(json.dumps([bound, xla_bridge.CUDA_VISIBLE_DEVICES.value]), flush=True)
hosts.gather(None)
hosts.separate()
"""
SLURM = {
    "SLURM_JOB_ID": "4243",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "1",
}


def started(script, *words, **variables):
    """A process that runs a script, with words for it and variables of its own."""
    command = [sys.executable, "-c", script, *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAX_COORD"))}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment | variables, text=True
    )


def said(process):
    """What such a process has printed, as JSON."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def address_of(row):
    """The address of a row of /proc/net/tcp or tcp6: 32-bit words in the order of bytes that the machine has."""
    raw = bytes.fromhex(row)
    words = (raw[at : at + 4] for at in range(0, len(raw), 4))
    address = ipaddress.ip_address(b"".join(word if sys.byteorder == "big" else word[::-1] for word in words))
    return getattr(address, "ipv4_mapped", None) or address


def network_address():
    """An address of this machine on a network; None if it has none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documents; sends nothing
        return probe.getsockname()[0]


def test_sigterm_has_its_usual_effect_before_a_run_holds_it_back():
    """JAX's preemption service would catch it, and nobody would hear of it."""
    command = [sys.executable, "-c", JOINED, f"127.0.0.1:{free_port()}"]
    ended = subprocess.run(command, timeout=50, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGTERM, ended.stderr.decode()


@pytest.mark.long
@pytest.mark.parametrize("of_machine", ["loopback", "network"])
def test_hosts_listen_where_they_reach_the_coordinator_alone(of_machine):
    """Also on a network where the machine's own name is that of its loopback device, as in Debian's /etc/hosts."""
    host = "127.0.0.1" if of_machine == "loopback" else network_address()
    if host is None:
        pytest.skip("this machine is on no network")
    place = json.dumps(f"{host}:{free_port()}")
    processes = [started(LISTENING, place, "2", str(own)) for own in range(2)]
    for bound, _ in [said(process) for process in processes]:
        assert bound
        assert {str(address_of(row)) for row in bound} == {host}


@pytest.mark.long
def test_the_only_task_of_a_machine_has_all_its_devices():
    """JAX gives each task of Slurm the device of its number among the tasks of the machine, the first one here."""
    bound, devices = said(started(LISTENING, "null", "null", "null", **SLURM))
    assert devices == "all"
    assert {str(address_of(row)) for row in bound} <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    ("variables", "shares"),
    [
        (SLURM, False),
        (SLURM | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_NODES": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x8)"}, False),
        (SLURM | {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_NODES": "2"}, True),
        (SLURM | {"SLURM_NTASKS": "3", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2,1"}, True),
        (SLURM | {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_NODES": "2", "CUDA_VISIBLE_DEVICES": "3"}, False),
        (SLURM | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "2"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "8"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
    ],
)
def test_tasks_that_share_a_machine_share_its_devices(variables, shares):
    assert shares_machine(variables) is shares


def test_a_run_that_is_under_way_is_found_and_a_dead_one_is_not(tmp_path):
    assert living_owner(tmp_path / "nothing") is None
    assert living_owner(tmp_path) is None
    with acquire_lease(tmp_path):
        assert living_owner(tmp_path).owner.pid == os.getpid()
    assert living_owner(tmp_path) is None
    script = (
        "import pathlib, sys; from swift.runlog.lease import acquire_lease; acquire_lease(pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True)
    assert list(tmp_path.glob(".lease-*"))
    assert living_owner(tmp_path) is None


def test_the_wait_for_an_owner_on_another_machine_is_told_of(tmp_path, monkeypatch):
    owner = this_process()
    with acquire_lease(tmp_path, replace(owner, place=replace(owner.place, host="far", boot="another"))):
        told, clock = [], count(step=1.0)
        monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
        assert living_owner(tmp_path, told.append, lambda _: None) is None
    assert told == [f"{tmp_path} has an owner: waiting up to 10 s for a heartbeat"]


def test_no_run_of_a_comparison_may_be_under_way(tmp_path):
    """A comparison's runs have directories of their own, below the one that is named."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    options, runs = (
        argparse.Namespace(run_dir=tmp_path, host=1),
        dict.fromkeys([tmp_path / "first", tmp_path / "second"]),
    )
    with (
        acquire_lease(tmp_path / "second"),
        pytest.raises(SettingError, match="--host = 1: the run is under way"),
        joined(HostSettings("127.0.0.1:1", 2, 1), options, runs),
    ):
        pass
