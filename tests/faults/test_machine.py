"""What the campaign takes away from a run: room for files, tasks, and directories."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import faults
import pytest
from faults import blows_machine
from faults.campaign import KINDS
from faults.kinds import Aftermath
from faults.tasks import TaskLimit, can_limit_tasks
from faults.tmpfs import Tmpfs


@pytest.fixture
def filesystem(tmp_path):
    """A mounted one, in its mount point."""
    made = Tmpfs(tmp_path / "mounted")
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a file system can be mounted by root only")
    yield made, tmp_path / "mounted"
    made.remove()


@pytest.mark.parametrize("left", [0, 3])
def test_a_file_system_has_so_many_inodes_left(filesystem, left):
    made, directory = filesystem
    (directory / "before").touch()
    made.leave(num_inodes=left)
    for number in range(left):
        (directory / f"{number}").touch()
    with pytest.raises(OSError, match="No space left"):
        (directory / "one more").touch()
    made.empty()
    (directory / "one more").touch()


def test_a_file_system_has_so_many_bytes_left(filesystem):
    made, directory = filesystem
    (directory / "before").write_bytes(bytes(100_000))
    made.leave(num_bytes=8192)
    (directory / "after").write_bytes(bytes(8192))
    with pytest.raises(OSError, match="No space left"):
        (directory / "one more").write_bytes(b"1")
    made.empty()
    (directory / "one more").write_bytes(b"1")


@pytest.mark.skipif(not can_limit_tasks(), reason="control groups cannot be made here")
@pytest.mark.parametrize("left", [0, 2])
def test_a_group_can_start_so_many_tasks_more(left):
    """A process that says for each line that it reads how many threads it could start."""
    script = """
from pathlib import Path
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from faults.tasks import TaskLimit
limit = TaskLimit()
limit._group = Path(sys.argv[2])
limit.join()
for line in sys.stdin:
    started = 0
    try:
        while started < 5:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            started += 1
    except RuntimeError:
        pass
    print(started, flush=True)
"""
    limit = TaskLimit()
    limit.make()
    words = [sys.executable, "-c", script, str(Path(faults.__file__).parents[1]), str(limit._group)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def started():
            process.stdin.write("\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        assert started() == 5
        limit.leave(left)
        assert started() == left
        limit.lift()
        assert started() == 5
        process.kill()
    limit.remove()
    assert not limit._group.exists()


@pytest.mark.parametrize("kind", ["remove-tmp", "remove-shm", "remove-both"])
def test_the_directories_of_a_run_are_removed_and_have_to_be_made_again(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(blows_machine, "_MEMORY", tmp_path / "shm")
    tmp, memory, of_another = tmp_path / "tmp" / "swift-1-x", tmp_path / "shm" / "swift-1-x", tmp_path / "shm/swift-2-x"
    for directory in (tmp, memory, of_another):
        directory.mkdir(parents=True)
        (directory / "file").touch()
    node = SimpleNamespace(pid=1, poll=lambda: None)
    after, run = Aftermath(), SimpleNamespace(tmp=tmp.parent, life=SimpleNamespace(nodes=[node]))
    KINDS[kind].strike(run, KINDS[kind].draw(None, run), after)
    assert tmp.parent.exists() is (kind == "remove-shm")
    assert memory.exists() is (kind == "remove-tmp")
    assert of_another.exists()
    ((are_back, _),) = after.awaited
    for directory in (tmp, memory):
        assert are_back() is (tmp.exists() and memory.exists())
        directory.mkdir(parents=True, exist_ok=True)
    assert are_back()
    assert after.may_lose_states
    assert not after.codes  # the run is to go on
