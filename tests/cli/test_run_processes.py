"""Processes of a comparison without training: how they end, and which devices they get."""

import argparse
import subprocess
import sys
from types import SimpleNamespace

import pytest

from swift.cli import run_processes
from swift.cli.run_processes import _Process, _Processes
from swift.cli.runs_display import RunsDisplay
from swift.elastic.device_probe import JaxAnswer

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


def test_no_two_runs_share_a_gpu_while_there_are_enough(tmp_path, monkeypatch):
    """A run of one device beside one of four: by hand."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    small, large = run_of("small", "devices", 1), run_of("large", "devices", 4)
    processes = processes_of([large, small], tmp_path, num_devices=8)
    assert [processes._environment(run, place)["CUDA_VISIBLE_DEVICES"] for place, run in enumerate((large, small))] == [
        "0,1,2,3", "4"
    ]  # fmt: skip


@pytest.mark.parametrize(("platform", "count", "jobs"), [("gpu", 8, 8), ("tpu", 4, 1)])
def test_a_tpu_has_one_job_at_a_time(monkeypatch, platform, count, jobs):
    monkeypatch.setattr("swift.elastic.device_probe.ask_jax", lambda: JaxAnswer(platform, count, "some"))
    runs = [run_of(ranks="devices")]
    assert run_processes._default_jobs(runs, run_processes._num_devices(runs)) == jobs


def test_the_remaining_time_begins_at_what_is_there(tmp_path):
    """Two runs of 100 steps, one of which has made 60 in an earlier invocation."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 60}\n')
    display = RunsDisplay(tmp_path, {"a": 100, "b": 100}, {"a", "b"})
    assert not display.has_begun
    display.started("a")
    display._read("a")
    assert (sum(display._steps.values()), display.has_begun) == (60, False)
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 61}\n')
    display._read("a")
    assert (sum(display._steps.values()), display.has_begun) == (61, True)
    (tmp_path / "a").rename(tmp_path / "aside")
    display.started("a")
    assert sum(display._steps.values()) == 0
