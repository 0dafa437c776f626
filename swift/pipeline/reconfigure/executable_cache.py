"""Compiled programs and plans as files: one process makes them, all that run the same load them.

A program is bound to the ids of its devices, not to the process that compiled it. In generations of equally many
processes the ids are the same (see ``swift.elastic.jax_group``), so a file is good for all processes and for later
generations.

Reading waits for nobody: files come by renaming, so each is whole or not there. A lock keeps two processes from
compiling the same; its owner may be frozen, so others wait for it only so long. Where the
directory is full or cannot be read, each process compiles for itself.

It stands in for JAX's persistent compilation cache, which has other keys in every process and, on CPU, gives programs
that cannot be serialized again: they lack their functions ("NOT_FOUND: Function ...", jax 0.10.2).
"""

import fcntl
import hashlib
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

from swift.files import replace_file
from swift.pipeline.reconfigure.trimming import trimmed

_PATIENCE_S, _PAUSE_S = 30.0, 0.05
_Value = TypeVar("_Value")


class ExecutableCache:
    """A directory of compiled programs, for one run: nothing in a name tells one version of the code from another.

    It is read by unpickling, so nobody else may write there.

    Args:
        directory: is made.
        trims: make programs smaller that are put there, where that is possible, see
            ``swift.pipeline.reconfigure.trimming``. In the worst case the process ends that does so, and nothing was
            put there: it has to be one that may.
        patience_s: how long to wait for another process that compiles what is asked for, before this one compiles it
            itself; with the time that takes it has to be below ``Deadlines.progress``.
    """

    def __init__(self, directory: Path, *, trims: bool = False, patience_s: float = _PATIENCE_S):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._trims, self._patience_s = directory, trims, patience_s

    def __contains__(self, key: object) -> bool:
        """Whether a program is there; it may be damaged."""
        return self._path(key).exists()

    def get(self, key: object, compiled: Callable[[], Compiled], devices: Sequence[jax.Device]) -> Compiled:
        """The program of a key; of several processes that ask at once, one compiles.

        Args:
            key: all that tells this program from another; its ``repr`` counts.
            compiled: compiles it, where there is none or it is damaged.
            devices: of the program's mesh.
        """
        path = self._path(key)
        before = _made(path)
        content = _read(path)
        if content is not None:
            return _loaded(content, devices)
        with _turn(path, before, self._patience_s):
            content = _read(path)  # another may have put it there meanwhile
            if content is not None:
                return _loaded(content, devices)
            assert not _has_cache(), "what comes from JAX's own cache cannot be kept again"
            content = _serialized(compiled(), trims=self._trims and all(one.platform == "cpu" for one in devices))
            # All processes run what was loaded, also who compiled it; and what cannot be loaded is not kept.
            program = _loaded(content, devices)
            _write(path, content)
            return program

    def value(self, key: object, make: Callable[[], _Value]) -> _Value:
        """Something else that all processes need and that takes long to make, a plan say; it can be pickled.

        Args:
            key: all that tells it from another; its ``repr`` counts.
            make: makes it, where it is not there or is damaged. Several processes may, at once.
        """
        path = self._path(key).with_suffix(".value")
        content = _read(path)
        if content is not None:
            kept: _Value = pickle.loads(content)
            return kept
        made = make()
        _write(path, pickle.dumps(made))
        return made

    def _path(self, key: object) -> Path:
        return self._directory / hashlib.sha256(repr((jax.__version__, key)).encode()).hexdigest()[:32]


def _has_cache() -> bool:
    config: Any = jax.config
    return bool(config.jax_enable_compilation_cache and config.jax_compilation_cache_dir)


def _loaded(content: bytes, devices: Sequence[jax.Device]) -> Compiled:
    payload, inputs, outputs = pickle.loads(content)
    ins, outs = map(jax.tree.structure, (inputs, outputs))
    return serialize_executable.deserialize_and_load(payload, ins, outs, execution_devices=list(devices))


def _serialized(program: Compiled, *, trims: bool) -> bytes:
    payload, *trees = serialize_executable.serialize(program)
    if trims:
        payload = trimmed(payload)
    # Structures with nodes of our own cannot be pickled; trees of them can.
    inputs, outputs = (jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in trees)
    return pickle.dumps((payload, inputs, outputs))


def _write(path: Path, content: bytes) -> None:
    try:
        replace_file(path, hashlib.sha256(content).digest() + content)
    except OSError as error:  # a full disk, say: this process has what it needs
        print(f"what was made for all processes is not kept for others: {error}", file=sys.stderr, flush=True)


def _read(path: Path) -> bytes | None:
    """The content of a file, or None where it is not there, not whole, or cannot be read."""
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    digest, content = whole[:32], whole[32:]
    return content if hashlib.sha256(content).digest() == digest else None


@contextmanager
def _turn(path: Path, before: int | None, patience_s: float) -> Iterator[None]:
    """The turn to compile a program: once nobody else does, or it is there, or patience has come to its end.

    It is there once the name has another file than the one ``before``, which could not be read. The lock of a process
    that is killed is free. That of one that is frozen, or on a machine that is gone, is not.
    """
    with ExitStack() as held:
        with suppress(OSError):  # without a lock, two may compile the same
            lock = held.enter_context(path.with_suffix(".lock").open("wb"))
            deadline = time.monotonic() + patience_s
            while not _is_taken(lock) and time.monotonic() < deadline and _made(path) == before:
                time.sleep(_PAUSE_S)
        yield


def _is_taken(lock: BinaryIO) -> bool:
    """Whether the lock is this process's now; raises OSError where the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _made(path: Path) -> int | None:
    """Which file has the name now; None: none that can be read."""
    with suppress(OSError):
        return path.stat().st_ino
    return None
