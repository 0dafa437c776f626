"""Real processes that are really killed: the survivors continue, the dead come back, and nothing is lost."""

import itertools
import os
import random
import re
import signal
import time

import numpy as np
import pytest

from swift.report.history import configuration_periods, history_of, incidents_of, presences_of, time_by_cause
from swift.report.sections import schedule_of
from swift.runlog.reading import read_run
from tests.elastic.runs import (
    launched,
    left_behind,
    losses,
    members,
    newest_checkpoint,
    scratch,
    tell,
    wait_for,
    wait_for_checkpoint,
    whole,
    write_config,
)


def config_for(tmp_path, stages, steps):
    return write_config(tmp_path, (2, stages, 1), steps)


@pytest.mark.slow
def test_each_is_killed_at_any_moment_and_comes_back_and_nothing_is_lost(tmp_path):
    """The first process, too. Who comes back has missed some iterations."""
    config, moment = config_for(tmp_path, 1, 10**6), random.Random(0)
    with launched(config) as process:
        wait_for(process, "running with 2 processes")
        for who in ("0:0", "1:0", "0:0"):
            before = members(config)
            time.sleep(moment.uniform(0.5, 1.0))
            os.kill(before[who], signal.SIGKILL)
            wait_for(process, "with 1 process")
            (other,) = before.keys() - {who}
            assert members(config)[other] == before[other]
            wait_for(process, "with 2 processes")
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 130, rest
    assert_record_says_who_was_down(read_run(tmp_path / "run"))
    events = read_run(tmp_path / "run").events
    assert [event["rerun_steps"] <= 1 for event in events if event["event"] == "recovery"] == [True] * 3
    found = losses(tmp_path / "run")
    np.testing.assert_allclose(found, whole(config, "--stop-at", len(found)), rtol=1e-8)
    assert left_behind(config) == {}
    assert scratch(process.pid) == []


def assert_record_says_who_was_down(run):
    """0:0, 1:0 and 0:0 again, one after the other; with the plan that the others ran, and all of the time."""
    history = history_of(run)
    stretches = configuration_periods(run, history)
    assert [one.down for one in stretches] == [(), ("0:0",), (), ("1:0",), (), ("0:0",), ()]
    for one in stretches:
        schedule, _ = schedule_of(one.plan)
        assert {f"{d}:{p}" for d, p in schedule.problem.failed} == {*one.down}
    assert {one.name: len(one.spans) for one in presences_of(run, history)} == {"0:0": 3, "1:0": 2}
    goodput = run.events[-1]["goodput"]
    assert sum(time_by_cause(run, history).values()) == pytest.approx(goodput["total_s"], abs=1e-6)
    kinds = [one.kind for one in incidents_of(run, history)]
    assert kinds == ["failure", "recovery", "return"] * 3 + ["stop"]


@pytest.mark.slow
@pytest.mark.parametrize("recovery", ["live", "restart"])
def test_chaos_does_what_was_asked_and_the_losses_are_those_without(tmp_path, recovery):
    config, run_dir = config_for(tmp_path, 2, 400), tmp_path / "run"
    chaos = ["--chaos", "step 30: kill 1:1", "step 31: restart 1:1"]
    code, said = tell(config, "--processes", 4, "--run-dir", run_dir, "--recovery", recovery, *chaos)
    assert code == 0, said
    np.testing.assert_allclose(losses(run_dir), whole(config), rtol=1e-8)
    run = read_run(run_dir)
    live = [count for count, _ in itertools.groupby(record["live_workers"] for record in run.metrics)]
    assert live == ([4, 3, 4] if recovery == "live" else [4])
    assert re.findall(r"process (\S+) died \((.*)\)", said)[0] == ("1:1", "signal 9")
    assert [event["event"] for event in run.events].count("recovery") == 1
    assert run.summary["goodput"]["num_deaths"] == (1 if recovery == "live" else 4)


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another_and_begins_again_where_a_stage_is_lost(tmp_path):
    """There is no checkpoint of its own: all of stage 1 die, and the weights are those of the other run once more."""
    config = config_for(tmp_path, 2, 60)
    before = whole(config, "--stop-at", 30)
    (tmp_path / "whole").rename(tmp_path / "other")
    fork, run_dir = ("--init-from", tmp_path / "other"), tmp_path / "run"
    wrong = ("--run-dir", run_dir, "--set", "ModelConfig.ffn_dim=64")
    code, said = tell(config, "--processes", 4, *fork, *wrong)
    assert (code, said.count("\n"), run_dir.exists()) == (2, 1, False), said
    assert "is of another model" in said
    chaos = ["--chaos", "step 20: kill 0:1", "step 20: kill 1:1"]
    code, said = tell(config, "--processes", 4, "--run-dir", run_dir, *fork, *chaos, "--prepare", "none")
    assert code == 0, said
    assert said.count(f"begins with the weights of {tmp_path / 'other'}, iteration 30") == 2
    found = losses(run_dir)
    assert abs(found[0] - before[-1]) < abs(found[0] - before[0])
    np.testing.assert_allclose(found, whole(config, *fork), rtol=1e-8)
    assert [event["of_step"] for event in read_run(run_dir).events if event["event"] == "init_from"] == [30, 30]


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_no_process_behind(tmp_path):
    config = write_config(tmp_path, (2, 1, 1), 10**6, CheckpointConfig__every=20)
    with launched(config) as process:
        wait_for_checkpoint(process, config)  # so that nothing has to be compiled for the last
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 130
        assert time.monotonic() - begun < 15
    assert "Traceback" not in rest
    assert left_behind(config) == {}
    assert scratch(process.pid) == []
    assert newest_checkpoint(config) == len(losses(tmp_path / "run"))


def test_processes_end_with_their_supervisor(tmp_path):
    config = config_for(tmp_path, 1, 10**6)
    with launched(config) as process:
        wait_for(process, "forming")
        assert sorted(left_behind(config).values()) == ["launch", "worker", "worker"]
        assert scratch(process.pid)
    deadline = time.monotonic() + 60
    while left_behind(config) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind(config) == {}
    assert scratch(process.pid) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--processes", "3"], "--processes = 3: must be 2"),
        (["--processes", "2", "--chaos", "step 3: kill 2:0"], "--chaos"),
        (["--processes", "2", "--deadline", "patience=5"], "--deadline = 'patience=5': must be NAME=SECONDS"),
        pytest.param(["--processes", "2", "--resume"], "--run-dir", marks=pytest.mark.slow),
        pytest.param(
            ["--processes", "2", "--set", "Experiment.failures=['step 3: fail 1:0']"],
            "Experiment.failures",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_starts(tmp_path, arguments, told):
    config = config_for(tmp_path, 1, 5)
    code, said = tell(config, "--run-dir", tmp_path / "run", *arguments)
    assert code == 2
    assert told in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()
