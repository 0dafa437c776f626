"""Files in memory that spill to a disk when the memory is full.

A run's directory in the memory of a node has a link to one on a disk, see ``node_memory``. A file that does not fit is
written there, with a link in its place.
"""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

SPILL = "swift-spill"
"""Name of the link to the directory on the disk."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_or_spill(path: Path, temporary: Path, write: Callable[[BinaryIO], object]) -> bool:
    """Writes a file under a temporary name and renames it, so that readers find it complete or not at all.

    Args:
        path: path of the file; an existing file is replaced.
        temporary: path in the same directory, without another writer.
        write: function that writes the content; called again if the content did not fit.

    Returns:
        Whether the file was written to the disk, because the memory is full.

    Raises:
        OSError: it fits nowhere, or cannot be written; nothing is left of it.
    """
    try:
        with temporary.open("wb") as file:
            write(file)
        spilled = None
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        spill = _spill_of(path)
        if spill is None or not (isinstance(error, OSError) and error.errno in _FULL):
            raise
        spilled = spill / uuid4().hex
        try:
            with spilled.open("wb") as file:
                write(file)
            temporary.symlink_to(spilled)
        except BaseException:
            spilled.unlink(missing_ok=True)
            raise
    _rename(temporary, path)
    return spilled is not None


def share_or_copy(path: Path, other: Path, temporary: Path) -> None:
    """Makes a file available under another path; free of cost on the same file system.

    Args:
        path: path of the file.
        other: its other path.
        temporary: path in the directory of ``other``, without another writer.

    Raises:
        OSError: the file fits nowhere, or cannot be read.
    """
    temporary.unlink(missing_ok=True)
    spill = _spill_of(other)
    if path.is_symlink() and spill is not None:
        shared = spill / uuid4().hex
        os.link(path.resolve(), shared)
        temporary.symlink_to(shared)
        _rename(temporary, other)
        return
    try:
        os.link(path.resolve(), temporary)
        _rename(temporary, other)
    except OSError:
        with path.open("rb") as file:
            write_or_spill(other, temporary, lambda copy: _copy(file, copy))


def remove_with_spill(path: Path) -> None:
    """Removes a file, wherever its content is."""
    target = path.resolve() if path.is_symlink() else None
    path.unlink(missing_ok=True)
    if target is not None:
        target.unlink(missing_ok=True)


def _rename(temporary: Path, path: Path) -> None:
    """Renames a file, and removes the spilled content of the one that it replaces."""
    before = path.resolve() if path.is_symlink() else None
    temporary.replace(path)
    if before is not None:
        before.unlink(missing_ok=True)


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    source.seek(0)
    shutil.copyfileobj(source, target, 1 << 20)


def _spill_of(path: Path) -> Path | None:
    """Returns the directory on a disk that belongs to the memory directory of a file; None if there is none."""
    with suppress(OSError):
        for parent in path.parent.resolve().parents:
            link = parent / SPILL
            # In a directory open to all users, such as that for temporary files, others could have made the link.
            if link.is_symlink() and link.lstat().st_uid == os.getuid() and link.is_dir():
                return link.resolve()
    return None
