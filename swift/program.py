"""The program that runs: a digest of its code and versions, by which machines see whether they have the same one."""

import hashlib
import importlib.metadata
import sys
from functools import cache
from pathlib import Path


@cache
def this_program() -> str:
    """Returns a digest of Swift's code and its versions, which all machines of a run must share.

    They read each other's messages and compiled programs.
    """
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")]
    known = hashlib.sha256(repr((sys.version_info[:2], versions)).encode())
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        known.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return known.hexdigest()[:32]
