"""Access to a run by others than the user who started it."""

import fcntl
import os

import pytest

from swift.elastic.state.run_files import RunFiles
from tests.elastic.runs import launched, left_behind, members, scratch, stop, wait_for_steps, write_config


def test_only_its_owner_may_enter_what_processes_share(tmp_path):
    before = os.umask(0)
    try:
        with RunFiles.of("", {}, tmp_path) as alone, RunFiles.of("", {}, tmp_path, shared=tmp_path) as shared:
            for one in (alone, shared):
                assert {path.stat().st_mode & 0o777 for path in (one.path, one.memory)} == {0o700}
                assert one.sockets.parent.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_the_system_clears_none_of_it_of_old_files_while_it_is_in_use(tmp_path):
    """``systemd-tmpfiles`` takes a shared lock on each directory, and passes over those where it cannot."""
    with RunFiles.of("", {}, tmp_path) as scratch:
        kept = [scratch.path, scratch.memory, scratch.sockets.parent]
        assert [is_passed_over(directory) for directory in kept] == [True] * 3
    left = tmp_path / "left"
    left.mkdir()
    assert not is_passed_over(left)


def is_passed_over(directory):
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.mark.slow
def test_a_run_on_one_node_listens_on_the_loopback_device_alone(tmp_path, listening_at):
    config = write_config(tmp_path, (2, 1, 1), 5000, CheckpointConfig__every=20)
    with launched(config) as process:
        wait_for_steps(process, config, 40)
        pids = set(members(config).values())
        assert len(pids) == 2
        assert [listening_at(pid) for pid in pids] == [{"127.0.0.1"}] * 2
        for pid, kind in left_behind(config).items():  # the compile service pretends to be a group
            assert pid in pids or listening_at(pid) <= ({"127.0.0.1"} if kind == "compile-service" else set()), kind
        shared = scratch(process.pid)
        assert len(shared) == 3
        assert {path.stat().st_mode & 0o777 for path in shared} == {0o700}
        assert any(path.is_socket() for directory in shared for path in directory.glob("sockets/*"))
        stop(process, config)
