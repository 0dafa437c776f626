"""Cores that a process may use on its machine: those it may run on, within the limit of its container."""

import os
from pathlib import Path


def cores_allowed() -> int:
    """Counts the cores that the threads of this process may run on."""
    return len(os.sched_getaffinity(0))


def cores_limit(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the container's control group may use; None: there is no limit.

    Args:
        root: root of the file system.
    """
    path = root / "sys/fs/cgroup/cpu.max"
    words = path.read_text().split() if path.is_file() else []
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None
