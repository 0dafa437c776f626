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
        kind: `launch`, `train`, `worker`, `checkpoint-service` or `compile-service`; of something
            else, the first word of its command.
        name: name of a member, as in events.
        is_stopped: True if it was stopped by a signal.
    """

    pid: int
    kind: str
    name: str
    is_stopped: bool


def find(mark: str) -> list[Found]:
    """Finds all processes of the run with a mark, except zombies and members that are only held ready."""
    found: dict[tuple[str, ...], tuple[int, Found]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if f"{MARK}={mark}\0".encode() in (path / "environ").read_bytes() + b"\0":
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                stat = (path / "stat").read_text().rpartition(")")[2].split()
                if stat[0] != "Z":
                    one, started = _found(int(path.name), words, stat[0]), int(stat[19])
                    # The process that is to follow a member was started after it, with the same command.
                    key = (one.kind, one.name) if one.kind == "worker" else (path.name,)
                    found[key] = min(found.get(key, (started, one)), (started, one))
    return [one for _, one in found.values()]


def _found(pid: int, words: list[str], state: str) -> Found:
    kind = words[words.index("swift") + 1] if "swift" in words[:-1] else Path(words[0]).name
    name = ""
    if kind == "worker":
        pipeline, stage, rank = words[-4:-1]
        name = f"{pipeline}:{stage}" + (f" rank {rank}" if rank != "0" else "")
    return Found(pid, kind, name, state == "T")


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to all that still exist."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
