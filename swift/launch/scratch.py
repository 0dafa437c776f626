"""What the processes of a run share, and nobody needs after it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from swift.files import replace_file

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Scratch:
    """Two directories.

    Attributes:
        path: for the configuration and programs.
        memory: for states, in shared memory where the machine has that.
    """

    path: Path
    memory: Path

    @classmethod
    @contextmanager
    def of(cls, config: str) -> Iterator[Self]:
        """New ones for a configuration, gone with the block."""
        prefix = f"swift-{os.getpid()}-"  # should something be left after all, one knows whose it was
        memory = str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
        scratch = cls(Path(tempfile.mkdtemp(prefix=prefix)), Path(tempfile.mkdtemp(prefix=prefix, dir=memory)))
        try:
            replace_file(scratch.config, config.encode())
            for directory in (scratch.programs, scratch.states, scratch.snapshots):
                directory.mkdir()
            yield scratch
        finally:
            scratch.remove()

    @property
    def config(self) -> Path:
        """The operative configuration, gin."""
        return self.path / "config.gin"

    @property
    def programs(self) -> Path:
        """The directory of compiled programs, see ``ProgramStore``."""
        return self.path / "programs"

    @property
    def states(self) -> Path:
        """The directory of whole states, between two epochs, see ``Keep``."""
        return self.memory / "states"

    @property
    def snapshots(self) -> Path:
        """The directory of states without slots, that are to be saved or were restored."""
        return self.memory / "snapshots"

    def remove(self) -> None:
        """Removes both; any process may, whose supervisor is gone."""
        for directory in (self.path, self.memory):
            shutil.rmtree(directory, ignore_errors=True)
