"""The key of input hosts: a file that only its owner can read, the same on all machines."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from swift.errors import SettingError
from swift.files import read_regular, replace_file

_LEAST = 32
"""Characters of a key: fewer could be guessed."""


def find_key(path: Path, *, makes: bool = False) -> str:
    """Reads a key.

    Args:
        path: file of the key.
        makes: whether a missing file is made, with a new key.

    Raises:
        SettingError: the file is missing, others can read it, or it holds no key.
    """
    try:
        if makes and not path.exists():
            _make(path)
        if os.stat(path).st_mode & 0o077:
            raise SettingError("--key-file", str(path), "can be read by others than its owner: chmod 600 it")
        key = read_regular(path).decode(errors="replace").strip()
    except OSError as error:
        raise SettingError("--key-file", str(path), f"cannot be read: {error.strerror or error}") from error
    if len(key) < _LEAST:
        raise SettingError("--key-file", str(path), f"must hold a key of at least {_LEAST} characters")
    return key


def _make(path: Path) -> None:
    """Makes a key; of several hosts that do so at once, all read the first one's."""
    mine = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    replace_file(mine, f"{secrets.token_hex(32)}\n".encode(), mode=0o600)
    try:
        with suppress(FileExistsError):
            os.link(mine, path)
    finally:
        mine.unlink()
