"""`swift doctor`: what a person and a program get, alone and with others."""

import json
import os
import subprocess
import sys

import pytest
from faults.machines import MAY_BE_POSSIBLE, BridgedMachines


def test_a_person_is_told_line_by_line(tell, tmp_path):
    told = tell("doctor", "--host", "--run-dir", str(tmp_path / "run"))
    assert told.code == 0
    lines = told.out.splitlines()
    topics = [line.split()[1] for line in lines]
    assert topics == ["directory", "software", "cores", "memory", "shm", "files", "devices", "network"]
    assert {line.split()[0] for line in lines} <= {"ok", "note"}
    assert (told.err, told.new) == ("devices: JAX is started ...\n", [])


def test_what_is_missing_has_exit_code_3(tell, monkeypatch):
    """Words in brackets are those of the user's shell, and no styles."""
    from swift.elastic.device_probe import Finding

    missing = Finding("devices", "missing", "no plugin: pip install 'jax[cuda13]'")
    monkeypatch.setattr("swift.cli.doctor.examine_devices", lambda: [missing])
    told = tell("doctor", "--host")
    assert told.code == 3
    assert "missing  devices    no plugin: pip install 'jax[cuda13]'" in told.out
    assert told.err.splitlines()[-1] == "swift: this machine is not ready: one thing is missing"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--nodes", "2"), "--run-dir = (not set): several nodes need a directory that all of them see"),
        (("--nodes", "2", "--node", "2", "--run-dir", "here"), "--node = 2: must be from 0 to 1"),
        (("--nodes", "2", "--node", "1", "--run-dir", "here"), "--run-dir = 'here': must be a directory that is there"),
        (("--host", "--node", "3"), "--node = 3: is for several --nodes"),
        (("--nodes", "0"), "--nodes = 0: must be a whole number of at least 1"),
        (("--node", "1"), "--node = 1: is for several --nodes"),
        (
            ("--nodes", "2", "--node", "1", "--run-dir", ".", "--listen", "no host"),
            "--listen = 'no host': is not a known",
        ),
    ],
)
def test_a_mistake_is_one_line(tell, words, line):
    told = tell("doctor", *words)
    assert (told.code, told.err.splitlines()[-1].startswith(f"swift: {line}")) == (2, True), told.err


def test_host_and_nodes_contradict_each_other(tell):
    assert tell("doctor", "--host", "--nodes", "2").code == 2


def test_nodes_of_srun_meet_in_the_directory(tmp_path):
    """Two processes that Slurm would have numbered, on one machine."""
    words = [sys.executable, "-m", "swift", "doctor", "--run-dir", str(tmp_path), "--listen", "127.0.0.1"]
    numbers = [{"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(own)} for own in range(2)]
    nodes = [
        subprocess.Popen([*words, "--format", "json"], stdout=subprocess.PIPE, env={**os.environ, **number})
        for number in numbers
    ]
    for own, node in enumerate(nodes):
        said = json.loads(node.communicate(timeout=120)[0])
        assert (node.returncode, said["node"], said["nodes"], said["is_ready"]) == (0, own, 2, True)
        assert said["findings"][-1]["text"].startswith("all 2 reach one another")


@pytest.mark.slow
@pytest.mark.skipif(not MAY_BE_POSSIBLE, reason="only root can make networks, with ip and unshare")
def test_machines_whose_wire_is_cut_name_each_other(tmp_path):
    """Two machines with addresses of their own, at first joined."""
    words = [sys.executable, "-m", "swift", "doctor", "--run-dir", str(tmp_path), "--nodes", "2", "--node"]
    with BridgedMachines(tmp_path) as machines:
        for is_cut in (False, True):
            if is_cut:
                machines.cut(1)
            nodes = [
                subprocess.Popen([*machines.wrap(own), *words, str(own)], stdout=subprocess.PIPE, text=True)
                for own in range(2)
            ]
            for own, node in enumerate(nodes):
                lines = node.communicate(timeout=200)[0].splitlines()
                assert node.returncode == (3 if is_cut else 0)
                assert f"this machine is 10.77.0.{own + 1}" in lines[-2]
                wanted = f"node {1 - own}: at 10.77.0.{2 - own}:" if is_cut else "all 2 reach one another"
                assert wanted in lines[-1]
