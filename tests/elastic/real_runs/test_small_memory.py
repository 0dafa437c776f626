"""Little shared memory, as in a container: a run loses nothing, and keeps its states on a disk."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.elastic.runs import (
    NO_CHECKPOINTS,
    SWIFT,
    environment,
    go_on,
    launched,
    members,
    wait_for,
    wait_for_steps,
    write_config,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount"),
]


def memory_of(size):
    """Prefix of a command that is to have so much shared memory."""
    script = 'mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"'
    return "unshare", "--mount", "sh", "-c", script, size


@pytest.mark.parametrize("size", ["4m", "400m"])
def test_survivors_keep_their_states_where_shared_memory_is_small_or_runs_full(tmp_path, size):
    config = write_config(tmp_path, (2, 1, 1), 5000, CheckpointConfig__every=20)
    with launched(config, inside=memory_of(size)) as process:
        line = wait_for(process, "the states of 2 processes take up to")
        assert ("not in /dev/shm (4.2 MB free): that is slower" in line) == (size == "4m"), line
        wait_for_steps(process, config, 20)
        with suppress(OSError), Path(f"/proc/{process.pid}/root/dev/shm/of-another").open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
        os.kill(members(config)["1:0"], signal.SIGKILL)
        wait_for(process, "resumed after iteration")
        logs = config.parent / "run" / "logs"
        assert ("is on a disk" in (logs / "0-0.log").read_text()) == (size == "400m")
        go_on(process, config, *NO_CHECKPOINTS)


def test_where_there_is_no_room_at_all_nothing_begins(tmp_path):
    config, place = write_config(tmp_path, (2, 1, 1), 10), tmp_path / "place"
    place.mkdir()
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
    command = [*SWIFT, "launch", "--processes", "2", str(config), "--run-dir", str(place / "run")]
    found = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, str(place), *command],
        env=environment(config) | {"TMPDIR": str(place)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.returncode == 2, found.stderr
    (line,) = found.stderr.splitlines()
    assert "no directory has that much free: 1.0 MB in /dev/shm, 1.0 MB in " in line
