"""File writes that end after the save they belong to has failed: the user hears of the failure, and only once."""

import subprocess
import sys

import pytest

SAVES = """
import resource, sys, time
from pathlib import Path
import numpy as np
from swift.checkpoint.array_files import write_arrays
from swift.cli import generate as models
from swift.cli.main import main

def save(options):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        write_arrays(Path(sys.argv[1]) / "arrays", {f"a{i}": np.zeros(100_000 if i % 2 else 9) for i in range(60)})
    except OSError as error:
        print(error, flush=True)
    time.sleep(1)  # for the other 59, which continue

if sys.argv[2] == "in a command":
    models.generate = save
    sys.exit(main(["generate", "a-run"]))
save(None)
"""


def said_after_a_failed_save(directory, where):
    """Returns the text on stderr of a process whose save fails; on stdout it prints one line."""
    line = [sys.executable, "-c", SAVES, str(directory), where]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[Errno 27] File too large\n"
    return done.stderr


def test_a_failed_save_prints_one_line_in_a_command(tmp_path):
    assert "Event loop is closed" not in said_after_a_failed_save(tmp_path, "in a command")


def test_a_failed_save_prints_tracebacks_outside(tmp_path):
    """Otherwise the work-around has nothing to work around any more; it depends on how late the writes are."""
    directories = [tmp_path / str(number) for number in range(6)]
    for directory in directories:
        directory.mkdir()
    assert any("Event loop is closed" in said_after_a_failed_save(directory, "outside") for directory in directories)


TASKS = """
import asyncio, sys
from swift.cli import generate as models
from swift.cli.main import main

def leave(options):
    written = {}
    exec(compile("async def write(): raise ValueError('a read-only file system')", sys.argv[2], "exec"), written)

    async def save():
        task = asyncio.create_task(written["write"]())
        await asyncio.sleep(0)

    asyncio.run(save())

models.generate = leave
sys.exit(main(["generate", "a-run"]) if sys.argv[1] == "in a command" else leave(None))
"""


def said_of_tasks_that_nobody_awaits(where, file):
    done = subprocess.run(
        [sys.executable, "-c", TASKS, where, file], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stderr


@pytest.mark.long
def test_writes_that_nobody_awaits_are_not_told_in_a_command_and_other_tasks_are():
    assert said_of_tasks_that_nobody_awaits("in a command", "packages/orbax/handlers.py") == ""
    assert "never retrieved" in said_of_tasks_that_nobody_awaits("in a command", "packages/another.py")
    assert "never retrieved" in said_of_tasks_that_nobody_awaits("outside", "packages/orbax/handlers.py")


@pytest.mark.long
def test_what_a_save_that_can_start_no_thread_leaves_is_not_told_in_a_command():
    script = TASKS.replace("asyncio.run(save())", "save()")
    for where, is_told in (("in a command", False), ("outside", True)):
        line = [sys.executable, "-c", script, where, "packages/orbax/handlers.py"]
        said = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True).stderr
        assert ("was never awaited" in said) is is_told
