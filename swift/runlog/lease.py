"""The lease of a run directory: only its owner may write there, and a dead owner can be replaced.

    .lease-3.json    the third owner of the directory, see ``Owner``; its modification time is the last heartbeat

A lease file is created exclusively (O_EXCL), so two processes cannot create the same one, and its content never
changes. A process that takes over creates the file with the next number, checks again that no other process has taken
over in the meantime, and removes the dead owner's file. An owner whose file is gone has lost the directory. Readers
need no lease.

To observers on its own machine, an owner is alive as long as its process exists. To observers on other machines, it is
alive as long as its heartbeat changes, timed by the observer's own clock: clocks of two machines are never compared.
``judge`` decides this from observations alone, without files, clocks or threads.
"""

import fcntl
import json
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

from swift.errors import RunError, SettingError
from swift.tasks import start_thread

BEAT_S = 5.0
"""Seconds between heartbeats of an owner."""
SILENCE_S = 60.0
"""Seconds without a heartbeat after which an owner on another machine counts as dead."""
WATCH_S = 2 * BEAT_S
"""Minimum time in seconds to watch, however old the last heartbeat seems: clocks and timestamps may be wrong."""
_VERSION = 1
_PREFIX, _SUFFIX = ".lease-", ".json"
_LONGEST = 4096
_LOOK_S, _WRITERS_S = 0.5, 60.0
_TRIES = 20
"""Attempts to take a directory while other processes try to take it too."""


@dataclass(frozen=True)
class ProcessTable:
    """A process table, within which process IDs are unique.

    Attributes:
        host: name of the machine, for messages.
        boot: ID of this boot of the machine; empty if the system has none.
        processes: PID namespace, which differs between containers; empty if the system has none.
    """

    host: str
    boot: str
    processes: str

    @property
    def is_known(self) -> bool:
        """Whether this table can be compared with another process's table."""
        return bool(self.boot and self.processes)


@dataclass(frozen=True)
class Owner:
    """A process that owns a run directory.

    Attributes:
        place: process table that the process ID belongs to.
        pid: process ID.
        started: start of the process in ticks since boot, because process IDs are reused; None if unknown.
        since: time at which the process took the directory, ISO 8601.
        token: random text, so that no two leases are equal.
    """

    place: ProcessTable
    pid: int
    started: int | None
    since: str
    token: str

    def encode(self) -> bytes:
        """Returns the content of a lease file."""
        return json.dumps({"version": _VERSION} | asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Parses a lease file's content; returns None if it is incomplete or of another version."""
        try:
            fields = json.loads(content)
            if fields.pop("version") != _VERSION:
                return None
            owner = cls(ProcessTable(**fields.pop("place")), **fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        texts = (owner.place.host, owner.place.boot, owner.place.processes, owner.since, owner.token)
        numbers = (owner.pid, 0 if owner.started is None else owner.started)
        is_sound = all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)
        return owner if is_sound and owner.pid > 0 else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.place.host}"


class Verdict(Enum):
    """A verdict on whether a lease's owner is alive."""

    LIVES = "lives"
    DEAD = "dead"
    UNSURE = "unsure"


@dataclass(frozen=True)
class LeaseObservation:
    """The observations of a lease by a process that watches it.

    Attributes:
        process_is_there: whether the owner's process exists; None if this machine cannot determine it.
        has_beaten: whether the heartbeat changed while the lease was watched.
        watched_s: seconds since the lease was first seen.
        age_s: age in seconds of the last heartbeat when the lease was first seen; wrong by the difference between the
            file system's clock and this machine's.
    """

    process_is_there: bool | None
    has_beaten: bool
    watched_s: float
    age_s: float


def judge(owner: Owner | None, here: ProcessTable, watch: LeaseObservation) -> Verdict:
    """Decides whether the owner of a lease is alive, dead, or must be watched for longer.

    Args:
        owner: owner of the lease; None if the file is damaged, not readable or still being written.
        here: process table of the observer.
        watch: observations of the lease.
    """
    is_local = owner is not None and here.is_known and owner.place == here and owner.started is not None
    if is_local and watch.process_is_there is not None:
        return Verdict.LIVES if watch.process_is_there else Verdict.DEAD
    if watch.has_beaten:
        return Verdict.LIVES
    # Capped, so that a wrong clock cannot declare an owner dead without watching it for ``WATCH_S``.
    silent_s = watch.watched_s + min(max(watch.age_s, 0.0), SILENCE_S - WATCH_S)
    return Verdict.DEAD if silent_s >= SILENCE_S else Verdict.UNSURE


@dataclass(frozen=True)
class LeaseFile:
    """A lease file, as it was read.

    Attributes:
        number: number of the owner, from 1.
        path: path of the file.
        content: content of the file; empty if this process may not read it.
        beat_ns: time of the last heartbeat by the file system's clock, in nanoseconds since 1970.
    """

    number: int
    path: Path
    content: bytes
    beat_ns: int

    @property
    def owner(self) -> Owner | None:
        """The owner; None if the content is damaged, not written yet or not readable."""
        return Owner.decode(self.content)


def _lease_path(run_dir: Path, number: int) -> Path:
    """Returns the path of the lease file for a directory's ``number``-th owner."""
    return run_dir / f"{_PREFIX}{number}{_SUFFIX}"


def _make_lease(path: Path, owner: Owner) -> bool:
    """Creates a lease file; returns False if another process has already created it.

    Raises:
        SettingError: the directory cannot be written to.
    """
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


def read_leases(run_dir: Path) -> list[LeaseFile]:
    """Reads all lease files of a directory, the oldest first."""
    names = [path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for path in run_dir.glob(f"{_PREFIX}*{_SUFFIX}")]
    numbers = sorted(int(name) for name in names if name.isdecimal())
    leases = (_read_lease(number, _lease_path(run_dir, number)) for number in numbers)
    return [lease for lease in leases if lease is not None]


def _read_lease(number: int, path: Path) -> LeaseFile | None:
    """Reads a lease file; returns None if it is gone.

    Opening the file makes a network file system query its server for changes.
    """
    try:
        with path.open("rb") as file:
            return LeaseFile(number, path, file.read(_LONGEST), os.fstat(file.fileno()).st_mtime_ns)
    except FileNotFoundError:
        return None
    except PermissionError:  # another user's lease, whose heartbeat can still be watched
        with suppress(FileNotFoundError):
            return LeaseFile(number, path, b"", path.stat().st_mtime_ns)
        return None
    except OSError as error:
        raise SettingError("--run-dir", str(path.parent), f"cannot be read: {error.strerror}") from error


def _lease_content(path: Path) -> bytes:
    """Returns the content of a lease file; raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return file.read(_LONGEST)


def this_process() -> Owner:
    """Describes this process as an owner that takes a directory now."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return Owner(_here(), os.getpid(), _started("self"), since, secrets.token_hex(16))


def process_is_there(owner: Owner) -> bool | None:
    """Returns whether an owner's process still runs on this machine; a zombie does not count as running."""
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    started = _started(str(owner.pid))
    return True if started is None else started == owner.started


def _here() -> ProcessTable:
    boot, processes = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    return ProcessTable(socket.gethostname(), boot, processes)


def _started(pid: str) -> int | None:
    """Returns a process's start in ticks since boot; -1 if it has ended, None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name before it may contain spaces and brackets
    return -1 if state in "ZX" else int(fields[18])


class Lease:
    """This process's right to write to a run directory, for the duration of a ``with`` block.

    Args:
        run_dir: run directory.
        path: lease file, created by ``acquire_lease``.
        owner: owner of the lease.
        clock: returns seconds, by a clock that keeps running while the machine sleeps.
    """

    def __init__(self, run_dir: Path, path: Path, owner: Owner, clock: Callable[[], float]):
        self.owner = owner
        self._run_dir, self._path, self._content, self._clock = run_dir, path, owner.encode(), clock
        self._renewed, self._is_lost = clock(), False
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        try:
            self._thread = start_thread(self._beat, name="lease")
        except RunError:
            remove_lease(self._run_dir, self.owner)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(timeout=1.0)  # it may hang in a stalled file system
        remove_lease(self._run_dir, self.owner)

    def renew(self) -> None:
        """Renews the heartbeat, unless the lease is lost; raises OSError if the lease cannot be read or touched."""
        now = self._clock()
        try:
            self._is_lost = self._is_lost or _lease_content(self._path) != self._content
            if not self._is_lost:
                os.utime(self._path)
        except FileNotFoundError:
            self._is_lost = True
        self._renewed = now

    def check(self, *, may_look: bool = True) -> None:
        """Raises RunError if this process no longer owns the directory; call it before each write.

        Args:
            may_look: whether to read the lease file if the last heartbeat was long ago, since another process may have
                declared this one dead. False in a thread that must not wait for a file system.
        """
        if may_look and not self._is_lost and self._clock() - self._renewed > SILENCE_S - WATCH_S:
            try:
                self.renew()
            except OSError as error:
                raise RunError(
                    f"{self._run_dir} cannot be reached ({error.strerror}), and another process may have taken it: "
                    "stopped; continue with --resume"
                ) from error
        if self._is_lost:
            raise RunError(
                f"{self._run_dir} no longer belongs to this process: {self._successor()}: stopped, nothing more was "
                "written; continue with --resume when no other process does"
            )

    def _successor(self) -> str:
        with suppress(OSError, SettingError):
            owners = [lease.owner for lease in read_leases(self._run_dir)]
            for owner in reversed(owners):
                if owner is not None:
                    return f"{owner} took it at {owner.since}"
        return "its lease is gone"

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S) and not self._is_lost:
            with suppress(OSError):  # the next heartbeat may succeed
                self.renew()


def acquire_lease(
    run_dir: Path,
    owner: Owner | None = None,
    *,
    report: Callable[[str], None] = lambda _: None,
    is_there: Callable[[Owner], bool | None] | None = None,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Takes a run directory, possibly from a dead owner.

    A process that saves a checkpoint outlives its supervisor until the save is done. This function waits for such a
    process before it replaces anything: both may only be suspended, in which case the owner keeps its lease.

    Args:
        run_dir: run directory; must exist.
        owner: new owner; None for this process.
        report: called with one line if it takes time to determine whether an owner is alive.
        is_there: returns whether an owner's process is running, or None if that cannot be determined.
        clock: returns seconds. By default, an owner is watched by a clock that stops while this machine sleeps, as an
            owner on this machine does too; the new lease uses a clock that keeps running.
        sleep: waits for a number of seconds.

    Raises:
        SettingError: another process owns the directory or writes checkpoints there, or the directory cannot be
            written to; nothing was written.
    """
    owner, is_there = owner or this_process(), is_there or process_is_there
    watching, clock = clock or time.monotonic, clock or _clock
    for _ in range(_TRIES):
        leases = read_leases(run_dir)
        if not all(_is_dead(lease, owner.place, report, is_there, watching, sleep) for lease in leases):
            continue  # a lease has changed: look again
        if not _writers_have_ended(run_dir, leases, watching, sleep):
            continue  # a lease has changed: an owner was suspended and has woken up
        path = _lease_path(run_dir, max((lease.number for lease in leases), default=0) + 1)
        if not _make_lease(path, owner):
            continue  # another process was quicker
        try:
            # Check again: an owner that was judged dead may have renewed its heartbeat, or another process taken over.
            if {lease for lease in read_leases(run_dir) if lease.path != path} <= set(leases):
                for lease in leases:
                    lease.path.unlink(missing_ok=True)
                return Lease(run_dir, path, owner, clock)
            path.unlink(missing_ok=True)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        sleep(random.uniform(0, 0.1))  # processes that gave way to each other must not meet again
    raise SettingError("--run-dir", str(run_dir), "other processes take it at the same time; try again")


def remove_lease(run_dir: Path, owner: Owner) -> None:
    """Removes an owner's lease, if it has one; any thread may call this."""
    with suppress(OSError, SettingError):
        for lease in read_leases(run_dir):
            if lease.content == owner.encode():
                lease.path.unlink(missing_ok=True)


def last_heartbeat(run_dir: Path) -> int | None:
    """Returns the time of a run directory's last heartbeat, in nanoseconds since 1970, or None if it has no owner."""
    return max((lease.beat_ns for lease in read_leases(run_dir)), default=None)


def living_owner(
    run_dir: Path, report: Callable[[str], None] = lambda _: None, sleep: Callable[[float], None] = time.sleep
) -> LeaseFile | None:
    """Finds the lease of a living owner, without taking the directory; returns None if there is none.

    An owner on another machine is watched for two heartbeat intervals.

    Args:
        run_dir: run directory.
        report: called with one line if an owner has to be watched.
        sleep: waits for a number of seconds.

    Raises:
        SettingError: the directory cannot be read.
    """
    here, start_time, is_told = this_process().place, time.monotonic(), False
    first = {lease.path: lease.beat_ns for lease in read_leases(run_dir)} if run_dir.is_dir() else {}
    while first:
        watched_s = time.monotonic() - start_time
        for lease in read_leases(run_dir):
            owner = lease.owner
            is_running = process_is_there(owner) if owner is not None and owner.place == here else None
            has_beaten = lease.beat_ns != first.get(lease.path, lease.beat_ns)
            if judge(owner, here, LeaseObservation(is_running, has_beaten, watched_s, 0.0)) is Verdict.LIVES:
                return lease
            if is_running is False:
                first.pop(lease.path, None)
        if watched_s > WATCH_S:
            break
        if first and not is_told:
            is_told = True
            report(f"{run_dir} has an owner: waiting up to {WATCH_S:g} s for a heartbeat")
        sleep(_LOOK_S)
        first = {path: beat_ns for path, beat_ns in first.items() if path.exists()}
    return None


@contextmanager
def writes_checkpoints(run_dir: Path) -> Iterator[None]:
    """Lets only one process of this machine at a time write a run's checkpoints, while the block runs.

    The directory's next owner waits for the end of the block, see ``acquire_lease``.

    Raises:
        SettingError: another process is still writing after a minute.
    """
    descriptor, deadline = os.open(run_dir, os.O_RDONLY), time.monotonic() + _WRITERS_S
    try:
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                raise _still_writing(run_dir)
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _writers_have_ended(
    run_dir: Path, leases: list[LeaseFile], clock: Callable[[], float], sleep: Callable[[float], None]
) -> bool:
    """Waits until no earlier process writes checkpoints; returns False if a lease changes in the meantime.

    Raises:
        SettingError: another process is still writing after a minute.
    """
    try:
        descriptor = os.open(run_dir, os.O_RDONLY)
    except OSError:  # the directory is missing: creating the lease reports that
        return True
    try:
        deadline = clock() + _WRITERS_S
        while not _locked(descriptor, fcntl.LOCK_SH):  # shared: several processes may wait at the same time
            if read_leases(run_dir) != leases:
                return False
            if clock() > deadline:
                raise _still_writing(run_dir)
            sleep(_LOOK_S)
        return True
    finally:
        os.close(descriptor)


def _still_writing(run_dir: Path) -> SettingError:
    allowed = "an earlier process is still writing a checkpoint, or is suspended: wait for it, or end it"
    return SettingError("--run-dir", str(run_dir), allowed)


def _locked(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems cannot lock directories: go on without the lock
        return True
    return True


def _is_dead(
    lease: LeaseFile,
    here: ProcessTable,
    report: Callable[[str], None],
    is_there: Callable[[Owner], bool | None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Watches a lease until its owner counts as dead; returns False if the lease disappears or changes.

    Raises:
        SettingError: the owner is alive.
    """
    start_time, first, has_reported = clock(), lease, False
    age_s = time.time() - lease.beat_ns / 1e9
    while True:
        owner, has_beaten = lease.owner, lease.beat_ns != first.beat_ns
        is_running = is_there(owner) if owner is not None and owner.place == here else None
        verdict = judge(owner, here, LeaseObservation(is_running, has_beaten, clock() - start_time, age_s))
        if verdict is Verdict.LIVES:
            raise _refusal(lease)
        if verdict is Verdict.DEAD:
            return True
        if not has_reported:
            report(
                f"{lease.path.parent} has an owner, {owner or 'unknown'}: waiting up to {SILENCE_S:g} s for a heartbeat"
            )
            has_reported = True
        sleep(_LOOK_S)
        now = _read_lease(lease.number, lease.path)
        # An unreadable lease may have been half-written: a change of its content then does not mean a new owner.
        if now is None or (now.content != first.content and first.owner is not None):
            return False
        lease = now


def _refusal(lease: LeaseFile) -> SettingError:
    owner, age_s = lease.owner, max(0.0, time.time() - lease.beat_ns / 1e9)
    since = "" if owner is None else f" since {owner.since}"
    allowed = f"belongs to {owner or 'another process'}{since} (heartbeat {age_s:.0f} s old): wait for it or end it"
    return SettingError("--run-dir", str(lease.path.parent), allowed)


def _clock() -> float:
    # macOS has no CLOCK_BOOTTIME; its CLOCK_MONOTONIC keeps running during sleep, unlike time.monotonic().
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
