"""Files that a reader never sees half-written."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file under a temporary name and renames it: a reader sees the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
