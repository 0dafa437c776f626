"""Runs measuring programs one after the other, each a process of its own, and keeps the JSON document it prints."""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def document_of(command: Sequence[str], files: Sequence[str] = ()) -> dict[str, Any] | None:
    """What a program prints, with its command and the minutes it took.

    Args:
        command: the program, relative to the repository, and its arguments.
        files: more arguments: files of the user's, of which the document has the names alone.

    Returns:
        None if it printed no document, which has been told by then; a claim of it that does not hold is no failure.
    """
    begun, cpu_begun = time.monotonic(), _cpu_seconds()
    paths = [str(Path(file).absolute()) for file in files]
    child = subprocess.run([sys.executable, *command, *paths], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    lines = child.stdout.splitlines()
    try:
        document = json.loads(lines[-1])
    except (IndexError, ValueError):
        print(f"{' '.join(command)}: ended with {child.returncode} and without a document", file=sys.stderr)
        return None
    minutes, cpu_minutes = (
        round(seconds / 60, 1) for seconds in (time.monotonic() - begun, _cpu_seconds() - cpu_begun)
    )
    told = " ".join(["python", *command, *(Path(file).name for file in files)])
    return {"command": told, "minutes": minutes, "cpu_minutes": cpu_minutes, **document}


def _cpu_seconds() -> float:
    """Of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check_known(parser: argparse.ArgumentParser, names: Sequence[str], known: Sequence[str], what: str) -> None:
    """Ends the program with one line where it was given a name that means nothing."""
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")


def tell(text: str) -> None:
    """Progress, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
