"""Indexes of corpora that outlive a run: one process of a machine reads a corpus, and all others use its index.

The process that builds an index holds a lock, which is released when it dies, and touches the lock's file while it is
alive. A process that waits for a frozen one builds the index itself: two builds at once do not disturb each other.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swift.data.config import DataConfig, Mixture
from swift.data.files import ChangedFile, DataError
from swift.data.index import CorpusState, IndexProgress, corpus_state, is_sound, make_index, remove_index
from swift.data.pipeline.check import UntrueOperator
from swift.data.pipeline.elsewhere import ConnectHosts
from swift.data.pipeline.pipeline import Pipeline
from swift.errors import SettingError

_BEAT_S, _PAUSE_S, _PATIENCE_S, _REPORT_S = 1.0, 0.2, 10.0, 5.0
_KEPT_S = 30 * 86_400
"""Seconds for which an unused index is kept."""


def find_index(
    config: DataConfig,
    cache: Path,
    report: Callable[[str], None],
    patience_s: float = _PATIENCE_S,
    connect: ConnectHosts | None = None,
) -> Path | None:
    """Finds the index of a corpus, and builds it if there is none.

    Args:
        config: settings of the data.
        cache: directory of indexes; made if it is missing.
        report: called with a line on the progress, or on why there is no index.
        patience_s: seconds without a sign of life from the process that builds the index, after which others stop
            waiting for it.
        connect: function that connects to other hosts, which begin the documents of texts and pipelines while an index
            of them is built; of a mixture it is called for one source after the other; None: there are none.

    Returns:
        Directory of the index, or of all those of a mixture; None if it cannot be distinguished from that of another
        corpus, or not be written: then every process reads the corpus.

    Raises:
        SettingError: the source cannot be read, a split would have no document, or a host has something else.
    """
    if isinstance(config.source, Mixture):
        found = [find_index(one, cache, report, patience_s, connect) for one in config.components]
        return cache if any(found) else None
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(2):  # a file may be written to while it is read
            state = corpus_state(config)
            if state is None:
                return None
            path = cache / state.name
            try:
                was_made = _make_unless_found(config, path, state, report, patience_s, connect)
            except ChangedFile:
                if isinstance(config.source, Pipeline):  # which may have run for an hour
                    raise
                continue
            if not was_made or state == corpus_state(config):
                _forget_old(cache, but=path)
                return path
        report("the corpus changes while it is read: every process reads it for itself")
    except DataError as error:
        if isinstance(config.source, Pipeline) or isinstance(error, UntrueOperator):  # of an input host
            raise SettingError("DataConfig.source", config.source, str(error)) from error
        # The first read of the file reports it better.
    except OSError as error:
        report(f"the corpus is not kept in {cache} ({error.strerror or error}): every process reads it for itself")
    return None


def _make_unless_found(
    config: DataConfig,
    path: Path,
    state: CorpusState,
    report: Callable[[str], None],
    patience_s: float,
    connect: ConnectHosts | None,
) -> bool:
    """Ensures an intact index; returns whether this call has built it."""
    lock, seen, since = path.with_suffix(".lock"), 0, time.monotonic()
    while not is_sound(path, state.newest_ns):
        with _alone(lock) as is_alone:
            beat = lock.stat().st_mtime_ns
            if beat != seen:
                seen, since = beat, time.monotonic()
            if not is_alone and time.monotonic() - since < patience_s:
                time.sleep(_PAUSE_S)
                continue
            if is_alone:  # all that is here belongs to processes that have died
                for half in path.parent.glob(f".{path.name}.*"):
                    remove_index(half)
            remove_index(path)
            with _beating(lock):
                make_index(config, path, _progress_report(report), report, connect)
            return True
    with suppress(OSError):  # an index can be read from where it cannot be written
        os.utime(path)
    return False


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Locks a file for the block, and yields whether no other process or thread holds it."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except OSError:  # it is held, or this file system has no locks
            is_alone = False
        yield is_alone


@contextmanager
def _beating(path: Path) -> Iterator[None]:
    """Touches a file periodically during the block, as a sign of life."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(_BEAT_S):
            with suppress(OSError):
                os.utime(path)

    os.utime(path)
    thread = threading.Thread(target=beat, name="index", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _progress_report(report: Callable[[str], None]) -> Callable[[IndexProgress], None]:
    """Reports the progress now and then."""
    reported = time.monotonic()

    def say(progress: IndexProgress) -> None:
        nonlocal reported
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            done, num = progress.num_done, progress.num_documents
            report(f"reads the corpus: {done:,} of {num:,} documents, {progress.num_bytes / 1e6:,.0f} MB")

    return say


def _forget_old(cache: Path, but: Path) -> None:
    """Removes indexes that were not used for long."""
    for path in cache.iterdir():
        with suppress(OSError):
            if path != but and time.time() - path.stat().st_mtime > _KEPT_S:
                if path.is_dir():
                    remove_index(path)
                else:
                    path.unlink()
