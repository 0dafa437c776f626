"""The record of a campaign: a line for each fault, kept over several sittings."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import evidence
from .episode import Verdict


def commit(root: Path) -> str:
    """The version of the code that is tried; with a `+` where it has changes that are not committed."""
    try:
        words = ["git", "-C", str(root), "describe", "--always", "--abbrev=10", "--dirty=+"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Record:
    """Lines in a file.

    Args:
        path: of the file; made where there is none.
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
        """All so far."""
        yield from evidence.read_lines(self._path).records

    def next_seed(self, first: int) -> int:
        """The first seed, from some on, of which nothing is recorded."""
        return max([first, *(line["seed"] + 1 for line in self.lines() if line["seed"] >= first)])
