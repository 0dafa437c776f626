"""Isolation of a campaign: separate mounts, shared memory, network names and process ids."""

import ctypes
import os
import signal
import subprocess
from contextlib import suppress

_NEW_MOUNTS, _NEW_PROCESSES = 0x00020000, 0x20000000
_MOUNTS = (
    ("mount", "--make-rprivate", "/"),
    ("mount", "-t", "proc", "proc", "/proc"),
    ("mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", "/dev/shm"),
)


def isolated() -> bool:
    """Continues in a process with its own namespaces; requires root.

    Its mounts and processes vanish with it, however it ends. The original process waits for it, forwards signals,
    and exits like it.

    Returns:
        True in the isolated process; False if isolation is impossible and nothing has changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not _is_allowed() or libc.unshare(_NEW_MOUNTS | _NEW_PROCESSES) != 0:
        return False
    child = os.fork()
    if child:
        _follow(child)
    os.setsid()  # signals come only from the original process
    libc.prctl(1, signal.SIGKILL)
    for words in _MOUNTS:
        subprocess.run(words, check=True)
    return True


def _is_allowed() -> bool:
    """Tries isolation in a child process."""
    script = " && ".join(" ".join(words) for words in _MOUNTS)
    words = ["unshare", "-m", "-p", "--fork", "sh", "-c", script]
    with suppress(OSError):
        return os.geteuid() == 0 and subprocess.run(words, capture_output=True, check=False).returncode == 0
    return False


def _follow(child: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
