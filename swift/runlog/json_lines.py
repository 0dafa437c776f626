"""Files with a JSON object on each line; they may be too large to read at once."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swift.errors import SettingError


def parse_object(text: bytes) -> dict[str, Any] | None:
    """Parses a JSON object; None if the text is anything else."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file one by one, and skips an incomplete line at its end.

    Args:
        path: path of the file, which may be missing.

    Raises:
        SettingError: a complete line is not a JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = parse_object(line)
            if record is not None:
                yield record
            elif line.endswith(b"\n"):
                raise SettingError(str(path), f"line {number}", "is damaged: not a JSON object")


def lines_from_end(path: Path, block_bytes: int = 2**16) -> Iterator[tuple[int, bytes]]:
    """Yields the complete lines of a file, the last one first.

    Args:
        path: path of the file.
        block_bytes: bytes to read at once.

    Yields:
        (offset of the byte after the line's line feed; the line without its line feed).
    """
    with path.open("rb") as file:
        start, rest, line_end = file.seek(0, os.SEEK_END), b"", -1
        while start:
            end, start = start, max(start - block_bytes, 0)
            file.seek(start)
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            if lines and line_end < 0:
                line_end = start + len(rest) + sum(len(line) + 1 for line in lines[:-1]) + 1
                lines.pop()
            for line in reversed(lines):
                yield line_end, line
                line_end -= len(line) + 1
        if line_end >= 0:
            yield line_end, rest


def step_of(path: Path, line: bytes) -> int:
    """Returns the step of a line; raises SettingError if it has none."""
    record = parse_object(line) or {}
    step = record.get("step")
    if not isinstance(step, int):
        shown = line[:60].decode(errors="replace")
        raise SettingError(str(path), shown, "is damaged: not a JSON object with a step")
    return step


def cut_after(path: Path, is_kept: Callable[[bytes], bool] = lambda _: True) -> bytes | None:
    """Truncates a file after the last complete line to keep; lines before that one are not read.

    Args:
        path: path of the file, which may be missing.
        is_kept: whether to keep a line, and with it all lines before.

    Returns:
        The last line kept; None if there is none.
    """
    if not path.exists():
        return None
    end, last = next(((end, line) for end, line in lines_from_end(path) if is_kept(line)), (0, None))
    os.truncate(path, end)
    return last
