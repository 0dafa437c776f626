"""Whether a run directory may be taken: its owner, and whether that still lives. No files, clocks or threads here.

On the machine of its owner the process decides: it is there, or it is gone. On any other the heartbeat does, which is
watched by the clock of the one who asks: clocks of two machines are never compared where it matters.
"""

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Self

BEAT_S = 5.0
"""Seconds between two heartbeats of an owner."""
SILENCE_S = 60.0
"""After so many seconds without a heartbeat an owner on another machine counts as dead."""
WATCH_S = 2 * BEAT_S
"""So many of them are watched at least, however old the last heartbeat seems: clocks and time stamps may be wrong."""
_VERSION = 1


@dataclass(frozen=True)
class ProcessTable:
    """A table of processes, in which a number stands for one process.

    Attributes:
        host: the machine's name, for people.
        boot: of this start of the machine; empty where the system does not tell.
        processes: the space of process numbers, which a container has for itself; empty where the system has none.
    """

    host: str
    boot: str
    processes: str

    @property
    def is_known(self) -> bool:
        """Whether another process can be told to be in the same place."""
        return bool(self.boot and self.processes)


@dataclass(frozen=True)
class Owner:
    """A process that has a run directory.

    Attributes:
        place: in which its number counts.
        pid: its number.
        started: when it was started, in the system's own ticks: numbers are used again. None where that is not known.
        since: when it took the directory, ISO 8601.
        token: random, so that no two leases are equal.
    """

    place: ProcessTable
    pid: int
    started: int | None
    since: str
    token: str

    def encode(self) -> bytes:
        """A lease file's content."""
        return json.dumps({"version": _VERSION} | asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """The owner in a lease file; None where it is not whole, or of another version."""
        try:
            said = json.loads(content)
            if said.pop("version") != _VERSION:
                return None
            owner = cls(ProcessTable(**said.pop("place")), **said)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        texts = (owner.place.host, owner.place.boot, owner.place.processes, owner.since, owner.token)
        numbers = (owner.pid, 0 if owner.started is None else owner.started)
        is_sound = all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)
        return owner if is_sound and owner.pid > 0 else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.place.host}"


class Verdict(Enum):
    """What is known of a lease's owner."""

    LIVES = "lives"
    DEAD = "dead"
    UNSURE = "unsure"


@dataclass(frozen=True)
class Watch:
    """What was seen of a lease.

    Attributes:
        process_is_there: whether its process is, as far as this machine can tell; None: it cannot.
        has_beaten: whether a heartbeat has come while it was watched.
        watched_s: since it was first seen, or since the last heartbeat.
        age_s: of the last heartbeat when it was first seen, by whatever clocks there are.
    """

    process_is_there: bool | None
    has_beaten: bool
    watched_s: float
    age_s: float


def judge(owner: Owner | None, here: ProcessTable, watch: Watch) -> Verdict:
    """Whether the owner of a lease lives.

    Args:
        owner: of the lease; None where it cannot be read, being written or damaged.
        here: the place of the process that asks.
        watch: what it has seen.
    """
    is_local = owner is not None and here.is_known and owner.place == here and owner.started is not None
    if is_local and watch.process_is_there is not None:
        return Verdict.LIVES if watch.process_is_there else Verdict.DEAD
    if watch.has_beaten:
        return Verdict.LIVES
    silent_s = watch.watched_s + min(max(watch.age_s, 0.0), SILENCE_S - WATCH_S)
    return Verdict.DEAD if silent_s >= SILENCE_S else Verdict.UNSURE
