"""A file system in memory, whose room for bytes and files can be changed while processes use it."""

import os
import subprocess
from pathlib import Path

_PLENTY, _MANY = 2 << 30, 1 << 20
"""Bytes and inodes that no run uses up."""


class Tmpfs:
    """A tmpfs, which this process is allowed to mount.

    Args:
        directory: its mount point.
    """

    def __init__(self, directory: Path):
        self._directory = directory

    def make(self) -> None:
        """Mounts it, with room for everything."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._mount(f"size={_PLENTY},nr_inodes={_MANY}")

    def leave(self, *, num_bytes: int = _PLENTY, num_inodes: int | None = None) -> None:
        """Changes its limits so that so much is free; None: the number of inodes stays as it is."""
        now = os.statvfs(self._directory)
        used = (now.f_blocks - now.f_bfree) * now.f_frsize
        size = max(used + num_bytes, now.f_frsize)  # 0 stands for no limit, after which Linux refuses every other size
        inodes = "" if num_inodes is None else f",nr_inodes={now.f_files - now.f_ffree + num_inodes}"
        self._mount(f"remount,size={size}{inodes}")

    def empty(self) -> None:
        """Makes room again."""
        self.leave(num_inodes=_MANY)

    def remove(self) -> None:
        """Unmounts it, even if it is in use."""
        subprocess.run(["umount", "--lazy", str(self._directory)], capture_output=True, check=False)

    def _mount(self, options: str) -> None:
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._directory)]
        subprocess.run(words, check=True, capture_output=True, timeout=30)
