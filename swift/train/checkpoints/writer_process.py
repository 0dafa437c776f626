"""A process that writes small arrays with Orbax for a process that is one of several hosts.

Orbax would wait there until all hosts save the same, even to compare the path. This process is none of them. What it
writes are the files of a checkpoint without the values, see ``reserve_arrays``.
"""

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from swift.checkpoint.storage.orbax_files import write_arrays
from swift.runlog.lock.run_lock import writes_checkpoints

_CLOSING_S = 10.0


class WriterProcess:
    """The process, which starts at once and ends with this one.

    Args:
        run_dir: run directory. The next run in it waits until this process has ended.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._start()

    def write(self, path: Path, arrays: Mapping[str, np.ndarray], *, progress: Callable[[], None]) -> None:
        """Writes arrays, see ``write_arrays``; another process is started if this one has ended.

        Args:
            path: directory to make.
            arrays: arrays by name.
            progress: function to call once a second.
        """
        if not self._process.is_alive():
            self._start()
        try:
            self._pipe.send((path, dict(arrays)))
            while not self._pipe.poll(1.0):
                progress()
            error = self._pipe.recv()
        except (EOFError, OSError) as gone:
            raise OSError(errno.EIO, "the process that writes checkpoints has ended") from gone
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(_CLOSING_S)
        self._process.kill()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        start = multiprocessing.get_context("spawn").Process  # a copy of this process would have JAX's locks
        self._process = start(target=_serve, args=(theirs, self._run_dir), name="writer", daemon=True)
        self._process.start()
        theirs.close()


def _serve(pipe: Connection, run_dir: Path) -> None:
    """Writes what comes through a pipe until that is closed."""
    for one in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # those of a whole container: the last iteration is to be written yet
        signal.signal(one, signal.SIG_IGN)
    jax.config.update("jax_platforms", "cpu")  # the accelerators belong to the process that trains
    with suppress(EOFError, OSError), writes_checkpoints(run_dir):
        while True:
            pipe.send(_error_of(*pipe.recv()))
    os._exit(0)  # a regular exit would wait for threads of a failed save, which Orbax leaves behind for minutes


def _error_of(path: Path, arrays: Mapping[str, Any]) -> Exception | None:
    try:
        write_arrays(path, arrays)
    except OSError as error:
        return OSError(error.errno, error.strerror or str(error))
    except Exception as error:  # of any library: those may have no way through a pipe
        return ValueError(str(error))
    return None
