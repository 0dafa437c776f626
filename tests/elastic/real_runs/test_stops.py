"""Runs that are ended, by a person or for want of processes: in time, with nothing left, and fit to be resumed."""

import os
import signal
import subprocess
import time

import numpy as np
import pytest

from swift.runlog.reading import read_run
from tests.elastic.runs import (
    EVERY,
    NO_CHECKPOINTS,
    SWIFT,
    checkpoint_service,
    go_on,
    launched,
    left_behind,
    losses,
    members,
    newest_checkpoint,
    scratch,
    stop,
    wait_for,
    wait_for_checkpoint,
    wait_for_steps,
    whole,
    write_config,
)

pytestmark = pytest.mark.slow
WITHIN_S = 20
"""A run stops in 10 s, and has more of them here: the machine may have other things to do."""


def resume(config, processes=2):
    """Goes on, and ends with the losses of a run that was never stopped."""
    saved = newest_checkpoint(config)
    with launched(config, "--resume", processes=processes) as process:
        wait_for(process, f"all resume from the checkpoint of iteration {saved}")
        wait_for_steps(process, config, saved + 10)
        go_on(process, config, *NO_CHECKPOINTS)


@pytest.mark.parametrize(("how", "every"), [(signal.SIGTERM, EVERY), (signal.SIGINT, {}), (signal.SIGTERM, {})])
def test_a_stop_keeps_a_checkpoint_that_the_run_goes_on_from(tmp_path, how, every):
    config = write_config(tmp_path, (2, 1, 1), 10**6, **every)
    with launched(config) as process:
        wait_for_steps(process, config, 10)
        rest, _ = stop(process, config, how)
    done = len(losses(tmp_path / "run"))
    assert newest_checkpoint(config) == done
    assert "which is to be the last" in rest
    assert f"--resume continues from {done}" in rest
    resume(config)


def test_a_second_signal_ends_all_at_once_and_an_older_checkpoint_is_whole(tmp_path):
    config = write_config(tmp_path, (2, 1, 1), 10**6, **EVERY)
    with launched(config) as process:
        wait_for_checkpoint(process, config)
        saved = newest_checkpoint(config)
        os.kill(checkpoint_service(config), signal.SIGSTOP)  # so that it does not stop in order
        process.send_signal(signal.SIGTERM)
        wait_for(process, "waiting for the checkpoint")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        os.kill(checkpoint_service(config), signal.SIGKILL)
        while left_behind(config):
            time.sleep(0.05)
    assert newest_checkpoint(config) == saved
    assert scratch(process.pid) == []
    resume(config)


def test_a_stop_while_the_first_program_is_compiled_is_not_waited_for(tmp_path):
    config = write_config(tmp_path, (2, 1, 1), 10**6)
    with launched(config) as process:
        wait_for(process, "forming generation 1")
        rest, took_s = stop(process, config, signal.SIGTERM)
    assert took_s < WITHIN_S
    assert "stopping: waits" not in rest


@pytest.mark.parametrize("moment", ["before the signals are held back", "while members import"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_at_the_start_leaves_no_lease(tmp_path, moment, how):
    config, run_dir = write_config(tmp_path, (2, 1, 1), 10**6), tmp_path / "run"
    with launched(config) as process:
        while not (members(config) if moment.endswith("import") else [*run_dir.glob(".lease*")]):
            assert process.poll() is None
            time.sleep(0.01)
        if moment.endswith("import"):
            rest, took_s = stop(process, config, how)
            assert took_s < WITHIN_S
            assert "interrupted after iteration 0; no checkpoint was saved" in rest
        else:
            process.send_signal(how)
            assert process.wait(timeout=60) == -how
            assert not run_dir.exists()
    assert [*run_dir.glob(".lease*")] == []


@pytest.mark.parametrize(
    ("victims", "moment"),
    [
        (["1:0"], "process 1:0 died"),
        (["0:0", "1:0"], "stage 0 has no live process"),
        (["0:0", "1:0"], "restoring the newest checkpoint"),
    ],
)
def test_ctrl_c_in_the_midst_of_a_recovery(tmp_path, victims, moment):
    config = write_config(tmp_path, (2, 1, 1), 10**6, **EVERY)
    with launched(config) as process:
        wait_for_checkpoint(process, config)
        there = members(config)
        for victim in victims:
            os.kill(there[victim], signal.SIGKILL)
        wait_for(process, moment)
        rest, took_s = stop(process, config)
    assert took_s < WITHIN_S
    assert f"--resume continues from {newest_checkpoint(config)}" in rest
    resume(config)


def test_who_may_not_come_back_is_gone_and_the_others_go_on_to_the_end(tmp_path):
    config = write_config(tmp_path, (2, 1, 1), 300)
    with launched(config, "--restarts", "0") as process:
        wait_for_steps(process, config, 10)
        os.kill(members(config)["1:0"], signal.SIGKILL)
        wait_for(process, "with 1 process")
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 0, rest
    run = read_run(tmp_path / "run")
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config), rtol=1e-8)
    assert run.metrics[-1]["live_workers"] == 1
    assert [event["event"] for event in run.events].count("process_died") == 1
    assert left_behind(config) == {}
    assert scratch(process.pid) == []


def test_a_stage_none_of_which_may_come_back_ends_the_run_which_can_be_resumed(tmp_path):
    config = write_config(tmp_path, (2, 2, 1), 10**6, **EVERY)
    with launched(config, "--restarts", "0", processes=4) as process:
        wait_for_checkpoint(process, config)
        there = members(config)
        for victim in ("0:1", "1:1"):
            os.kill(there[victim], signal.SIGKILL)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 3, rest
    line = rest.splitlines()[-1]
    assert "stage 1 has no process left that may be restarted: stopped" in line
    assert f"resume from the checkpoint of iteration {newest_checkpoint(config)} with --resume" in line
    assert left_behind(config) == {}
    assert scratch(process.pid) == []
    resume(config, processes=4)


def test_a_second_supervisor_is_refused_and_one_that_was_killed_is_followed_at_once(tmp_path):
    config = write_config(tmp_path, (2, 1, 1), 10**6, **EVERY)
    with launched(config) as process:
        wait_for_checkpoint(process, config)
        for command in (["launch", "--processes", "2"], ["train"]):
            second = [*SWIFT, *command, str(config), "--run-dir", str(tmp_path / "run"), "--resume"]
            told = subprocess.run(second, capture_output=True, text=True, timeout=120, check=False)
            assert (told.returncode, told.stderr.count("\n")) == (2, 1), told.stderr
            assert f"belongs to process {process.pid} on " in told.stderr
        saved = newest_checkpoint(config)
        while newest_checkpoint(config) == saved:  # the first still saves
            assert process.poll() is None
        process.kill()
        process.wait()
    with launched(config, "--resume") as process:
        first = process.stderr.readline()
        assert "has an owner" not in first, first
        wait_for(process, "all resume from the checkpoint of iteration")
        rest, _ = stop(process, config)
        assert not [*(tmp_path / "run").glob(".lease*")], rest
