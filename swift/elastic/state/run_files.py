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

from swift.elastic.state.disk_spill import SPILL
from swift.files import replace_file

_PREFIX, _LOCK, _STATES, _COPIES, _SOCKETS, _CORPUS = "swift-", "lock", "states", "copies", "sockets", "corpus"
_DATA = "data.json"


@contextmanager
def own_memory(place: Path, corpus: Path | None = None) -> Iterator[Path]:
    """A directory of this node, best in its memory, and one on a disk for what does not fit; gone with the block.

    Args:
        place: the directory in which it is made, see ``choose_place``.
        corpus: the index of the corpus, to which it has a link.
    """
    remove_left_behind(place)
    # Without its name until it is locked, so that no other takes it for one that was left behind.
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getpid()}-", dir=place))
    disk = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    memory = made.with_name(made.name[1:])
    try:
        with (made / _LOCK).open("w") as lock, _in_use(made), _in_use(disk):
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in (_STATES, _COPIES):
                (made / name).mkdir()
            (disk / _SOCKETS).mkdir()
            (made / SPILL).symlink_to(disk.absolute())
            if corpus is not None:
                (made / _CORPUS).symlink_to(corpus.absolute())
            made.rename(memory)
            yield memory
    finally:
        for path in (made, memory, disk):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _in_use(directory: Path) -> Iterator[None]:
    """With a lock that keeps a directory from being cleared of old files by the system, see ``man 5 tmpfiles.d``.

    A run that lasts for weeks has some in a directory for temporary files that nothing touches for days.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_left_behind(place: Path) -> None:
    """Removes the memories of runs that were killed with all their processes: they would fill the place up.

    Args:
        place: directory that may hold some.
    """
    for other in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            is_own = not other.is_symlink() and other.stat().st_uid == os.getuid()
            if not (is_own and (other / SPILL).is_symlink()):  # something else of that name
                continue
            with (other / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who lives has it
                _remove_memory(other)


def _remove_memory(memory: Path) -> None:
    """Removes what ``own_memory`` has made, where it could not."""
    disk = (memory / SPILL).resolve()
    if disk.name.startswith(_PREFIX):
        shutil.rmtree(disk, ignore_errors=True)
    shutil.rmtree(memory, ignore_errors=True)


@dataclass(frozen=True)
class RunFiles:
    """Two directories.

    Attributes:
        path: for the configuration and programs; all nodes see it.
        memory: for states and sockets, see ``own_memory``; each node has its own.
    """

    path: Path
    memory: Path

    @classmethod
    @contextmanager
    def of(
        cls,
        config: str,
        data: Mapping[str, Any],
        place: Path,
        corpus: Path | None = None,
        shared: Path | None = None,
    ) -> Iterator[Self]:
        """New ones for a configuration, gone with the block.

        Args:
            config: gin.
            data: state of a loader.
            place: in which the memory of this node is made.
            corpus: the index of the corpus on this node, see ``find_index``.
            shared: a directory that all nodes see, where there are several.
        """
        prefix = f"{_PREFIX}{os.getpid()}-"  # should something be left after all, one knows whose it was
        if shared is not None:
            prefix = f".{prefix}"
            for earlier in shared.glob(f".{_PREFIX}*"):  # of a first node that was lost with all its processes
                shutil.rmtree(earlier, ignore_errors=True)
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=shared)).absolute()
        try:
            with own_memory(place, corpus) as memory, _in_use(path):
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
        """The directory of compiled programs, see ``ExecutableCache``."""
        return self.path / "programs"

    @property
    def states(self) -> Path:
        """The directory of whole states, between two generations, see ``SharedMemoryStore``."""
        return self.memory / _STATES

    @property
    def copies(self) -> Path:
        """The directory of copies of other ranks' slices, see ``swift.elastic.state.copies``."""
        return self.memory / _COPIES

    @property
    def sockets(self) -> Path:
        """The directory of sockets, which only the user that runs this may enter."""
        return (self.memory / SPILL).resolve() / _SOCKETS

    @property
    def corpus(self) -> Path | None:
        """The index of the corpus on this node; None where there is none."""
        link = self.memory / _CORPUS
        return link.resolve() if link.is_symlink() else None

    @property
    def handed(self) -> Path:
        """The directory of what is handed over when ranks leave or return, see ``swift.elastic.state.handover``."""
        return self.path / "handed"

    @property
    def snapshots(self) -> Path:
        """The directory of states without slots, that are to be saved or were restored."""
        return self.path / "snapshots"

    def remove(self) -> None:
        """Removes what no other node sees; any process may, whose supervisor is gone."""
        _remove_memory(self.memory)
        if self.snapshots.is_symlink():
            shutil.rmtree(self.path, ignore_errors=True)
