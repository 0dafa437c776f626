"""Compiled programs of an earlier run of the same shape, given to the next: most of a start is compiling."""

import hashlib
import threading
from contextlib import suppress
from pathlib import Path

_POLL_S, _KEEP_EVERY = 0.02, 50


class WarmPrograms:
    """Fills the stores of compiled programs of a run, which are in its temporary directory; a context manager.

    Args:
        tmp: temporary directory of the run.
        kept: directory of programs to give, and to keep those that the run compiles.
        gives: True to give programs.
    """

    def __init__(self, tmp: Path, kept: Path, *, gives: bool):
        self._tmp, self._kept, self._gives = tmp, kept, gives
        self._filled: set[Path] = set()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "WarmPrograms":
        self._kept.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        turn = 0
        while not self._ends.wait(_POLL_S):
            turn += 1
            for store in self._tmp.glob("swift-*/programs"):
                if self._gives and store not in self._filled:
                    self._filled.add(store)
                    _copy_all(self._kept, store)
                elif turn % _KEEP_EVERY == 0:
                    _copy_all(store, self._kept)


def _copy_all(source: Path, to: Path) -> None:
    """Copies complete files; no hard links, since a copy may be damaged on purpose."""
    with suppress(OSError):
        for path in source.iterdir():
            if path.suffix or path.name.startswith(".") or (to / path.name).exists():
                continue
            content = path.read_bytes()
            if hashlib.sha256(content[32:]).digest() == content[:32]:
                temporary = to / f".{path.name}.faults"
                temporary.write_bytes(content)
                temporary.rename(to / path.name)
