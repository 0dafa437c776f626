"""Notes that the hosts of a run leave each other while they write a checkpoint together, in files that they share.

Threads save while training continues, so no collective takes part, which would have to be in the order of the
iterations.

    .step-00000040.5f0c.hosts.tmp/host-0.begun      the files of the checkpoint are there, without values
    .step-00000040.5f0c.hosts.tmp/host-1.filled     what host 1 has written into them
    .step-00000040.5f0c.hosts.tmp/host-1.checked    digests of the files that host 1 has read back
    .step-00000040.5f0c.hosts.tmp/host-1.failed     why host 1 does not go on, and so no host does
    .step-00000040.5f0c.hosts.tmp/host-1.signs      grows as long as host 1 makes progress

A save has a token, 5f0c, so that one that is repeated does not find what was said in the last attempt. The next save,
or the next start of the run, removes what is left.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from swift.checkpoint.storage.directory import checkpoint_path
from swift.checkpoint.storage.manifest import read_signed, write_signed
from swift.errors import SettingError, first_line

_PATIENCE_S, _SIGN_S, _VERSION = 120.0, 1.0, 1
_LOOK_S, _LAZIEST_S = 0.02, 1.0
"""Seconds until a host looks again, at first and in the end: many hosts look at one file system."""
_ENDING = ".hosts.tmp"

Stage = Literal["begun", "filled", "checked"]


class Spoilt(Exception):
    """A state is of no use, and must not take the place of a good checkpoint."""


class HostFailed(OSError):
    """Another host could not do its part of a checkpoint."""


class Save(NamedTuple):
    """A save, by the name that it has for all hosts.

    Attributes:
        step: iterations done.
        token: what distinguishes it from another save of the same state.
    """

    step: int
    token: str


class HostBoard:
    """The notes of the hosts about one save, from the side of one of them.

    Args:
        directory: directory of all checkpoints of a run.
        save: the save.
        own: number of this host.
        patience_s: seconds in which an awaited host has to give a sign of progress.

    Attributes:
        path: directory of the notes.
    """

    def __init__(self, directory: Path, save: Save, own: int, patience_s: float = _PATIENCE_S):
        self.path = directory / f".{checkpoint_path(directory, save.step).name}.{save.token}{_ENDING}"
        self._save, self._own, self._patience_s = save, own, patience_s
        self._signed_at = -_SIGN_S

    def post(self, stage: Stage, fields: Mapping[str, Any]) -> None:
        """Tells all hosts that this one has come so far; ``fields`` are JSON."""
        self._write(stage, fields)

    def sign(self) -> None:
        """Gives a sign of progress, at most once a second."""
        now = time.monotonic()
        if now - self._signed_at >= _SIGN_S:
            self._signed_at = now
            self.path.mkdir(parents=True, exist_ok=True)
            with self._file(self._own, "signs").open("ab") as file:
                file.write(b".")

    def give_up(self, error: Exception) -> None:
        """Tells all hosts, where that is possible, that they wait in vain for this one."""
        with suppress(OSError):
            self._write("failed", {"why": first_line(error), "is_spoilt": isinstance(error, Spoilt)})

    def read(self, host: int, stage: Stage) -> dict[str, Any]:
        """Waits until a host has come so far, and returns what it has told.

        Raises:
            HostFailed, Spoilt: some host has given up.
            TimeoutError: the host has given no sign of progress for too long.
            OSError: what it has told is damaged.
        """
        until, before, pause_s = time.monotonic() + self._patience_s, 0, _LOOK_S
        while not self._file(host, stage).exists():
            self._check_all()
            signs = self._signs(host)
            if signs != before:  # fewer, where the save was begun again
                until, before = time.monotonic() + self._patience_s, signs
            if time.monotonic() > until:
                raise TimeoutError(f"{self._complaint(host)} in {self._patience_s:g} s")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LAZIEST_S)
        return self._read(host, stage)

    def _check_all(self) -> None:
        for path in self.path.glob("host-*.failed"):
            host = int(path.stem.removeprefix("host-"))
            if host != self._own:
                fields = self._read(host, "failed")
                kind = Spoilt if fields["is_spoilt"] else HostFailed
                raise kind(f"{self._complaint(host)}: {fields['why']}")

    def _complaint(self, host: int) -> str:
        return f"host {host} has not written its part of iteration {self._save.step}"

    def _signs(self, host: int) -> int:
        try:
            return self._file(host, "signs").stat().st_size
        except OSError:
            return 0

    def _write(self, what: str, fields: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_signed(self.path, {"version": _VERSION, **fields}, self._file(self._own, what).name)

    def _read(self, host: int, what: str) -> dict[str, Any]:
        try:
            return read_signed(self.path, "checkpoint", _VERSION, self._file(host, what).name)
        except SettingError as error:
            raise OSError(f"{error.value} {error.allowed}") from error

    def _file(self, host: int, what: str) -> Path:
        return self.path / f"host-{host}.{what}"
