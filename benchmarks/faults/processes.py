"""Processes of a run, found by a mark in their environment."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "SWIFT_FAULTS"


@dataclass(frozen=True)
class Found:
    """A process of a run.

    Attributes:
        pid: process id.
        kind: `launch`, `train`, `member`, `keeper` or `preparer`; of something else, the first word of its command.
        name: name of a member, as in events.
        is_stopped: True if it was stopped by a signal.
    """

    pid: int
    kind: str
    name: str
    is_stopped: bool


def find(mark: str) -> list[Found]:
    """Finds all processes of the run with a mark, except zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if f"{MARK}={mark}\0".encode() in (path / "environ").read_bytes() + b"\0":
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found.append(_found(int(path.name), words, state))
    return found


def _found(pid: int, words: list[str], state: str) -> Found:
    kind = words[words.index("swift") + 1] if "swift" in words[:-1] else Path(words[0]).name
    name = ""
    if kind == "member":
        pipeline, stage, rank = words[-4:-1]
        name = f"{pipeline}:{stage}" + (f" rank {rank}" if rank != "0" else "")
    return Found(pid, kind, name, state == "T")


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to all that still exist."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
