"""Members and records of a running ``swift launch``, for benchmarks that kill its processes."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

SWIFT = [sys.executable, "-m", "swift"]
CONFIG = Path(__file__).parent.parent / "experiments" / "recycle" / "kill.gin"
"""Three pipelines of two stages, a real process for each worker."""
_PATIENCE_S = 600.0


def wait(supervisor: subprocess.Popen[bytes], is_there: Callable[[], bool], patience_s: float = _PATIENCE_S) -> None:
    """Waits until a condition holds while the run continues."""
    deadline = time.monotonic() + patience_s
    while not is_there():
        if supervisor.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run ended, or did not go on, before all was measured")
        time.sleep(0.1)


def members(supervisor: int) -> dict[tuple[str, ...], int]:
    """Returns the process ids of a run's members by worker and rank; the second process of a name is a spare."""
    return {name: pid for name, (_, pid, _) in reversed(started_members(supervisor))}


def started_members(supervisor: int) -> list[tuple[tuple[str, ...], tuple[int, int, int]]]:
    """Lists all member processes as (worker and rank, (start time, process id, CPU time))."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            words = (path / "cmdline").read_text().split("\0")
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == supervisor and "worker" in words and stat[0] != "Z":
                found.append((tuple(words[-4:-1]), (int(stat[19]), int(path.name), int(stat[11]) + int(stat[12]))))
    return sorted(found, key=lambda one: one[1])


def events(run_dir: Path) -> list[dict[str, Any]]:
    """Reads the events recorded so far."""
    return list(_lines(run_dir / "events.jsonl"))


def count(run_dir: Path, event: str) -> int:
    """Counts the events of a given name recorded so far."""
    return sum(found["event"] == event for found in events(run_dir))


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Reads the metrics of the iterations recorded so far."""
    return list(_lines(run_dir / "metrics.jsonl"))


def last_step(run_dir: Path) -> int:
    """Returns the last recorded iteration, or 0 if there is none."""
    return max((record["step"] for record in records(run_dir)), default=0)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON lines written so far, and skips an incomplete last line."""
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        yield json.loads(line)
