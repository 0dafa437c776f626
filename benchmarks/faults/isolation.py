"""A part of the system for the campaign alone: its own mounts, shared memory, network names and process numbers."""

import ctypes
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

_NEW_MOUNTS, _NEW_PROCESSES = 0x00020000, 0x20000000
_SHARED_MEMORY = Path("/dev/shm")
_MOUNTS = (
    ("mount", "--make-rprivate", "/"),
    ("mount", "-t", "proc", "proc", "/proc"),
    ("mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", str(_SHARED_MEMORY)),
)


def isolated() -> bool:
    """Goes on in a process that has a part of the system for itself; only root may.

    Whatever it mounts or starts is gone with it, however it ends. The process before waits for it, passes signals on,
    and ends as it does.

    Returns:
        Whether that is so; else nothing has changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not _is_allowed() or libc.unshare(_NEW_MOUNTS | _NEW_PROCESSES) != 0:
        return False
    child = os.fork()
    if child:
        _follow(child)
    os.setsid()  # signals come from the process before alone
    libc.prctl(1, signal.SIGKILL)
    for words in _MOUNTS:
        subprocess.run(words, check=True)
    return True


def _is_allowed() -> bool:
    """Whether a process that tries it and ends can do all that is needed."""
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


def leave_shared_memory(num_bytes: int) -> None:
    """Changes the size of the shared memory so that so many bytes are free, also under processes that use it."""
    now = os.statvfs(_SHARED_MEMORY)
    used = (now.f_blocks - now.f_bfree) * now.f_frsize
    subprocess.run(["mount", "-o", f"remount,size={used + num_bytes}", str(_SHARED_MEMORY)], check=True)
