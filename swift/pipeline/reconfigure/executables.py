"""File cache for compiled programs and plans: one process compiles them, and all processes of the run load them.

A program is bound to the ids of its devices, not to the process that compiled it. Generations with equally many
processes have the same ids (see ``swift.elastic.jax_group``), and keys include the mesh's order of devices. A file can
therefore be used by all processes and by later generations.

Reading never blocks: files are renamed into place, so each is either complete or absent. A lock prevents two processes
from compiling the same program. Its owner may hang, so others wait for the lock only for a limited time. If the disk is
full or the directory unreadable, each process compiles for itself.

This replaces JAX's persistent compilation cache, whose keys differ between processes and which, on CPU, returns
programs that cannot be serialized again: they lack their functions ("NOT_FOUND: Function ...", jax 0.10.2).
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
from swift.models.parameters import root_key
from swift.pipeline.state import TrainState
from swift.pipeline.step.spec import StepSpec

_PATIENCE_S, _PAUSE_S = 30.0, 0.05
_Value = TypeVar("_Value")


class ExecutableCache:
    """Directory of one run's compiled programs and plans; file names do not depend on the code version.

    Files are unpickled, so no other user may be able to write to the directory.

    Args:
        directory: directory of the files; created if it does not exist.
        patience_s: seconds to wait for another process that is compiling the same program before compiling it here;
            together with the compilation, this must stay below ``Deadlines.progress``.
    """

    def __init__(self, directory: Path, *, patience_s: float = _PATIENCE_S):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._patience_s = directory, patience_s

    def __contains__(self, key: object) -> bool:
        """Whether a key has a file, which may be damaged."""
        return self._path(key).exists()

    def get(self, key: object, compiled: Callable[[], Compiled], devices: Sequence[jax.Device]) -> Compiled:
        """Returns the program for a key; if several processes need it at the same time, one of them compiles it.

        Args:
            key: everything that distinguishes this program from others; compared by ``repr``.
            compiled: function that compiles the program, called if it is missing or damaged.
            devices: devices of the program's mesh.
        """
        path = self._path(key)
        before = _made(path)
        content = _read(path)
        if content is not None:
            return _loaded(content, devices)
        with _turn(path, before, self._patience_s):
            content = _read(path)  # another process may have stored it in the meantime
            if content is not None:
                return _loaded(content, devices)
            assert not _has_cache(), "a program from JAX's own cache cannot be serialized again"
            content = _serialized(compiled())
            # All processes run the loaded program, including the one that compiled it; a program that fails to load is
            # not stored.
            program = _loaded(content, devices)
            _write(path, content)
            return program

    def value(self, key: object, make: Callable[[], _Value]) -> _Value:
        """Returns the value for a key, such as a plan, that all processes need and that is slow to compute.

        Args:
            key: everything that distinguishes this value from others; compared by ``repr``.
            make: function that computes the picklable value, called if it is missing or damaged; several processes may
                call it at the same time.
        """
        path = self._value_path(key)
        content = _read(path)
        if content is not None:
            cached_value: _Value = pickle.loads(content)
            return cached_value
        new_value = make()
        _write(path, pickle.dumps(new_value))
        return new_value

    def kept_value(self, key: object) -> Any:
        """Returns the value that a process has stored for a key, see ``value``; None if it is missing or damaged."""
        content = _read(self._value_path(key))
        return None if content is None else pickle.loads(content)

    def _value_path(self, key: object) -> Path:
        return self._path(key).with_suffix(".value")

    def _path(self, key: object) -> Path:
        return self._directory / hashlib.sha256(repr((jax.__version__, key)).encode()).hexdigest()[:32]


def _has_cache() -> bool:
    config: Any = jax.config
    return bool(config.jax_enable_compilation_cache and config.jax_compilation_cache_dir)


def _loaded(content: bytes, devices: Sequence[jax.Device]) -> Compiled:
    payload, inputs, outputs = pickle.loads(content)
    ins, outs = map(jax.tree.structure, (inputs, outputs))
    return serialize_executable.deserialize_and_load(payload, ins, outs, execution_devices=list(devices))


def _serialized(program: Compiled) -> bytes:
    payload, *trees = serialize_executable.serialize(program)
    # Tree structures with nodes of our own classes cannot be pickled; trees of that structure can.
    inputs, outputs = (jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in trees)
    return pickle.dumps((payload, inputs, outputs))


def _write(path: Path, content: bytes) -> None:
    try:
        replace_file(path, hashlib.sha256(content).digest() + content)
    except OSError as error:  # such as a full disk; this process has its own copy
        print(f"could not store a program or plan for other processes: {error}", file=sys.stderr, flush=True)


def _read(path: Path) -> bytes | None:
    """Returns the content of a file, or None if it is missing, damaged or unreadable."""
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    digest, content = whole[:32], whole[32:]
    return content if hashlib.sha256(content).digest() == digest else None


@contextmanager
def _turn(path: Path, before: int | None, patience_s: float) -> Iterator[None]:
    """Waits until no other process is compiling a program, its file has appeared, or ``patience_s`` has elapsed.

    The file has appeared once its name refers to an inode other than ``before``, the inode of a damaged file, or None
    if there was no file. A killed process releases its lock; a process that hangs or is on a lost machine does not.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # without a lock, two processes may compile the same program
            lock = stack.enter_context(path.with_suffix(".lock").open("wb"))
            deadline = time.monotonic() + patience_s
            while not _is_taken(lock) and time.monotonic() < deadline and _made(path) == before:
                time.sleep(_PAUSE_S)
        yield


def _is_taken(lock: BinaryIO) -> bool:
    """Tries to take the lock and returns whether it succeeded; raises OSError if the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _made(path: Path) -> int | None:
    """Returns the inode of a file, or None if there is none."""
    with suppress(OSError):
        return path.stat().st_ino
    return None


def compiled_init(spec: StepSpec, store: ExecutableCache, seed: int) -> Callable[[], TrainState]:
    """Returns the program that creates the state before the first iteration."""
    live = spec.live
    init = jax.jit(lambda: spec.init(root_key(seed)))
    key = "init", live.num_ranks, spec.holding_R.tolist()
    return store.get(key, lambda: init.lower().compile(), list(live.mesh.devices.flat))


def compiled_slots(spec: StepSpec, store: ExecutableCache) -> Callable[[TrainState], TrainState]:
    """Returns the program that fills the slots of a state that has none, such as one from a checkpoint."""
    live = spec.live
    fill = jax.jit(spec.fill_slots)
    key = slots_key(spec)
    return store.get(key, lambda: fill.lower(spec.abstract()).compile(), list(live.mesh.devices.flat))


def slots_key(spec: StepSpec) -> object:
    """Returns the cache key for the program from ``compiled_slots``; the mesh of ``spec`` may be on any devices."""
    return "slots", spec.live.num_ranks, spec.holding_R.tolist()
