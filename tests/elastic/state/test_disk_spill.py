"""A state that does not fit in memory is kept on a disk, and is the same to whoever looks for it."""

import errno
import os
import shutil
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from swift.elastic.membership.messages import Process, StateId
from swift.elastic.state import store as disk_spill
from swift.elastic.state.run_files import node_memory
from swift.elastic.state.store import SharedMemoryStore
from swift.elastic.worker.generation import RetainedStates

WHO, OTHER = Process((0, 0)), Process((0, 0), 1)
STATE = {"weights": np.arange(300_000, dtype=np.float32)}
OLD, NEW, NEWEST = StateId(1, 1), StateId(1, 2), StateId(1, 3)


@pytest.fixture
def small(tmp_path):
    """A directory in a memory of 3 MB: two of these states fit."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount")
    place = tmp_path / "shm"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], check=True)
    try:
        with node_memory(place) as memory:
            yield memory.path
    finally:
        subprocess.run(["umount", place], check=True)


def spilled(memory):
    return [path for path in (memory / disk_spill.SPILL).iterdir() if path.is_file()]


def same(keep, stamp):
    np.testing.assert_array_equal(keep.load(stamp, STATE)["weights"], STATE["weights"])
    return True


def test_states_that_do_not_fit_are_found_shared_and_forgotten_as_others(small, capsys):
    keep, taker = SharedMemoryStore(small / "states", WHO), SharedMemoryStore(small / "copies", WHO)
    for stamp in (OLD, NEW, NEWEST):
        keep.save(stamp, STATE)
    assert "is full: the state after iteration 3 is on a disk" in capsys.readouterr().err
    assert len(spilled(small)) == 1
    assert SharedMemoryStore(small / "states", WHO).stamps() == {OLD, NEW, NEWEST}  # of the next life
    assert all(same(keep, stamp) for stamp in (OLD, NEW, NEWEST))
    keep.hand_over(taker)
    keep.retain_only()
    assert keep.stamps() == frozenset()
    assert same(taker, NEWEST)
    taker.save(NEWEST, STATE)  # in the place of what is on the disk
    assert same(taker, NEWEST)
    taker.retain_only(frozenset({NEWEST}))
    assert len(spilled(small)) == 1
    taker.retain_only()
    assert spilled(small) == []
    keep.save(OLD, STATE)
    assert spilled(small) == []


def test_a_state_that_fits_nowhere_leaves_nothing_and_the_others_stay(small, monkeypatch):
    keep = SharedMemoryStore(small / "states", WHO)
    keep.save(OLD, STATE)
    keep.save(NEW, STATE)
    with full(monkeypatch), pytest.raises(OSError, match="No space"):
        keep.save(NEWEST, STATE)
    assert keep.stamps() == {OLD, NEW}
    assert spilled(small) == []
    assert same(keep, NEW)


@contextmanager
def full(monkeypatch):
    """A disk without room."""

    def refuse():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(disk_spill, "uuid4", refuse)
        yield


class Full:
    """A keep in which one state is, and that has room for those of some iterations."""

    def __init__(self, *room):
        self.room, self.kept = room, {OLD}

    def save(self, stamp, *_):
        if stamp not in self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.kept.add(stamp)

    def records(self):
        return {}

    def retain_only(self, stamps):
        self.kept &= stamps


@pytest.mark.parametrize(
    ("room", "kept"), [((), {OLD}), ((NEW,), {OLD, NEW}), ((NEWEST,), {OLD, NEWEST}), ((NEW, NEWEST), {NEW, NEWEST})]
)
def test_a_process_without_room_goes_on_as_one_without_the_state(room, kept, capsys):
    """States that it has kept before stay: the others may have nothing newer."""
    store = Full(*room)
    states = RetainedStates(store)
    states.on_devices |= {NEW: {}, NEWEST: {}}
    states.keep()
    assert store.kept == kept
    assert states._own_stamps == kept - {OLD}
    said = capsys.readouterr().err
    assert all(f"the state after iteration {stamp.step} is not kept" in said for stamp in {NEW, NEWEST} - kept)


def test_only_a_link_of_ones_own_leads_to_a_disk(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    memory = tmp_path / "run" / "states" / "0-0-0"
    memory.mkdir(parents=True)
    path, temporary = memory / "state-1-1", memory / ".state-1-1.tmp"
    (tmp_path / disk_spill.SPILL).mkdir()  # as somebody else may make it in a directory that is everybody's
    seen = []
    monkeypatch.setattr(disk_spill, "uuid4", lambda: seen.append(path) or SimpleNamespace(hex="name"))
    with pytest.raises(OSError, match="No space left"):
        disk_spill.write_or_spill(path, temporary, full)
    assert seen == []
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / disk_spill.SPILL).symlink_to(tmp_path / "disk")
    with pytest.raises(OSError, match="No space left"):
        disk_spill.write_or_spill(path, temporary, full)
    assert seen == [path]
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(OSError, match="No space left"):
        disk_spill.write_or_spill(path, temporary, full)
    assert seen == [path]
