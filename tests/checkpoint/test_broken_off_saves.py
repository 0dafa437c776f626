"""Processes that end in the midst of a save, or cannot write a file to its end: only that save is lost."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from swift.checkpoint.manifest import clean_up_saves

PROCESSES = """
import json, os, resource, signal, sys, threading, time
from pathlib import Path
from tests.checkpoint.conftest import *
from swift.checkpoint import writer

root, limit_s, *deaths = sys.argv[1:]


def begin(name):
    global directory, split, run
    directory, state = Path(root, name), first_state(200)
    split = StateSplit(state, SPECS, has_classes=True)
    config = CheckpointConfig(every=2, experts_per_layer="all")
    run = SmallRun(directory, config, split, state, Ledger.first(split.num_layers, split.num_classes, CLASSES))
    run.run(4)


def die_of(name):
    begin(name)
    if name.isdecimal():
        run_with_most_bytes(int(name))
    else:
        run_and_die(name)


def run_with_most_bytes(most_bytes):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    try:
        run.run(6)
    except (OSError, ValueError) as error:
        print(error, flush=True)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def watch():
    while not any(file.stat().st_size for file in directory.glob(".step-*.tmp/**/expert.*/0.0.0")):
        time.sleep(0.001)
    die()


def run_and_die(point):
    if point == "between two files":
        threading.Thread(target=watch, daemon=True).start()
    elif point == "before the manifest":
        writer.write_manifest = die
    elif point == "before its name":
        writer.commit_save = die
    else:
        rename, calls = Path.rename, []

        def rename_once(path, to):
            calls.append(path)
            if len(calls) == 2:
                die()
            return rename(path, to)

        run.ledger = Ledger.first(split.num_layers, split.num_classes, CLASSES)  # as before any copy of iteration 4
        Path.rename = rename_once
        run.save()
    run.run(6)


for name in deaths:
    pipes = out, err = os.pipe(), os.pipe()  # no files: their length may be limited
    if not (child := os.fork()):
        signal.alarm(int(limit_s))  # ends it, wherever it is
        os.dup2(out[1], 1)
        os.dup2(err[1], 2)
        die_of(name)
        break
    for _, end in pipes:
        os.close(end)
    err, out = open(err[0]).read(), open(out[0]).read()  # which is short
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), out, err]), flush=True)
"""

LIMIT_S = 100
"""Time for each of the processes, none of which takes a tenth of it alone on the machine."""

MOST_BYTES = [200, 3000, 6000]
POINTS = ["between two files", "before the manifest", "before its name", "between two names"]


class Ended(NamedTuple):
    """The end of a process that saved its second checkpoint, and where the checkpoints are."""

    code: int
    out: str
    err: str
    checkpoints: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Runs of six iterations, each a process that goes on after four where a file may be no longer, or dies.

    All are children of one process, which has imported what they need.
    """
    root, names = tmp_path_factory.mktemp("ended"), [*map(str, MOST_BYTES), *POINTS]
    command = [sys.executable, "-W", "ignore:.*fork:RuntimeWarning", "-c", PROCESSES, str(root), str(LIMIT_S), *names]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], text=True, start_new_session=True, **pipes
    ) as process:
        try:
            out, err = process.communicate(timeout=(1 + len(names)) * LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with the child that it waits for
            raise
    assert process.returncode == 0, err
    told = map(json.loads, out.splitlines())
    return {name: Ended(*one, root / name) for name, one in zip(names, told, strict=True)}


@pytest.mark.parametrize("most_bytes", MOST_BYTES)
def test_a_file_that_cannot_be_written_to_its_end_is_told(ended, most_bytes):
    """Really not: of all experts, of one type only, and of the manifest."""
    done = ended[str(most_bytes)]
    assert done.code == 0
    assert "_SignalingThread" not in done.err  # Orbax's log of the error that it raises as well
    assert "File too large" in done.out
    clean_up_saves(done.checkpoints)  # threads of Orbax may have written on after it had failed
    left = sorted(path.name for path in done.checkpoints.iterdir())
    assert left == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("point", POINTS)
def test_a_process_that_is_killed_in_a_save_costs_only_that(small_run, tmp_path, ended, point):
    done = ended[point]
    assert done.code == -signal.SIGKILL, done.err
    (half,) = done.checkpoints.glob(".step-*.tmp")
    assert list(half.rglob("expert.*/0.0.0"))
    assert (half / "manifest.json").exists() == (point in ("before its name", "between two names"))
    unbroken = small_run(size=200)
    unbroken.directory = tmp_path / "unbroken"
    unbroken.run(4)

    run = small_run(size=200)
    run.directory = done.checkpoints
    clean_up_saves(run.directory)
    assert not half.exists()
    plan = run.lose_all()
    assert (plan.step, plan.passed_over) == (4, ())
    jax.tree.map(np.testing.assert_array_equal, run.state, unbroken.saved[4])
    run.records += [None] * 4
    run.run(6)
    assert run.lose_all().step == 6
