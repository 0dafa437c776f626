"""Processes of a comparison without training: how they end, and which devices they get."""

import argparse
import subprocess
import sys
from types import SimpleNamespace

import pytest

from swift.cli import run_processes
from swift.cli.run_processes import _Process, _Processes

SAVING = """
import pathlib, signal, sys, time

def save(*_):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1]).touch()
    sys.exit(130)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""


def run_of(name="one", ranks="emulated", num_devices=1):
    topology = SimpleNamespace(num_devices=num_devices)
    return SimpleNamespace(name=name, experiment=SimpleNamespace(num_steps=9, ranks=ranks, topology=topology))


def processes_of(runs, tmp_path, num_devices=0):
    return _Processes(
        runs, dict.fromkeys([run.name for run in runs], "new"), tmp_path, argparse.Namespace(), num_devices
    )


def test_an_error_of_the_parent_waits_until_all_runs_are_saved(tmp_path, monkeypatch):
    processes, saved, started = processes_of([run_of()], tmp_path), tmp_path / "saved", []

    def start(run):
        command = [sys.executable, "-c", SAVING, str(saved)]
        popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert popen.stdout.readline() == b"ready\n"
        processes._running.append(_Process(run, popen, 0))
        started.append(popen)

    def fail():
        raise MemoryError

    monkeypatch.setattr(processes, "_start", start)
    monkeypatch.setattr(processes, "_follow", fail)
    with pytest.raises(MemoryError):
        processes.run(1)
    assert saved.exists()
    started[0].communicate()
