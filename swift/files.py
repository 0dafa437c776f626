"""Files that a reader never sees half-written, and names that outlast a power failure."""

import os
from pathlib import Path
from uuid import uuid4


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Writes a file under a temporary name of its own and renames it.

    A reader sees the old file or the new one, whole; of several writers at once the last one's file stays.

    Args:
        path: of the file.
        content: of the file.
        mode: its permissions, but for those that the process's umask takes away.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory, as they are now, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
