"""Indexes of corpora that outlast a run: one process of a machine reads a corpus, and all others find what it has cut.

Whoever makes an index holds a lock, which is free when it dies, and touches the lock's file as long as it is alive. Who
waits for one that is frozen makes the index itself: two that are made at once do not disturb each other.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swift.data.config import DataConfig
from swift.data.files import DataError
from swift.data.index import CorpusState, IndexProgress, corpus_state, is_sound, make_index, remove_index

_BEAT_S, _PAUSE_S, _PATIENCE_S, _TOLD_S = 1.0, 0.2, 10.0, 5.0
_KEPT_S = 30 * 86_400
"""How long an index is kept that nobody uses."""


def find_index(
    config: DataConfig, cache: Path, tell: Callable[[str], None], patience_s: float = _PATIENCE_S
) -> Path | None:
    """The index of a corpus, which is made where there is none.

    Args:
        config: the data.
        cache: the directory of indexes; is made.
        tell: says a line: how far it is, or why there is none.
        patience_s: after so long without a sign of life nobody waits any more for the process that makes the index.

    Returns:
        Its directory; None where it could not be told from one of another corpus, or cannot be written: then everybody
        has to read the corpus.

    Raises:
        SettingError: the source cannot be read, or a split would have no document.
    """
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(2):  # a file may be written to while it is read
            state = corpus_state(config)
            if state is None:
                return None
            path = cache / state.name
            was_made = _make_unless_found(config, path, state, tell, patience_s)
            if not was_made or state == corpus_state(config):
                _forget_old(cache, but=path)
                return path
        tell("the corpus changes while it is read: every process reads it for itself")
    except DataError:
        pass  # which the first that reads the file tells better
    except OSError as error:
        tell(f"the corpus is not kept in {cache} ({error.strerror or error}): every process reads it for itself")
    return None


def _make_unless_found(
    config: DataConfig, path: Path, state: CorpusState, tell: Callable[[str], None], patience_s: float
) -> bool:
    """Has a sound index there. Whether it was made here."""
    lock, seen, since = path.with_suffix(".lock"), 0, time.monotonic()
    while not is_sound(path, state.newest_ns):
        with _alone(lock) as is_alone:
            beat = lock.stat().st_mtime_ns
            if beat != seen:
                seen, since = beat, time.monotonic()
            if not is_alone and time.monotonic() - since < patience_s:
                time.sleep(_PAUSE_S)
                continue
            if is_alone:  # what is here is of those who have died
                for half in path.parent.glob(f".{path.name}.*"):
                    remove_index(half)
            remove_index(path)
            with _beating(lock):
                make_index(config, path, _teller(tell))
            return True
    with suppress(OSError):  # an index may be read where nobody can write
        os.utime(path)
    return False


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether no other process or thread is here."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except OSError:  # somebody has it, or this file system has no locks
            is_alone = False
        yield is_alone


@contextmanager
def _beating(path: Path) -> Iterator[None]:
    """With a file that is touched again and again, as long as this process is not frozen."""
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


def _teller(tell: Callable[[str], None]) -> Callable[[IndexProgress], None]:
    """Says now and then how far it is."""
    told = time.monotonic()

    def say(progress: IndexProgress) -> None:
        nonlocal told
        if time.monotonic() - told > _TOLD_S:
            told = time.monotonic()
            done, num = progress.num_done, progress.num_documents
            tell(f"reads the corpus: {done:,} of {num:,} documents, {progress.num_bytes / 1e6:,.0f} MB")

    return say


def _forget_old(cache: Path, but: Path) -> None:
    """Removes indexes that nobody has used for long."""
    for path in cache.iterdir():
        with suppress(OSError):
            if path != but and time.time() - path.stat().st_mtime > _KEPT_S:
                if path.is_dir():
                    remove_index(path)
                else:
                    path.unlink()
