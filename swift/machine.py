"""CPU cores and memory that this process may use, given the machine and the limits of its control groups."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NO_LIMIT = 1 << 60
"""Control group limits of at least this size mean "no limit": version 1 reports nearly 2**63."""
_GROUP = "the control group of this process"


class Room(NamedTuple):
    """The memory that a machine, a control group or a set of devices has.

    Attributes:
        left: bytes that can be allocated now, including page cache, which the kernel reclaims. Other reclaimable
            caches, such as ZFS's, are not included, and memory in use by other processes may become free at any time.
        size: total bytes.
        swap: total bytes of swap, on top of ``size``.
        whose: phrase for the owner of the memory, such as ``this machine``.
    """

    left: int
    size: int
    swap: int
    whose: str


def memory_rooms(root: Path = Path("/")) -> tuple[Room, ...]:
    """Returns the memory of this machine and each control group that limits this process.

    Args:
        root: root of the file system.

    Returns:
        The machine's room, followed by the control groups' rooms; empty if the system does not report its memory.
    """
    machine = {name: 1024 * value for name, value in _fields(root / "proc/meminfo").items()}
    if "MemTotal" not in machine:
        return ()
    size, swap = machine["MemTotal"], machine.get("SwapTotal", 0)
    groups = (group._replace(swap=min(swap, group.swap)) for group in _control_groups(root))
    return (Room(machine.get("MemAvailable", size), size, swap, "this machine"), *groups)


def _control_groups(root: Path) -> Iterator[Room]:
    """Yields the rooms of the control groups that limit this process's memory, from its own group to the root."""
    for version, directory in _directories(root):
        group = _group_of_version_2(directory) if version == 2 else _group_of_version_1(directory)
        if group is not None:
            yield group


def num_memory_kills(root: Path = Path("/")) -> int:
    """Counts the processes in this process's control group that the kernel's out-of-memory (OOM) killer has killed.

    Args:
        root: root of the file system.
    """
    files = {1: "memory.oom_control", 2: "memory.events"}
    counts = (_fields(path / files[version]).get("oom_kill") for version, path in _directories(root))
    return next((count for count in counts if count is not None), 0)


def _directories(root: Path) -> Iterator[tuple[int, Path]]:
    """Yields (version, directory) for each control group that may limit this process's memory."""
    mounts, memberships = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    for line in memberships.read_text().splitlines() if memberships.is_file() else ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from ((2, directory) for directory in _upwards(mounts, path))
        elif "memory" in controllers.split(","):
            yield from ((1, directory) for directory in _upwards(mounts / "memory", path))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yields the directories of a control group and its ancestors, up to the mount point.

    In a container, ``path`` may be the host's path, of which only the last directory is mounted, as the mount point.
    """
    directory = mount / path.strip("/")
    while directory != mount:
        yield directory
        directory = directory.parent
    yield mount


def _group_of_version_2(directory: Path) -> Room | None:
    limit, used = _number(directory / "memory.max"), _number(directory / "memory.current") or 0
    if limit is None:
        return None
    stat, swap = _fields(directory / "memory.stat"), _number(directory / "memory.swap.max")
    cache = stat.get("active_file", 0) + stat.get("inactive_file", 0)
    return Room(max(0, limit - used + cache), limit, _NO_LIMIT if swap is None else swap, _GROUP)


def _group_of_version_1(directory: Path) -> Room | None:
    limit, used = _number(directory / "memory.limit_in_bytes"), _number(directory / "memory.usage_in_bytes") or 0
    if limit is None:
        return None
    stat, both = _fields(directory / "memory.stat"), _number(directory / "memory.memsw.limit_in_bytes")
    cache = stat.get("total_active_file", 0) + stat.get("total_inactive_file", 0)
    return Room(max(0, limit - used + cache), limit, _NO_LIMIT if both is None else max(0, both - limit), _GROUP)


def _number(path: Path) -> int | None:
    """Reads a file that holds one number; returns None if it is missing, not a number, or at least ``_NO_LIMIT``."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


def _fields(path: Path) -> dict[str, int]:
    """Reads a file with a name and an integer on each line; returns an empty dictionary if the file is missing."""
    lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()] if path.is_file() else []
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def size_text(num_bytes: int) -> str:
    """Formats a number of bytes in MB or GB.

    >>> size_text(64_000_000), size_text(2_500_000_000)
    ('64 MB', '2.5 GB')
    """
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def cores_allowed() -> int:
    """Counts the cores that this process's threads may run on (CPU affinity)."""
    return len(os.sched_getaffinity(0))


def cores_limit(root: Path = Path("/")) -> float | None:
    """Returns how many cores' worth of CPU time the container's control group may use, or None for no limit.

    Args:
        root: root of the file system.
    """
    path = root / "sys/fs/cgroup/cpu.max"
    words = path.read_text().split() if path.is_file() else []
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None
