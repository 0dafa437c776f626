"""Files that the processes of a run share: what is left of a run that was killed whole goes with the next one."""

import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from swift.elastic.membership.messages import Process, StateId
from swift.elastic.state.run_files import RunFiles, remove_leftovers
from swift.elastic.state.store import SharedMemoryStore

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


def is_free(path):
    """Whether another process may lock a directory."""
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", code, path], stderr=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize("which", ["memory", "disk", "temporary", "all"])
def test_directories_that_somebody_has_removed_are_made_again(tmp_path, monkeypatch, which):
    disk, memory, corpus = tmp_path / "disk", tmp_path / "memory", tmp_path / "corpus"
    for directory in (disk, memory, corpus):
        directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    like = {"w": np.arange(3.0)}
    with RunFiles.of("a configuration", {"place": 3}, memory, corpus) as scratch:
        store = SharedMemoryStore(scratch.states, Process((0, 0)))
        store.save(StateId(1, 1), like)
        assert not scratch.mend()
        assert store.stamps() == {StateId(1, 1)}
        for path in {"memory": [memory], "disk": [disk], "temporary": [scratch.path], "all": [memory, disk]}[which]:
            shutil.rmtree(path)
        assert scratch.mend()
        assert not scratch.mend()
        assert scratch.config.read_text() == "a configuration"
        assert scratch.data() == {"place": 3}
        assert scratch.corpus == corpus
        store.save(StateId(1, 2), like)
        SharedMemoryStore(scratch.snapshots, Process((0, 0))).save(StateId(1, 2), like)
        (scratch.sockets / "one").touch()
        (scratch.programs / "one").touch()
        for path in (scratch.path, scratch.memory, scratch.sockets.resolve().parent):
            assert not is_free(path), "the system would clear it of old files"
        assert {path.stat().st_mode & 0o077 for path in (scratch.path, scratch.memory)} == {0}
        remove_leftovers(memory)  # of another run: this one still holds its own
        assert StateId(1, 2) in store.stamps()
    assert [*disk.iterdir(), *memory.iterdir()] == []
