"""Cores, memory, shared memory and open files that this machine allows."""

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from swift.machine_cores import cores_allowed, cores_limit
from swift.machine_memory import control_groups, size_text
from swift.tools.doctor.finding import Finding

_LEAST_SHARED = 1 << 30
_LEAST_FILES = 1024


def examine_machine(root: Path = Path("/")) -> Iterator[Finding]:
    """Looks at what the kernel, and the container that this may be, leave to a run.

    Args:
        root: root of the file system.
    """
    cores, quota = cores_allowed(), cores_limit(root)
    if quota is not None and quota < cores:
        yield Finding("cores", "note", f"{cores}, of which this container may use {quota:.1f} at a time")
    else:
        yield Finding("cores", "ok", f"{cores}")
    total = _memory(root / "proc/meminfo")
    limit = min((group.size for group in control_groups(root)), default=total)
    limited, text = limit < total, size_text(min(total, limit))
    yield Finding("memory", "ok", f"{text}, this container's limit" if limited else text)
    yield _shared_memory(root / "dev/shm")
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _LEAST_FILES:
        text = f"{files} open files allowed; {_LEAST_FILES} are enough for dozens of processes: ulimit -n {most}"
        yield Finding("files", "note", text)
    else:
        yield Finding("files", "ok", f"{files} open files allowed")


def _shared_memory(path: Path) -> Finding:
    elsewhere = f"states of `launch` would be in {tempfile.gettempdir()}, which is slower"
    if not path.is_dir():
        return Finding("shm", "note", f"there is no {path}: {elsewhere}")
    found = os.statvfs(path)
    total, free = (found.f_frsize * blocks for blocks in (found.f_blocks, found.f_bavail))
    text = f"{size_text(free)} of {size_text(total)} free in {path}"
    if free >= _LEAST_SHARED:
        return Finding("shm", "ok", text)
    remedy = "a container gets more with --shm-size, a pod with a volume in memory"
    return Finding("shm", "note", f"{text}; where three states of all processes do not fit, {elsewhere}: {remedy}")


def _memory(path: Path) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * 1024
    return 0
