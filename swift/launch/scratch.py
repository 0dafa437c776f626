"""What the processes of a run share, and nobody needs after it."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from swift.files import replace_file

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _LOCK, _STATES, _COPIES = "swift-", "lock", "states", "copies"
_DATA = "data.json"


@contextmanager
def own_memory() -> Iterator[Path]:
    """A directory in the memory of this node, where the machine has that; gone with the block.

    Those of others that were killed with all their processes are removed: they would fill the memory up.
    """
    top = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    for other in top.glob(f"{_PREFIX}*"):
        with suppress(OSError), (other / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who lives has it
            shutil.rmtree(other, ignore_errors=True)
    # Without its name until it is locked, lest another takes it for one that was left behind.
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getpid()}-", dir=top))
    memory = made.with_name(made.name[1:])
    try:
        with (made / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in (_STATES, _COPIES):
                (made / name).mkdir()
            made.rename(memory)
            yield memory
    finally:
        for path in (made, memory):
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Scratch:
    """Two directories.

    Attributes:
        path: for the configuration and programs; all nodes see it.
        memory: for states; each node has its own.
    """

    path: Path
    memory: Path

    @classmethod
    @contextmanager
    def of(cls, config: str, data: Mapping[str, Any], shared: Path | None = None) -> Iterator[Self]:
        """New ones for a configuration, gone with the block.

        Args:
            config: gin.
            data: state of a loader.
            shared: a directory that all nodes see, where there are several.
        """
        prefix = f"{_PREFIX}{os.getpid()}-"  # should something be left after all, one knows whose it was
        if shared is not None:
            prefix = f".{prefix}"
            for earlier in shared.glob(f".{_PREFIX}*"):  # of a first node that was lost with all its processes
                shutil.rmtree(earlier, ignore_errors=True)
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=shared)).absolute()
        try:
            with own_memory() as memory:
                scratch = cls(path, memory)
                replace_file(scratch.config, config.encode())
                replace_file(path / _DATA, json.dumps(data).encode())
                scratch.programs.mkdir()
                for directory in (scratch.snapshots, scratch.handed):
                    if shared is None:
                        (memory / directory.name).mkdir()
                        directory.symlink_to(memory / directory.name)
                    else:  # the keeper, which is on the first node, has to see those of all
                        directory.mkdir()
                yield scratch
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @property
    def config(self) -> Path:
        """The operative configuration, gin."""
        return self.path / "config.gin"

    def data(self) -> dict[str, Any]:
        """The state of a loader when the run began: what every process has to read."""
        return json.loads((self.path / _DATA).read_text())

    @property
    def programs(self) -> Path:
        """The directory of compiled programs, see ``ProgramStore``."""
        return self.path / "programs"

    @property
    def states(self) -> Path:
        """The directory of whole states, between two epochs, see ``Keep``."""
        return self.memory / _STATES

    @property
    def copies(self) -> Path:
        """The directory of copies of other ranks' slices, see ``swift.launch.copies``."""
        return self.memory / _COPIES

    @property
    def handed(self) -> Path:
        """The directory of what is handed over when ranks are lost or come back, see ``swift.launch.handover``."""
        return self.path / "handed"

    @property
    def snapshots(self) -> Path:
        """The directory of states without slots, that are to be saved or were restored."""
        return self.path / "snapshots"

    def remove(self) -> None:
        """Removes what no other node sees; any process may, whose supervisor is gone."""
        shutil.rmtree(self.memory, ignore_errors=True)
        if self.snapshots.is_symlink():
            shutil.rmtree(self.path, ignore_errors=True)
