"""Runs in which all processes start again after a death, from copies of their states in memory."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from swift.runlog.reading import read_run
from tests.elastic.runs import (
    NO_CHECKPOINTS,
    launched,
    left_behind,
    losses,
    stop,
    tell,
    wait_for,
    wait_for_steps,
    whole,
    write_config,
)

pytestmark = pytest.mark.slow
EVERY = 4
RESTART = "--recovery", "restart", "--memory-checkpoint-every", EVERY
BREAKING = """
import sys
from pathlib import Path

if "worker" in sys.orig_argv and sys.orig_argv[-3] == "1":
    from swift.train import TrainLoop

    compute = TrainLoop._compute

    def computing(*arguments):
        if Path({mark!r}).exists():
            raise RuntimeError("uncorrectable ECC error")
        return compute(*arguments)

    TrainLoop._compute = computing
"""
"""A device of the second pipeline that computes nothing from some time on."""


def test_all_start_again_from_the_newest_copy_that_they_have_in_common(tmp_path):
    config = write_config(tmp_path, (2, 2, 1), 40)
    chaos = ["--chaos", "step 14: kill 0:1", "step 27: kill 1:0"]
    code, said = tell(config, "--processes", 4, "--run-dir", tmp_path / "run", *RESTART, *chaos)
    assert code == 0, said
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config, *NO_CHECKPOINTS), rtol=1e-8)
    events = read_run(tmp_path / "run").events
    assert "restore" not in {event["event"] for event in events}
    recoveries = [event for event in events if event["event"] == "recovery"]
    assert len(recoveries) == 2
    # From the copy before, where a process dies before all have written the newest one.
    assert max(event["rerun_steps"] for event in recoveries) <= 2 * EVERY


def test_the_processes_that_start_again_were_held_ready_and_none_is_left(tmp_path):
    config = write_config(tmp_path, (2, 1, 1), 10**6)
    with launched(config, *map(str, RESTART)) as process:
        wait_for(process, "running with 2 processes")
        wait_for_steps(process, config, 2 * EVERY)
        before = member_pids(config)
        assert len(before) == 4
        os.kill(before[0], signal.SIGKILL)
        wait_for(process, "resumed after iteration")
        assert member_pids(config)[:2] == before[2:]
        stop(process, config)
    found = losses(tmp_path / "run")
    np.testing.assert_allclose(found, whole(config, "--stop-at", len(found), *NO_CHECKPOINTS), rtol=1e-8)


def test_the_others_go_on_without_a_process_whose_device_is_broken_for_good(tmp_path, monkeypatch):
    """It is found broken by the first computation, when its process has already been live."""
    mark = tmp_path / "broken"
    (tmp_path / "sitecustomize.py").write_text(BREAKING.format(mark=str(mark)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = write_config(tmp_path, (2, 1, 1), 10**6)
    with launched(config, *map(str, RESTART)) as process:
        wait_for(process, "running with 2 processes")
        wait_for_steps(process, config, 2 * EVERY)
        mark.touch()
        wait_for(process, "process 1:0 died 3 times in a row before it had finished an iteration: exit code 1")
        assert "1-0.log" in wait_for(process, "the log of process 1:0")
        wait_for(process, "with 1 process")
        wait_for_steps(process, config, len(losses(tmp_path / "run")) + 2 * EVERY)
        stop(process, config)
    found = losses(tmp_path / "run")
    np.testing.assert_allclose(found, whole(config, "--stop-at", len(found), *NO_CHECKPOINTS), rtol=1e-8)
    events = [event["event"] for event in read_run(tmp_path / "run").events]
    assert (events.count("process_died"), events.count("process_excluded"), events.count("restore")) == (4 + 4, 1, 0)


def member_pids(config):
    """Process ids of the members and of those that are held ready, in the order of their starts."""

    def started(pid):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])

    return sorted((pid for pid, kind in left_behind(config).items() if kind == "worker"), key=started)
