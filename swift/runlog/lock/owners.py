"""Identities of this machine's processes as owners of run directories."""

import os
import secrets
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from swift.runlog.lock.lease import Owner, ProcessTable


def this_process() -> Owner:
    """Describes this process as an owner from now on."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return Owner(_here(), os.getpid(), _started("self"), since, secrets.token_hex(16))


def process_is_there(owner: Owner) -> bool | None:
    """Returns whether an owner is a process of this machine that still runs; a zombie does not."""
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    started = _started(str(owner.pid))
    return True if started is None else started == owner.started


def _here() -> ProcessTable:
    boot, processes = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    return ProcessTable(socket.gethostname(), boot, processes)


def _started(pid: str) -> int | None:
    """Start of a process in ticks since the machine booted; -1 if it has ended, None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # a process's name may have spaces and brackets
    return -1 if state in "ZX" else int(fields[18])
