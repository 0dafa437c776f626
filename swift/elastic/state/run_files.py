"""Temporary directories that the processes of a run share, removed when the run ends.

``node_memory`` creates the memory directory of a node. ``RunFiles`` has the paths in this directory and in the one that
all nodes see. ``DirectoryMender`` restores directories that are removed while the run continues.
"""

import fcntl
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

from swift.elastic.state.store import SPILL
from swift.errors import RunError
from swift.files import replace_file
from swift.tasks import start_thread

_PREFIX, _LOCK, _STATES, _COPIES, _SOCKETS, _CORPUS = "swift-", "lock", "states", "copies", "sockets", "corpus"
_FILES, _DATA = "files", "data.json"
_LOOK_S, _END_S = 1.0, 1.0


@dataclass(frozen=True)
class NodeMemory:
    """The memory directory of a node, with a directory on a disk for files that do not fit.

    Attributes:
        path: memory directory.
        disk: directory on a disk; ``path`` has a link to it.
        corpus: index of the corpus, to which ``path`` also has a link; None if there is none.
    """

    path: Path
    disk: Path
    corpus: Path | None

    def mend(self) -> bool:
        """Restores directories that were removed, as some systems do at the end of a user's session.

        Returns:
            Whether anything was missing. The states in removed directories are lost; processes store their next states
            as usual.

        Raises:
            OSError: a directory cannot be created.
        """
        links = {SPILL: self.disk} | ({} if self.corpus is None else {_CORPUS: self.corpus})
        directories = (self.path / _STATES, self.path / _COPIES, self.disk / _SOCKETS)
        has_links = all((self.path / name).is_symlink() for name in links)
        if has_links and all(directory.is_dir() for directory in directories):
            return False
        for top in (self.path, self.disk):
            _make_in_use(top)
        for directory in directories:
            directory.mkdir(exist_ok=True)
        for name, target in links.items():
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(target.absolute())
        if not (self.path / _LOCK).exists():
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # held until the process ends
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True


@contextmanager
def node_memory(storage: Path, corpus: Path | None = None) -> Iterator[NodeMemory]:
    """Creates this node's memory directory for the duration of the ``with`` block.

    Args:
        storage: directory in which it is created, preferably in shared memory, see ``choose_storage``.
        corpus: index of the corpus, to which the memory directory gets a link.
    """
    remove_leftovers(storage)
    # Hidden until the lock is held; otherwise, another process would remove it as a leftover.
    hidden_path = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getpid()}-", dir=storage))
    disk = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    memory = hidden_path.with_name(hidden_path.name[1:])
    try:
        with (hidden_path / _LOCK).open("w") as lock, _in_use(hidden_path), _in_use(disk):
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name in (_STATES, _COPIES):
                (hidden_path / name).mkdir()
            (disk / _SOCKETS).mkdir()
            (hidden_path / SPILL).symlink_to(disk.absolute())
            if corpus is not None:
                (hidden_path / _CORPUS).symlink_to(corpus.absolute())
            hidden_path.rename(memory)
            yield NodeMemory(memory, disk, corpus)
    finally:
        for path in (hidden_path, memory, disk):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _in_use(directory: Path) -> Iterator[None]:
    """Locks a directory so that systemd does not remove old files from it, see ``man 5 tmpfiles.d``.

    A run that takes weeks has temporary files that are not accessed for days.
    """
    descriptor = _locked(directory)
    try:
        yield
    finally:
        os.close(descriptor)


def _locked(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _make_in_use(directory: Path) -> None:
    """Restores a directory if it was removed, and locks it until the process ends; see ``_in_use``."""
    if not directory.is_dir():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _locked(directory)


def remove_leftovers(storage: Path) -> None:
    """Removes the memory directories of runs whose processes were all killed, to free the memory.

    Args:
        storage: directory in which runs create their memory directories.
    """
    for other in storage.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            is_own = not other.is_symlink() and other.stat().st_uid == os.getuid()
            if not (is_own and (other / SPILL).is_symlink()):  # not a memory directory
                continue
            with (other / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while a live run holds the lock
                _remove_memory(other)


def _remove_memory(memory: Path) -> None:
    """Removes a memory directory and the temporary directories that it links to."""
    for linked in ((memory / SPILL).resolve(), (memory / _FILES).resolve()):
        if linked.name.startswith(_PREFIX):
            shutil.rmtree(linked, ignore_errors=True)
    shutil.rmtree(memory, ignore_errors=True)


@dataclass(frozen=True)
class RunFiles:
    """The two directories that the processes of a run share.

    Attributes:
        path: directory for the configuration and programs, visible to all nodes.
        memory: memory directory of this node for states and sockets, see ``node_memory``.
        mend: restores directories that were removed, and returns whether anything was missing; may raise OSError. Works
            only in the process that created the directories, and does nothing in others.
    """

    path: Path
    memory: Path
    mend: Callable[[], bool] = field(default=lambda: False, compare=False)

    @classmethod
    @contextmanager
    def of(
        cls, config: str, data: Mapping[str, Any], storage: Path, corpus: Path | None = None, shared: Path | None = None
    ) -> Iterator[Self]:
        """Creates a run's directories for the duration of the ``with`` block.

        Args:
            config: operative configuration, as gin text.
            data: state of a data loader when the run begins.
            storage: directory in which the memory directory of this node is created.
            corpus: index of the corpus on this node, see ``find_index``.
            shared: directory that all nodes see; None if there is only one node.
        """
        prefix = f"{_PREFIX}{os.getpid()}-"  # tells which process left a directory behind
        if shared is not None:
            prefix = f".{prefix}"
            for earlier in shared.glob(f".{_PREFIX}*"):  # from a first node that was lost with all its processes
                shutil.rmtree(earlier, ignore_errors=True)
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=shared)).absolute()
        try:
            with node_memory(storage, corpus) as node, _in_use(path):
                scratch = cls(path, node.path)

                def mend() -> bool:
                    was_missing = node.mend()
                    return scratch._fill(config, data, is_alone=shared is None) or was_missing

                mend()
                yield cls(path, node.path, mend)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _fill(self, config: str, data: Mapping[str, Any], *, is_alone: bool) -> bool:
        """Creates missing files and directories; returns whether any were missing."""
        inner = (self.snapshots, self.handed_over)
        if self.config.is_file() and self.programs.is_dir() and all(directory.is_dir() for directory in inner):
            return False
        _make_in_use(self.path)
        if is_alone and not (self.memory / _FILES).is_symlink():
            (self.memory / _FILES).symlink_to(self.path)  # for ``remove_leftovers``, should all processes be killed
        replace_file(self.config, config.encode())
        replace_file(self.path / _DATA, json.dumps(data).encode())
        self.programs.mkdir(exist_ok=True)
        for directory in inner:
            if is_alone:
                (self.memory / directory.name).mkdir(exist_ok=True)
                if not directory.is_symlink():
                    directory.symlink_to(self.memory / directory.name)
            else:  # on the shared file system, since the checkpoint service on the first node reads those of all nodes
                directory.mkdir(exist_ok=True)
        return True

    @property
    def config(self) -> Path:
        """File with the operative configuration, as gin text."""
        return self.path / "config.gin"

    def data(self) -> dict[str, Any]:
        """Reads a data loader's state at the start of the run, to check that all processes read the same data."""
        return json.loads((self.path / _DATA).read_text())

    @property
    def programs(self) -> Path:
        """Directory for compiled programs, see ``ExecutableCache``."""
        return self.path / "programs"

    @property
    def states(self) -> Path:
        """Directory for whole states between two generations, see ``SharedMemoryStore``."""
        return self.memory / _STATES

    @property
    def copies(self) -> Path:
        """Directory for copies of other ranks' slices, see ``SliceCopies``."""
        return self.memory / _COPIES

    @property
    def sockets(self) -> Path:
        """Directory for sockets, which only its owner may enter."""
        return (self.memory / SPILL).resolve() / _SOCKETS

    @property
    def corpus(self) -> Path | None:
        """Index of the corpus on this node; None if there is none."""
        link = self.memory / _CORPUS
        return link.resolve() if link.is_symlink() else None

    @property
    def handed_over(self) -> Path:
        """Directory for states and copies that processes share when ranks leave or return, see ``Handover``."""
        return self.path / "handed"

    @property
    def snapshots(self) -> Path:
        """Directory for states without slots, which are to be saved or were restored."""
        return self.path / "snapshots"

    def remove(self) -> None:
        """Removes the files of this node; called by any process whose supervisor is gone."""
        _remove_memory(self.memory)


class DirectoryMender:
    """Checks a run's directories once a second and restores them if they were removed; a context manager.

    It uses a thread, since the file system may not respond and the main thread has to send heartbeats. If no thread can
    be started, nothing is restored.

    Args:
        mend: creates missing directories, and returns whether any were missing; may raise OSError.
    """

    def __init__(self, mend: Callable[[], bool]):
        self._mend, self._news = mend, SimpleQueue[str]()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        with suppress(RunError):
            self._thread = start_thread(self._work, name="directories")
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the thread, so that it cannot restore directories that the run removes at its end."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def news(self) -> str | None:
        """Returns the next line that tells the user about removed directories, or None if there is none."""
        with suppress(Empty):
            return self._news.get_nowait()
        return None

    def _work(self) -> None:
        last_text = None
        while not self._ended.wait(_LOOK_S):
            text = self._look()
            if text is not None and text != last_text:
                self._news.put(text)
            last_text = text

    def _look(self) -> str | None:
        try:
            if self._mend():
                return "the run's temporary directories were removed; they are made again"
        except OSError as error:
            reason = error.strerror or error
            return f"the run's temporary directories were removed and cannot be made again: {reason}"
        return None
