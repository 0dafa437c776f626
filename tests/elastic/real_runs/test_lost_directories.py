"""What becomes of a run's temporary directories costs it no more than states that could be kept there."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.elastic.runs import (
    EVERY,
    NO_CHECKPOINTS,
    go_on,
    launched,
    members,
    wait_for,
    wait_for_checkpoint,
    wait_for_steps,
    write_config,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def temporary(monkeypatch):
    """A TMPDIR for one test, of a short path."""
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


@pytest.mark.parametrize("which", ["memory", "TMPDIR", "both"])
def test_directories_are_removed_and_a_process_dies(tmp_path, temporary, which):
    config = write_config(tmp_path, (2, 1, 1), 10**6, **EVERY)
    with launched(config) as process:
        wait_for_checkpoint(process, config)
        if which != "TMPDIR":
            for path in Path("/dev/shm").glob(f"swift-{process.pid}-*"):
                shutil.rmtree(path, ignore_errors=True)
        if which != "memory":
            shutil.rmtree(temporary, ignore_errors=True)
        wait_for(process, "they are made again")
        steps = 40
        wait_for_steps(process, config, steps)
        os.kill(members(config)["1:0"], signal.SIGKILL)
        wait_for(process, "rejoined")
        go_on(process, config, *NO_CHECKPOINTS)


def test_a_disk_without_inodes_and_a_process_that_dies(tmp_path, temporary):
    options = ["-t", "tmpfs", "-o", "size=200M,nr_inodes=400", "tmpfs", str(temporary)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        config = write_config(tmp_path, (2, 1, 1), 10**6, **EVERY)
        with launched(config, "--prepare", "none") as process:
            wait_for_checkpoint(process, config)
            number = 0
            try:
                while True:
                    (temporary / f"x{number}").touch()
                    number += 1
            except OSError:
                time.sleep(1)
            os.kill(members(config)["1:0"], signal.SIGKILL)
            wait_for(process, "resumed after iteration")
            go_on(process, config, *NO_CHECKPOINTS)
    finally:
        subprocess.run(["umount", "--lazy", str(temporary)], check=False)
