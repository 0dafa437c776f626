"""Files that are kept in memory, and on a disk where that is full.

A run's directory in the memory of a node has a link to one on a disk, see ``own_memory``. What does not fit is written
there, and has a link in its place.
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
"""The name of the link, among what lies in the memory."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_kept(path: Path, temporary: Path, write: Callable[[BinaryIO], object]) -> bool:
    """Writes a file under a temporary name and renames it; whoever looks for it finds it whole or not at all.

    Args:
        path: of the file; one that is there is replaced.
        temporary: a name in the same directory, of which there is no other writer.
        write: writes the content; is called again where that did not fit.

    Returns:
        Whether it was written to the disk, as the memory is full.

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
    _put(temporary, path)
    return spilled is not None


def share_kept(path: Path, other: Path, temporary: Path) -> None:
    """Has a file in another place, too; on the same file system that costs nothing.

    Args:
        path: of the file.
        other: of the other place.
        temporary: a name in the directory of that, of which there is no other writer.

    Raises:
        OSError: it fits nowhere, or cannot be read.
    """
    temporary.unlink(missing_ok=True)
    spill = _spill_of(other)
    if path.is_symlink() and spill is not None:
        shared = spill / uuid4().hex
        os.link(path.resolve(), shared)
        temporary.symlink_to(shared)
        _put(temporary, other)
        return
    try:
        os.link(path.resolve(), temporary)
        _put(temporary, other)
    except OSError:
        with path.open("rb") as file:
            write_kept(other, temporary, lambda copy: _copy(file, copy))


def remove_kept(path: Path) -> None:
    """Removes a file, wherever it is."""
    target = path.resolve() if path.is_symlink() else None
    path.unlink(missing_ok=True)
    if target is not None:
        target.unlink(missing_ok=True)


def _put(temporary: Path, path: Path) -> None:
    before = path.resolve() if path.is_symlink() else None
    temporary.replace(path)
    if before is not None:
        before.unlink(missing_ok=True)


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    source.seek(0)
    shutil.copyfileobj(source, target, 1 << 20)


def _spill_of(path: Path) -> Path | None:
    """The directory on a disk that belongs to the memory in which a file is to be."""
    with suppress(OSError):
        for parent in path.parent.resolve().parents:
            link = parent / SPILL
            # Anybody may make one in a directory that is everybody's, such as that for temporary files.
            if link.is_symlink() and link.lstat().st_uid == os.getuid() and link.is_dir():
                return link.resolve()
    return None
