"""Digests, against which everything that is read is held."""

import hashlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_SIZE = 16


def digest(content: bytes) -> str:
    """Of bytes."""
    return hashlib.blake2b(content, digest_size=_SIZE).hexdigest()


def array_digest(arrays: Iterable[np.ndarray]) -> str:
    """Of the numbers of arrays, one after the other."""
    whole = hashlib.blake2b(digest_size=_SIZE)
    for array in arrays:
        whole.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return whole.hexdigest()


def array_checksum(arrays: Iterable[np.ndarray]) -> int:
    """Of the numbers of arrays, one after the other: a CRC-32, for what stays in memory.

    It finds what a process that was killed left half-written, at five times the speed of ``array_digest``.
    """
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, checksum)
    return checksum


def file_digest(path: Path) -> str:
    """Of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_SIZE)).hexdigest()


def settled_digests(directory: Path) -> dict[str, str]:
    """Of every file under a directory, by its path there, once the file is on the disk and no longer on its way."""
    digests = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        digests[path.relative_to(directory).as_posix()] = file_digest(path)
    return digests


def difference(path: Path, expected: str) -> str | None:
    """What is wrong with a file that should have a digest; None: nothing."""
    if not path.is_file():
        return "is missing"
    try:
        found = file_digest(path)
    except OSError as error:  # a bad sector, or no permission: another copy may be had
        return f"cannot be read: {error.strerror}"
    return None if found == expected else "is not as it was saved"
