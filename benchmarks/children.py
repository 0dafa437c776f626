"""Runs benchmark programs one after another, each in its own process, and parses the JSON documents they print."""

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
    """Runs a program and returns its document, with its command and the minutes that it took.

    Args:
        command: path of the program, relative to the repository, and its arguments.
        files: further arguments: the user's files, of which the document records only the names.

    Returns:
        The document, or None, after a message, if the program printed none. A missed claim is not a failure.
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
    line = " ".join(["python", *command, *(Path(file).name for file in files)])
    return {"command": line, "minutes": minutes, "cpu_minutes": cpu_minutes, **document}


def _cpu_seconds() -> float:
    """Returns the CPU-seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check_known(parser: argparse.ArgumentParser, names: Sequence[str], known: Sequence[str], what: str) -> None:
    """Exits with one line if a name is unknown."""
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")


def tell(text: str) -> None:
    """Prints progress with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
