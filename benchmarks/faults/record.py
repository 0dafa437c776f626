"""Record of a campaign: a line for each fault, kept over several sessions."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import evidence
from .episode import Verdict


def commit(root: Path) -> str:
    """Reads the version of the code under test, with a `+` if it has uncommitted changes."""
    try:
        words = ["git", "-C", str(root), "describe", "--always", "--abbrev=10", "--dirty=+"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Record:
    """Record as lines of a file.

    Args:
        path: path of the file, created if missing.
    """

    def __init__(self, path: Path):
        self._path = path
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, verdict: Verdict, **common: Any) -> None:
        """Adds a line for each fault of a volley, with the verdict on all of them."""
        outcome = "wrong" if verdict.complaints else "ok"
        shared = {"outcome": outcome, "seconds": verdict.seconds, "complaints": list(verdict.complaints)}
        faults = [fault.document() for fault in verdict.faults] or ([{"kind": "none"}] if verdict.complaints else [])
        with self._path.open("a") as file:
            for fault in faults:
                line = {**common, **fault, "together": len(faults), **shared, "observed": dict(verdict.observed)}
                file.write(json.dumps(line) + "\n")

    def lines(self) -> Iterator[dict[str, Any]]:
        """Reads all lines so far."""
        yield from evidence.read_lines(self._path).records

    def next_seed(self, first: int) -> int:
        """Finds the first seed, from a given one on, without a record."""
        return max([first, *(line["seed"] + 1 for line in self.lines() if line["seed"] >= first)])
