"""A disk for one run: a file system in a file, which can be full, freeze, and lose what was not yet written."""

import fcntl
import os
import shutil
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

_SHUT_DOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN: all accesses fail from now on, and what is only in memory is lost."""
_WITHOUT_LOG = 2
_PATIENCE_S = 20.0


def can_have_disks(directory: Path) -> bool:
    """Whether a file system can be mounted here."""
    disk = Disk(directory / "probe", megabytes=8)
    try:
        disk.make()
    except (OSError, subprocess.CalledProcessError):
        return False
    disk.remove()
    return True


class Disk:
    """An ext4 file system.

    Args:
        directory: mount point; its file is beside it.
        megabytes: size.
    """

    def __init__(self, directory: Path, megabytes: int = 96):
        self.directory, self._megabytes = directory, megabytes
        self._image, self._ballast = directory.with_suffix(".image"), directory / ".ballast"

    def make(self) -> None:
        """Makes and mounts it."""
        self.directory.mkdir(parents=True)
        with self._image.open("wb") as file:
            file.truncate(self._megabytes << 20)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.directory))

    def _unmount(self) -> None:
        """Unmounts it, with retries: a killed process may keep it busy for a moment."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return _run("umount", str(self.directory))
            except subprocess.CalledProcessError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def fill(self, left: int) -> None:
        """Fills it except for some bytes."""
        with self._ballast.open("wb") as file:
            free = os.statvfs(self.directory).f_bavail * 4096 - left
            while free > 0:
                try:
                    file.write(bytes(min(free, 1 << 20)))
                    file.flush()
                except OSError:
                    break
                free -= 1 << 20
            with suppress(OSError):
                os.fsync(file.fileno())

    def empty(self) -> None:
        """Makes room again."""
        self._ballast.unlink(missing_ok=True)

    def freeze(self) -> None:
        """Freezes it: processes that write block, and cannot be killed."""
        _run("fsfreeze", "-f", str(self.directory))

    def thaw(self) -> None:
        """Ends a freeze."""
        subprocess.run(["fsfreeze", "-u", str(self.directory)], capture_output=True, check=False)

    def make_read_only(self) -> None:
        """Makes it read-only, also for open files, as a kernel does after an error."""
        _run("mount", "-o", "remount,abort", str(self.directory))

    def cut_power(self) -> None:
        """Drops everything that was not synced; nothing can be read or written from now on."""
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, _SHUT_DOWN, struct.pack("I", _WITHOUT_LOG))
        finally:
            os.close(directory)

    def mount_again(self) -> None:
        """Repairs it, as after a crash, and mounts it again; no process may be using it."""
        self._unmount()
        subprocess.run(["e2fsck", "-p", str(self._image)], capture_output=True, check=False)
        self._mount()

    def remove(self) -> None:
        """Unmounts it, and removes its file."""
        self.thaw()
        subprocess.run(["umount", "-l", str(self.directory)], capture_output=True, check=False)
        self._image.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)
