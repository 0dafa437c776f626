"""CPU cores that a process may use: its affinity, and its container's limit."""

import os
from pathlib import Path


def cores_allowed() -> int:
    """Counts the cores that this process's threads may run on (CPU affinity)."""
    return len(os.sched_getaffinity(0))


def cores_limit(root: Path = Path("/")) -> float | None:
    """Returns how many cores' worth of CPU time the container's control group may use; None: no limit.

    Args:
        root: root of the file system.
    """
    path = root / "sys/fs/cgroup/cpu.max"
    words = path.read_text().split() if path.is_file() else []
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None
