"""A member that was started ahead: it waits for its first command with everything imported and no device."""

import io
import os
import subprocess
import sys

import pytest

from swift.config.stored import config_text
from swift.elastic.state.run_files import RunFiles
from swift.elastic.transport.messages import WORKER_COMMANDS, Begin, Halt, Stop
from swift.elastic.worker.channel import wait_to_begin


class Exited(BaseException):
    """Stands for the end of the process."""


def gone():
    raise Exited("gone")


def test_a_member_begins_where_the_run_is_and_leaves_what_follows_to_its_listener():
    lines = WORKER_COMMANDS.line(Begin(40)), WORKER_COMMANDS.line(Halt(1, 2))
    source = io.StringIO("".join(lines))
    assert wait_to_begin(source, gone) == Begin(40)
    assert list(source) == [lines[1]]


@pytest.mark.parametrize("said", ["", WORKER_COMMANDS.line(Begin(40))[:-1]])
def test_a_member_whose_supervisor_is_gone_before_it_has_begun_ends(said):
    with pytest.raises(Exited, match="gone"):
        wait_to_begin(io.StringIO(said), gone)


def test_a_member_that_is_stopped_before_it_has_begun_ends(monkeypatch):
    def leave(code):
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Exited) as ended:
        wait_to_begin(io.StringIO(WORKER_COMMANDS.line(Stop())), gone)
    assert ended.value.args == (0,)


HELD = """
import os, sys
from argparse import Namespace
from pathlib import Path
from jax._src import xla_bridge
from swift.cli import child_entry as processes

def wait_to_begin(*_):
    print(xla_bridge.backends_are_initialized())
    sys.stdout.flush()
    os._exit(0)

processes.wait_to_begin = wait_to_begin
place = {"pipeline": 0, "stage": 0, "rank": 0, "platform": "gpu", "device": [0], "forming": 150.0}
directories = {"scratch": Path(sys.argv[1]), "memory": Path(sys.argv[1])}
processes.worker(Namespace(**directories, by_rank=False, memory_checkpoint_every=1, **place))
"""


def test_a_member_that_waits_has_initialised_no_backend(tmp_path, two_ranks):
    """A GPU or TPU belongs to the first process that initialises it."""
    files = RunFiles(tmp_path, tmp_path)
    files.config.write_text(config_text(two_ranks))
    command = [sys.executable, "-c", HELD, str(tmp_path)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "False\n"
