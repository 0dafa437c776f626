"""Other troubles of real processes, each of which ends in the right state and within its deadline."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from swift.checkpoint.manifest import checkpoint_steps
from swift.runlog.reading import read_run
from tests.elastic.runs import (
    EVERY,
    go_on,
    launched,
    left_behind,
    losses,
    members,
    newest_checkpoint,
    stop,
    tell,
    wait_for,
    whole,
    write_config,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("harm", "deadlines", "reason", "within_s"),
    [
        ("freeze", ["heartbeat=2"], "sent no heartbeat for 2 s", 4),
        ("hang", ["progress=40"], "is still in iteration 2", 42),
    ],
)
def test_who_is_frozen_or_stuck_is_found_and_replaced(tmp_path, harm, deadlines, reason, within_s):
    config = write_config(tmp_path, (2, 1, 1), 200)
    chaos = ["--deadline", *deadlines, "--chaos", f"step 20: {harm} 1:0", "step 21: restart 1:0"]
    code, said = tell(config, "--processes", 2, "--run-dir", tmp_path / "run", *chaos)
    assert code == 0, said
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config), rtol=1e-8)
    events = read_run(tmp_path / "run").events
    (kill,) = [event for event in events if event["event"] == "process_killed"]
    assert reason in kill["reason"]
    (death,) = [event for event in events if event["event"] == "process_died"]
    assert death["process"] == "1:0"
    assert death["detection_s"] < within_s


def test_two_at_once_in_different_stages(tmp_path):
    config = write_config(tmp_path, (2, 2, 1), 120)
    chaos = ["--chaos", "step 20: kill 0:0", "step 20: kill 1:1"]
    code, said = tell(config, "--processes", 4, "--run-dir", tmp_path / "run", *chaos)
    assert code == 0, said
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config), rtol=1e-8)
    assert min(record["live_workers"] for record in read_run(tmp_path / "run").metrics) == 2


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.2, 0.4, 0.8])
def test_a_second_one_is_killed_while_the_others_recover(tmp_path, delay_s):
    """The delays reach into all parts of a recovery: leaving, meeting, loading, continuing."""
    config = write_config(tmp_path, (3, 1, 1), 10**6)
    with launched(config, processes=3) as process:
        wait_for(process, "running with 3 processes")
        time.sleep(2)
        there = members(config)
        os.kill(there["1:0"], signal.SIGKILL)
        wait_for(process, "1:0 died")
        time.sleep(delay_s)
        os.kill(there["2:0"], signal.SIGKILL)
        wait_for(process, "with 3 processes")
        go_on(process, config)


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_who_comes_back_is_killed_while_it_joins(tmp_path, delay_s):
    config = write_config(tmp_path, (2, 1, 1), 10**6)
    with launched(config) as process:
        wait_for(process, "running with 2 processes")
        time.sleep(2)
        os.kill(members(config)["0:0"], signal.SIGKILL)
        wait_for(process, "0:0 has rejoined")
        time.sleep(delay_s)
        os.kill(members(config)["0:0"], signal.SIGKILL)
        wait_for(process, "with 1 process")
        wait_for(process, "with 2 processes")
        go_on(process, config)


def test_a_stage_that_has_lost_all_goes_back_to_the_newest_checkpoint(tmp_path):
    config = write_config(tmp_path, (2, 2, 1), 100, **EVERY)
    chaos = ["--chaos", "step 50: kill 0:1", "step 50: kill 1:1"]
    code, said = tell(config, "--processes", 4, "--run-dir", tmp_path / "run", *chaos)
    assert code == 0, said
    assert "all resume from the checkpoint of iteration 40" in said
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config), rtol=1e-8)


def test_without_a_checkpoint_a_lost_stage_ends_the_run(tmp_path):
    config = write_config(tmp_path, (1, 2, 1), 100)
    code, said = tell(config, "--processes", 2, "--run-dir", tmp_path / "run", "--chaos", "step 10: kill 0:1")
    assert code == 3
    assert "there is no checkpoint" in said.splitlines()[-1]


def test_a_rank_that_is_a_process_costs_a_return_to_the_checkpoint(tmp_path):
    settings = EVERY | {"Experiment__sequences_per_microbatch": 4, "Experiment__eval_every": 20}
    config = write_config(tmp_path, (1, 1, 4), 60, **settings)
    run_dir = tmp_path / "run"
    code, said = tell(config, "--processes", 4, "--run-dir", run_dir, "--chaos", "step 30: kill 0:0 rank 2")
    assert code == 0, said
    assert "all resume from the checkpoint of iteration 20" in said
    np.testing.assert_allclose(losses(run_dir), whole(config), rtol=1e-8)
    mine, theirs = (
        [record.get("validation_loss") for record in read_run(tmp_path / name).metrics] for name in ("run", "whole")
    )
    assert [loss is None for loss in mine] == [loss is None for loss in theirs]
    np.testing.assert_allclose([x for x in mine if x], [x for x in theirs if x], rtol=1e-8)


def test_a_run_whose_supervisor_was_killed_goes_on(tmp_path):
    config, run_dir = write_config(tmp_path, (2, 1, 1), 120, **EVERY), tmp_path / "run"
    with launched(config) as process:
        while not checkpoint_steps(run_dir / "checkpoints"):
            time.sleep(0.2)
            assert process.poll() is None
        process.kill()
    deadline = time.monotonic() + 10
    while left_behind(config) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind(config) == {}
    code, said = tell(config, "--processes", 2, "--run-dir", run_dir, "--resume")
    assert code == 0, said
    np.testing.assert_allclose(losses(run_dir), whole(config), rtol=1e-8)


@pytest.mark.parametrize("who", ["checkpoint-service", "worker"])
def test_a_kill_while_a_checkpoint_is_made(tmp_path, who):
    config = write_config(tmp_path, (2, 1, 1), 10**6, CheckpointConfig__every=5)
    with launched(config) as process:
        wait_for(process, "running with 2 processes")
        for _ in range(3):
            before = newest_checkpoint(config)
            while newest_checkpoint(config) == before:
                time.sleep(0.1)
                assert process.poll() is None
            victims = [pid for pid, kind in left_behind(config).items() if kind == who]
            os.kill(victims[0], signal.SIGKILL)
            if who == "worker":
                wait_for(process, "with 2 processes")
        go_on(process, config, "--set", "CheckpointConfig.every=0")
    assert newest_checkpoint(config) == len(losses(tmp_path / "run"))


def test_who_dies_at_once_again_and_again_is_given_up_with_the_end_of_its_log(tmp_path, monkeypatch):
    of_members = "import os, sys\nif 'worker' in sys.orig_argv: os.environ['XLA_FLAGS'] = '--xla_no_such_flag=1'\n"
    (tmp_path / "sitecustomize.py").write_text(of_members)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = write_config(tmp_path, (2, 1, 1), 10)
    code, said = tell(config, "--processes", 2, "--run-dir", tmp_path / "run")
    assert code == 3
    assert "xla_no_such_flag" in said
    assert "3 times in a row" in said.splitlines()[-1]


def test_a_compile_service_that_is_frozen_while_it_compiles_costs_no_member(tmp_path):
    config = write_config(tmp_path, (2, 1, 1), 10**6)
    with launched(config) as process:
        wait_for(process, "running with 2 processes")
        while not (
            locking := holders_of_locks()
            & {pid for pid, kind in left_behind(config).items() if kind == "compile-service"}
        ):
            time.sleep(0.01)
        os.kill(locking.pop(), signal.SIGSTOP)
        os.kill(members(config)["1:0"], signal.SIGKILL)
        wait_for(process, "with 1 process")
        wait_for(process, "with 2 processes")
        stop(process, config)
    events = read_run(tmp_path / "run").events
    assert [event["process"] for event in events if event["event"] == "process_killed"] == ["compile-service"]
    assert [event["event"] for event in events].count("process_died") == 1


def holders_of_locks():
    """The process ids of all who have locked a file."""
    return {int(line.split()[4]) for line in Path("/proc/locks").read_text().splitlines() if "FLOCK" in line}
