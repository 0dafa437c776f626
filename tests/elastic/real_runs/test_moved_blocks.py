"""Real processes that take over blocks of a lost one, and give them back: killed in the midst of that, too."""

import os
import signal
import time

import numpy as np
import pytest

from swift.runlog import read_run
from tests.elastic import runs
from tests.elastic.runs import (
    NO_CHECKPOINTS,
    go_on,
    launched,
    losses,
    members,
    newest_checkpoint,
    stop,
    wait_for,
    wait_for_steps,
    whole,
    write_config,
)

pytestmark = pytest.mark.slow
SMALL = {"ModelConfig__num_layers": 2, "ModelConfig__model_dim": 16, "ModelConfig__sequence_length": 16}
MOVING = {"Experiment__adapt": "recut", "Experiment__num_microbatches": 4}
MOVED = "blocks moved among the survivors"

HELD = """
import os
import signal
import sys
from pathlib import Path

back, moment, died = (Path({directory!r}) / name for name in ("back", "moment", "died"))

if "launch" in sys.orig_argv:
    from swift.elastic.coordinator.fault_injection import FaultInjection

    FaultInjection.keeps_down = lambda faults, process, finished: str(process) == "0:1" and not back.exists()

if "member" in sys.orig_argv:
    from swift.elastic.worker.worker import WorkerProcess
    from swift.elastic.worker.generation_run import GenerationWorkers

    def die(worker, when, cut):
        who = f"{{worker.worker[0]}}:{{worker.worker[1]}}"
        if cut and moment.exists() and moment.read_text() == f"{{who}} {{when}}":
            moment.rename(died)
            os.kill(os.getpid(), signal.SIGKILL)

    def around(of, name, cut_of):
        inner = getattr(of, name)

        def method(self, *arguments):
            process, cut = cut_of(self, *arguments)
            die(process, f"before {{name}}", cut)
            found = inner(self, *arguments)
            die(process, f"after {{name}}", cut)
            return found

        setattr(of, name, method)

    around(WorkerProcess, "_form_group", lambda self, command, *_: (self._worker_spec.process, command.form.cut))
    around(WorkerProcess, "_restore_state", lambda self, steps, start, cut: (self._worker_spec.process, cut))
    around(
        GenerationWorkers,
        "leave",
        lambda self, *_: (self.generation.process, self.generation.command.form.cut),
    )
"""
"""Process 0:1 stays down until ``back`` is there; a member dies at the ``moment`` of a generation that moves blocks."""


@pytest.fixture
def held(tmp_path, monkeypatch):
    """The directory of the marks; all Python processes from now on heed them."""
    (tmp_path / "sitecustomize.py").write_text(HELD.format(directory=str(tmp_path)))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(runs, "PATIENCE_S", 900)  # three configurations are compiled, two of them in the background
    return tmp_path


def lose(process, config):
    """Kills 0:1, which stays away."""
    os.kill(members(config)["0:1"], signal.SIGKILL)
    wait_for(process, "process 0:1 died")


def events(directory, name):
    return [event for event in read_run(directory / "run").events if event["event"] == name]


@pytest.mark.parametrize(("ranks", "lost_then"), [(1, ()), (1, ("0:0", "1:0")), (2, ())])
def test_survivors_take_over_blocks_and_give_them_back(held, ranks, lost_then):
    """A process for each worker, or one for each expert rank; a checkpoint of moved blocks is one like any other."""
    settings = SMALL | MOVING | {"CheckpointConfig__every": 20}
    config = write_config(held, (2, 2, ranks), 10**6, **settings)
    with launched(config, processes=4 * ranks) as process:
        wait_for(process, f"running with {4 * ranks} processes")
        wait_for_steps(process, config, 5)
        lose(process, config)
        assert "stages of 2, 0; 1, 1 layers" in wait_for(process, MOVED)
        saved = newest_checkpoint(config) or 0
        while (newest_checkpoint(config) or 0) <= saved:
            assert process.poll() is None
            time.sleep(0.1)
        for who in lost_then:
            os.kill(members(config)[who], signal.SIGKILL)
        if lost_then:
            wait_for(process, "all resume from the checkpoint of iteration")
        (held / "back").touch()
        wait_for(process, f"with {4 * ranks} processes")
        go_on(process, config, *NO_CHECKPOINTS)
    moves = events(held, "move")
    assert [move["cuts"] for move in moves] == len(moves) * [[[2, 0], [1, 1]]]
    assert len(events(held, "restore")) == bool(lost_then)


MOMENTS = [
    f"{who} {when}"
    for when in ("before _form_group", "after _form_group", "after _restore_state", "before leave", "after leave")
    for who in ("1:1", "0:0")
]


def test_who_gives_or_takes_blocks_is_killed_in_the_midst_of_it(held):
    """Only the worker that gives blocks is left of the last stage: it finds its state again, and no step is lost."""
    config = write_config(held, (2, 2, 1), 10**6, **SMALL, **MOVING)
    with launched(config, processes=4) as process:
        wait_for(process, "running with 4 processes")
        wait_for_steps(process, config, 5)
        for when in MOMENTS:
            (held / "moment").write_text(when)
            lose(process, config)
            wait_for(process, f"process {when.split()[0]} died")
            (held / "died").unlink()
            wait_for(process, "resumed after")
            (held / "back").touch()
            wait_for(process, "with 4 processes")
            (held / "back").unlink()
        stop(process, config)
    found = losses(held / "run")
    np.testing.assert_allclose(found, whole(config, "--stop-at", len(found)), rtol=1e-8)
    assert events(held, "restore") == []
