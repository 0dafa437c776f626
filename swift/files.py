"""File helpers: atomic replacement, free space, fsync for durability across power failures, opening regular files.

``this_program`` returns a digest of Swift's code and versions, with which machines verify that they run the same code.
"""

import errno
import hashlib
import importlib.metadata
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from uuid import uuid4

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Writes a file atomically: creates it under a unique temporary name, then renames it.

    Readers see either the complete old file or the complete new one. With concurrent writers, the last one wins.

    Args:
        path: path of the file.
        content: bytes to write.
        mode: permission bits, before the process's umask is applied.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # before the rename: a power failure must not leave an empty file at ``path``
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Creates a directory atomically: yields a temporary one beside ``path`` and renames it; on errors, removes it."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(path)
        sync_directory(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_room(directory: Path, num_bytes: int) -> None:
    """Raises OSError if a file system has less than ``num_bytes`` free, before a write fills it up for all users."""
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if stats.f_blocks and free < num_bytes:  # some network file systems report no size
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {num_bytes} bytes are needed, {free} are free")


def sync_file(path: Path) -> None:
    """Flushes a file's content to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flushes a directory's entries to disk, so that new file names survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Returns the status of a regular file without opening it; raises OSError for anything else."""
    status = os.stat(path)
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'a special file')}, not a regular file")
    return status


def open_regular(path: str | os.PathLike[str]) -> int:
    """Opens a regular file and returns its descriptor; never blocks, and raises OSError for anything else."""
    check_regular(path)
    # O_NONBLOCK: if the path has become a named pipe since the check, opening it would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return fd


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Reads a whole regular file; raises OSError for anything else."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


@cache
def this_program() -> str:
    """Returns a digest of Swift's code and its dependencies' versions.

    It must be the same on all machines of a run, since they read each other's messages and compiled programs.
    """
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")]
    known = hashlib.sha256(repr((sys.version_info[:2], versions)).encode())
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        # The size marks where each file ends, so that different trees cannot give the same bytes.
        known.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return known.hexdigest()[:32]
