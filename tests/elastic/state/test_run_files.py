"""Files that the processes of a run share: what is left of a run that was killed whole goes with the next one."""

import signal
import subprocess
import sys

from swift.elastic.state.run_files import RunFiles, remove_leftovers

KILLED = """
import os, pathlib, signal, sys, tempfile
from swift.elastic.state.run_files import RunFiles
tempfile.tempdir = sys.argv[1]
with RunFiles.of("", {}, pathlib.Path(sys.argv[2])) as scratch:
    (scratch.programs / "step").write_bytes(b"compiled")
    (scratch.sockets / "0").write_bytes(b"")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_a_run_that_was_killed_with_all_its_processes(tmp_path, monkeypatch):
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    for directory in (disk, memory):
        directory.mkdir()
    killed = subprocess.run([sys.executable, "-c", KILLED, disk, memory], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len([*disk.iterdir()]) == 2
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    with RunFiles.of("", {}, memory) as scratch:  # a live run keeps what it has
        remove_leftovers(memory)
        assert scratch.programs.is_dir()
        assert scratch.sockets.is_dir()
        assert len([*disk.iterdir()]) == 2
    assert [*disk.iterdir(), *memory.iterdir()] == []
