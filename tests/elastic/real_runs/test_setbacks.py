"""Setbacks of all processes: a frozen checkpoint service, a death during a load, an iteration that never ends."""

import os
import signal

import numpy as np
import pytest

from swift.runlog.reading import read_run
from tests.elastic.runs import (
    EVERY,
    NO_CHECKPOINTS,
    checkpoint_service,
    go_on,
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

pytestmark = pytest.mark.slow
LATE = "the checkpoint service did not answer for 30 s: killed"

HANGING = """
import sys
import time
from pathlib import Path

if "worker" in sys.orig_argv:
    from swift.train import TrainLoop

    compute = TrainLoop._compute

    def hanging(loop, *arguments):
        generation = loop.live.generation
        while Path({mark!r}).exists():
            if generation.commands.is_old(generation.number):
                raise ValueError("Gloo: called off")
            time.sleep(0.05)
        return compute(loop, *arguments)

    TrainLoop._compute = hanging
"""
"""Iterations that end in time only when they are called off, like a collective one of whose messages was lost."""

DYING = """
import os
import signal
import sys
import time
from pathlib import Path

if "worker" in sys.orig_argv and sys.orig_argv[-3] == "0":
    from swift.train import TrainLoop

    finish, mark = TrainLoop.finish, Path({mark!r} + sys.orig_argv[-2])

    def dying(loop, state, done, records):
        if [record["step"] for record in records] == [7] and not mark.exists():
            mark.touch()
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)
        finish(loop, state, done, records)

    TrainLoop.finish = dying
"""
"""Those who record die after an iteration that their peers have kept, and before they tell it."""


def kill(config, *names):
    there = members(config)
    for name in names:
        os.kill(there[name], signal.SIGKILL)


def test_a_run_ends_with_its_last_checkpoint_though_the_checkpoint_service_was_frozen(tmp_path):
    config = write_config(tmp_path, (2, 1, 1), 200, **EVERY)
    with launched(config, "--deadline", "saving=30") as process:
        wait_for(process, "running with 2 processes")
        os.kill(checkpoint_service(config), signal.SIGSTOP)  # before it can have saved anything
        wait_for(process, LATE)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 0, rest
    assert newest_checkpoint(config) == 200
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config, *NO_CHECKPOINTS), rtol=1e-8)
    assert left_behind(config) == {}
    assert scratch(process.pid) == []


def test_a_checkpoint_service_that_is_frozen_when_a_stage_is_lost_is_replaced(tmp_path):
    config = write_config(tmp_path, (2, 1, 1), 10**6, **EVERY)
    with launched(config, "--deadline", "saving=30") as process:
        wait_for_checkpoint(process, config)
        os.kill(checkpoint_service(config), signal.SIGSTOP)
        kill(config, "0:0", "1:0")
        wait_for(process, LATE)
        wait_for(process, "all resume from the checkpoint of iteration")
        wait_for(process, "with 2 processes")
        go_on(process, config, *NO_CHECKPOINTS)
    assert newest_checkpoint(config) == len(losses(tmp_path / "run"))


@pytest.mark.parametrize("victims", [["1:0"], ["0:0", "1:0"]])
def test_who_waits_for_a_checkpoint_is_killed_while_it_is_loaded(tmp_path, victims):
    config = write_config(tmp_path, (2, 1, 1), 10**6, **EVERY)
    with launched(config) as process:
        wait_for_checkpoint(process, config)
        slow = checkpoint_service(config)
        os.kill(slow, signal.SIGSTOP)  # so that it still is at it whatever happens meanwhile
        kill(config, "0:0", "1:0")
        wait_for(process, "restoring the newest checkpoint")
        kill(config, *victims)
        wait_for(process, "restoring the newest checkpoint")
        os.kill(slow, signal.SIGCONT)
        wait_for(process, "all resume from the checkpoint of iteration")
        wait_for(process, "with 2 processes")
        go_on(process, config, *NO_CHECKPOINTS)
    assert [event["event"] for event in read_run(tmp_path / "run").events].count("restore") == 1


def test_where_all_hang_and_cannot_be_called_off_all_go_back_to_the_newest_checkpoint(tmp_path):
    config = write_config(tmp_path, (2, 1, 1), 200, **EVERY)
    deadlines = ["--deadline", "progress=30", "forming=15"]
    chaos = ["--chaos", "step 50: hang 0:0", "step 50: hang 1:0"]
    code, said = tell(config, "--processes", 2, "--run-dir", tmp_path / "run", *deadlines, *chaos)
    assert code == 0, said
    assert "all resume from the checkpoint of iteration" in said
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config, *NO_CHECKPOINTS), rtol=1e-8)
    killed = {event["process"] for event in read_run(tmp_path / "run").events if event["event"] == "process_killed"}
    assert killed == {"0:0", "1:0"}


def patched(directory, monkeypatch, spec):
    """Has all Python processes from now on run a program first."""
    (directory / "sitecustomize.py").write_text(spec)
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def test_an_iteration_whose_recorders_died_before_they_told_it_is_told_by_who_has_kept_it(tmp_path, monkeypatch):
    patched(tmp_path, monkeypatch, DYING.format(mark=str(tmp_path / "died-")))
    config = write_config(tmp_path, (2, 2, 1), 24, **EVERY)
    code, said = tell(config, "--processes", 4, "--recovery", "restart", "--run-dir", tmp_path / "run")
    assert code == 0, said
    assert sorted(path.name for path in tmp_path.glob("died-*")) == ["died-0", "died-1"]
    assert newest_checkpoint(config) == 24
    assert "restore" not in {event["event"] for event in read_run(tmp_path / "run").events}
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config, *NO_CHECKPOINTS), rtol=1e-8)


def test_where_a_new_generation_does_not_help_all_are_started_again_and_find_what_they_kept(tmp_path, monkeypatch):
    mark = tmp_path / "hang"
    patched(tmp_path, monkeypatch, HANGING.format(mark=str(mark)))
    config = write_config(tmp_path, (2, 1, 1), 10**6)
    with launched(config, "--deadline", "progress=30") as process:
        wait_for(process, "running with 2 processes")
        before = members(config)
        mark.touch()
        wait_for(process, "restarting all processes: no process finished an iteration for 30 s")
        mark.unlink()
        wait_for(process, "with 2 processes")
        after = members(config)
        assert [after[name] != pid for name, pid in before.items()] == [True, True]
        go_on(process, config)
    assert "restore" not in {event["event"] for event in read_run(tmp_path / "run").events}
