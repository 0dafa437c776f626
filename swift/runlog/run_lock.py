"""A run directory for one process at a time: the lease that its owner holds and renews.

    .lease-3.json    the third owner of the directory, see ``lease.Owner``; its modification time is the last heartbeat

An owner's file is made once, under a name that nobody else can make at the same time (O_EXCL), and its content never
changes. Who takes over makes the next number, looks again for others that came in between, and removes the file of the
dead; an owner whose file is gone has lost the directory. Readers need no lease.
"""

import fcntl
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from swift.errors import RunError, SettingError
from swift.runlog.lease import BEAT_S, SILENCE_S, WATCH_S, Owner, ProcessTable, Verdict, Watch, judge

_PREFIX, _SUFFIX = ".lease-", ".json"
_LONGEST = 4096
_LOOK_S, _WRITERS_S = 0.5, 60.0
_TRIES = 20
"""How often somebody else may come in between."""


@dataclass(frozen=True)
class _Found:
    """A lease file as it was read."""

    number: int
    path: Path
    content: bytes
    beat_ns: int

    @property
    def owner(self) -> Owner | None:
        return Owner.decode(self.content)


class Lease:
    """A run directory that is this process's, as long as the block lasts.

    Args:
        run_dir: the directory.
        path: the lease's file, which was made by ``take``.
        owner: who holds it.
        clock: in seconds; continues while the machine sleeps.
    """

    def __init__(self, run_dir: Path, path: Path, owner: Owner, clock: Callable[[], float]):
        self.owner = owner
        self._run_dir, self._path, self._content, self._clock = run_dir, path, owner.encode(), clock
        self._renewed, self._is_lost = clock(), False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(timeout=1.0)  # the file system may have stalled
        with suppress(OSError):
            if _content(self._path) == self._content:
                self._path.unlink()

    def renew(self) -> None:
        """Beats once; raises OSError where the file system does."""
        now = self._clock()
        try:
            self._is_lost = self._is_lost or _content(self._path) != self._content
            if not self._is_lost:
                os.utime(self._path)
        except FileNotFoundError:
            self._is_lost = True
        self._renewed = now

    def check(self, *, may_look: bool = True) -> None:
        """Before anything is written: raises RunError where the directory is not this process's any more.

        Args:
            may_look: look at the lease where there was no heartbeat for long, as another may have taken this process
                for dead; False: for a thread that must not wait for a file system.
        """
        if may_look and not self._is_lost and self._clock() - self._renewed > SILENCE_S - WATCH_S:
            try:
                self.renew()
            except OSError as error:
                raise RunError(
                    f"{self._run_dir} cannot be reached ({error.strerror}), and another may have taken it: stopped; "
                    "go on with --resume"
                ) from error
        if self._is_lost:
            raise RunError(
                f"{self._run_dir} is not this process's any more: {self._successor()}: stopped, nothing more was "
                "written; go on with --resume when nobody else does"
            )

    def _successor(self) -> str:
        with suppress(OSError, SettingError):
            owners = [found.owner for found in _leases(self._run_dir)]
            for owner in reversed(owners):
                if owner is not None:
                    return f"{owner} took it at {owner.since}"
        return "its lease is gone"

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S) and not self._is_lost:
            with suppress(OSError):  # it may be better the next time
                self.renew()


def take(
    run_dir: Path,
    owner: Owner | None = None,
    *,
    tell: Callable[[str], None] = lambda _: None,
    is_there: Callable[[Owner], bool | None] | None = None,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Takes a run directory, also from an owner that is dead.

    Args:
        run_dir: the directory, which is there.
        owner: who takes it; this process unless given.
        tell: is told a line where it takes time to find out whether an owner lives.
        is_there: whether an owner's process is; None where that cannot be told.
        clock: in seconds. Unless given, an owner is watched by one that stands still while this machine sleeps, as an
            owner beside it does; the lease has one that continues.
        sleep: waits for so many seconds.

    Raises:
        SettingError: another has it, or it cannot be written to; nothing was written.
    """
    owner, is_there = owner or this_process(), is_there or process_is_there
    watching, clock = clock or time.monotonic, clock or _clock
    for _ in range(_TRIES):
        found = _leases(run_dir)
        if not all(_is_dead(one, owner.place, tell, is_there, watching, sleep) for one in found):
            continue  # one of them has ended
        path = _path(run_dir, max((one.number for one in found), default=0) + 1)
        if not _made(path, owner):
            continue  # another was quicker
        try:
            if {one for one in _leases(run_dir) if one.path != path} <= set(found):
                for one in found:
                    one.path.unlink(missing_ok=True)
                return Lease(run_dir, path, owner, clock)
            path.unlink(missing_ok=True)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        sleep(random.uniform(0, 0.1))
    raise SettingError("--run-dir", str(run_dir), "others take it at the same time; try again")


def last_beat(run_dir: Path) -> int | None:
    """The time stamp of the last heartbeat of whoever has a run directory; None where nobody has it."""
    return max((found.beat_ns for found in _leases(run_dir)), default=None)


def this_process() -> Owner:
    """A new owner: this process, now."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return Owner(_here(), os.getpid(), _started("self"), since, secrets.token_hex(16))


def process_is_there(owner: Owner) -> bool | None:
    """Whether a process of this machine is the one that took a lease; a zombie is not."""
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    started = _started(str(owner.pid))
    return True if started is None else started == owner.started


@contextmanager
def writes_checkpoints(run_dir: Path) -> Iterator[None]:
    """The only process of this machine that writes the checkpoints of a run, as long as the block lasts.

    A keeper outlives its supervisor until the save that it is in is done; whoever comes after them waits for that.

    Raises:
        SettingError: there is another still, after a minute.
    """
    descriptor, deadline = os.open(run_dir, os.O_RDONLY), time.monotonic() + _WRITERS_S
    try:
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                raise SettingError("--run-dir", str(run_dir), "a process of an earlier run still writes a checkpoint")
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # such as on a network file system, which does not lock directories
        return True
    return True


def _is_dead(
    found: _Found,
    here: ProcessTable,
    tell: Callable[[str], None],
    is_there: Callable[[Owner], bool | None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Watches a lease until its owner is known to be dead; False: the lease is gone, or another has its name.

    Raises:
        SettingError: the owner lives.
    """
    begun, first, has_told = clock(), found, False
    age_s = time.time() - found.beat_ns / 1e9
    while True:
        owner, has_beaten = found.owner, found.beat_ns != first.beat_ns
        there = is_there(owner) if owner is not None and owner.place == here else None
        verdict = judge(owner, here, Watch(there, has_beaten, clock() - begun, age_s))
        if verdict is Verdict.LIVES:
            raise _refusal(found)
        if verdict is Verdict.DEAD:
            return True
        if not has_told:
            tell(
                f"{found.path.parent} has an owner, {owner or 'unknown'}: waits up to {SILENCE_S:g} s for its heartbeat"
            )
            has_told = True
        sleep(_LOOK_S)
        now = _read(found.number, found.path)
        if now is None or (now.content != first.content and first.owner is not None):
            return False
        found = now


def _refusal(found: _Found) -> SettingError:
    owner, age_s = found.owner, max(0.0, time.time() - found.beat_ns / 1e9)
    since = "" if owner is None else f" since {owner.since}"
    allowed = f"is written by {owner or 'another process'}{since} (heartbeat {age_s:.0f} s old): wait for it or end it"
    return SettingError("--run-dir", str(found.path.parent), allowed)


def _made(path: Path, owner: Owner) -> bool:
    """Makes a lease file; whether nobody else had made it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            with open(descriptor, "wb") as file:
                file.write(owner.encode())
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    except FileExistsError:
        return False
    except OSError as error:  # also a full disk
        raise SettingError("--run-dir", str(path.parent), f"cannot be written to: {error.strerror}") from error
    return True


def _leases(run_dir: Path) -> list[_Found]:
    """All leases of a directory, oldest first."""
    numbers = [path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for path in run_dir.glob(f"{_PREFIX}*{_SUFFIX}")]
    found = (_read(number, _path(run_dir, number)) for number in sorted(int(one) for one in numbers if one.isdecimal()))
    return [one for one in found if one is not None]


def _path(run_dir: Path, number: int) -> Path:
    return run_dir / f"{_PREFIX}{number}{_SUFFIX}"


def _read(number: int, path: Path) -> _Found | None:
    """A lease, opened anew, so that a network file system asks its server; without content where that is not for us."""
    try:
        with path.open("rb") as file:
            return _Found(number, path, file.read(_LONGEST), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None
    except PermissionError:
        with suppress(FileNotFoundError):
            return _Found(number, path, b"", path.stat().st_mtime_ns)
        return None
    except OSError as error:
        raise SettingError("--run-dir", str(path.parent), f"cannot be read: {error.strerror}") from error


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LONGEST)


def _here() -> ProcessTable:
    boot, processes = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    return ProcessTable(socket.gethostname(), boot, processes)


def _started(pid: str) -> int | None:
    """When a process was started, in ticks since the machine was; -1 for one that has ended; None: not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # a process's name may have spaces and brackets
    return -1 if state in "ZX" else int(fields[18])


def _clock() -> float:
    # The second is for macOS, where it continues in sleep, and time.monotonic() does not.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
