"""The owner of a run directory, and the verdict on whether it still lives. No files, clocks or threads here.

On the owner's own machine, the owner lives as long as its process exists. From any other machine, it lives as long as
its heartbeat changes, timed by the clock of the process that asks: clocks of two machines are never compared.
"""

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Self

BEAT_S = 5.0
"""Seconds between two heartbeats of an owner."""
SILENCE_S = 60.0
"""Seconds without a heartbeat after which an owner on another machine counts as dead."""
WATCH_S = 2 * BEAT_S
"""Least seconds of watching, however old the last heartbeat seems: clocks and time stamps may be wrong."""
_VERSION = 1


@dataclass(frozen=True)
class ProcessTable:
    """A process table, within which a process number is unique.

    Attributes:
        host: name of the machine, for people.
        boot: identity of this boot of the machine; empty if the system has none.
        processes: PID namespace, of which every container has its own; empty if the system has none.
    """

    host: str
    boot: str
    processes: str

    @property
    def is_known(self) -> bool:
        """Whether it can be compared with the table of another process."""
        return bool(self.boot and self.processes)


@dataclass(frozen=True)
class Owner:
    """A process that owns a run directory.

    Attributes:
        place: process table in which its number is valid.
        pid: process number.
        started: start of the process in ticks of the system, since numbers are reused; None if unknown.
        since: time at which it took the directory, ISO 8601.
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
        """Parses the owner in a lease file; None if it is incomplete or of another version."""
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
    """A verdict on a lease's owner."""

    LIVES = "lives"
    DEAD = "dead"
    UNSURE = "unsure"


@dataclass(frozen=True)
class Watch:
    """Observations of a lease.

    Attributes:
        process_is_there: whether its process exists; None if this machine cannot know.
        has_beaten: whether a heartbeat came while it was watched.
        watched_s: seconds since it was first seen, or since the last heartbeat.
        age_s: age of the last heartbeat when it was first seen, in seconds; off by the difference between the clocks
            of the file system and of this machine.
    """

    process_is_there: bool | None
    has_beaten: bool
    watched_s: float
    age_s: float


def judge(owner: Owner | None, here: ProcessTable, watch: Watch) -> Verdict:
    """Judges whether the owner of a lease lives.

    Args:
        owner: owner of the lease; None if it cannot be read, since it is being written or damaged.
        here: table of the process that asks.
        watch: its observations.
    """
    is_local = owner is not None and here.is_known and owner.place == here and owner.started is not None
    if is_local and watch.process_is_there is not None:
        return Verdict.LIVES if watch.process_is_there else Verdict.DEAD
    if watch.has_beaten:
        return Verdict.LIVES
    silent_s = watch.watched_s + min(max(watch.age_s, 0.0), SILENCE_S - WATCH_S)
    return Verdict.DEAD if silent_s >= SILENCE_S else Verdict.UNSURE
