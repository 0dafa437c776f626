"""A disk that is full during a run: a file system in memory that really has no room."""

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from swift.checkpoint.manifest import checkpoint_steps
from swift.runlog.reading import read_run
from tests.elastic.runs import SWIFT, environment, left_behind, losses, write_config

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")]

NUM_STEPS = 30


@contextmanager
def disk(path, megabytes):
    """A file system of its own; yields what gives it more room."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", path], check=False)
    if mounted.returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield lambda more: subprocess.run(["mount", "-o", f"remount,size={more}m", path], check=True)
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def start(config, command, *arguments):
    """A run to its end: (exit code, what was said)."""
    own = ["--processes", "1"] if command == "launch" else []
    line = [*SWIFT, command, *own, str(config), "--run-dir", str(config.parent / "disk/run"), *arguments]
    kept = {"TMPDIR": str(config.parent / "elsewhere")}
    done = subprocess.run(
        line, capture_output=True, text=True, env=environment(config) | kept, timeout=300, check=False
    )
    assert left_behind(config) == {}
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["train", "launch"])
def test_a_run_on_a_full_disk_ends_with_code_3_and_is_resumed_without_a_loss(tmp_path, command):
    """One checkpoint fits there, and no second one."""
    config = write_config(tmp_path, (1, 1, 2), NUM_STEPS, CheckpointConfig__num_kept=1)
    config.write_text(config.read_text().replace("CheckpointConfig.every = 0", "CheckpointConfig.every = 20"))
    (tmp_path / "elsewhere").mkdir()
    with disk(tmp_path / "disk", 6) as grow:
        run_dir = tmp_path / "disk/run"
        code, said = start(config, command)
        assert code == 3, said
        assert "the checkpoint of iteration 30 was not saved: " in said
        assert "trying again in 2 s" in said
        assert "the state after iteration 30 is kept in" in said
        assert checkpoint_steps(run_dir / "checkpoints") == [20]
        assert read_run(run_dir).summary is None
        (kept,) = Path(tmp_path / "elsewhere").glob("kept-by-swift-*")

        code, said = start(config, command, "--resume")
        assert (code, kept.is_dir()) == (3, True), said
        assert "cannot be brought to" in said

        grow(200)
        code, said = start(config, command, "--resume")
        assert (code, kept.exists()) == (0, False), said
        assert f"the checkpoint of iteration {NUM_STEPS} was kept in {kept} and is now in" in said
        assert read_run(run_dir).summary is not None
        assert len(losses(run_dir)) == NUM_STEPS
        assert shutil.disk_usage(run_dir).free > 0
