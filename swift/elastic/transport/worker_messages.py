"""What the supervisor and a process say to each other: JSON, a line each, through the pipes of the process.

A line is the name of its kind and the kind's fields; what either side does not know is an error of the program.
"""

from typing import Any, NamedTuple

from swift.elastic.membership import (
    Beat,
    Departed,
    Done,
    Enter,
    Form,
    Formed,
    Member,
    Message,
    Ready,
    Stamp,
    StartGeneration,
    Took,
)
from swift.elastic.transport.codec import Codec


class FormGroup(NamedTuple):
    """``Form`` as a member hears it.

    Attributes:
        form: what is to be formed.
        address: of the generation's coordination service.
    """

    form: Form
    address: str


class Halt(NamedTuple):
    """To all members of a generation: run on until this iteration is done, keep a snapshot, and wait."""

    number: int
    after: int


class Hang(NamedTuple):
    """To a member: never end the next iteration."""


class Stop(NamedTuple):
    """To a member: end."""


class Record(NamedTuple):
    """What an iteration came to, see ``metrics.jsonl``."""

    record: dict[str, Any]


class Planned(NamedTuple):
    """What a generation runs, see ``plan_facts``."""

    number: int
    facts: dict[str, Any]


class SnapshotKept(NamedTuple):
    """A member has its part of a state, without slots, among its snapshots.

    Attributes:
        member: whose.
        stamp: of the state.
        loss: of a batch that is not trained on, by this state; nats per token. None where there was no time for it.
    """

    member: Member
    stamp: Stamp
    loss: float | None


class SnapshotMissed(NamedTuple):
    """A member cannot keep its part of a state that was to be saved.

    Attributes:
        member: whose.
        stamp: of the state.
        why: in a few words.
    """

    member: Member
    stamp: Stamp
    why: str


class DataUnreadable(NamedTuple):
    """The data of the next iteration, or of an evaluation, cannot be read.

    Attributes:
        member: which says so; it waits for the next generation with the state it has.
        number: of the generation.
        why: a line.
    """

    member: Member
    number: int
    why: str


WorkerCommand = FormGroup | Enter | StartGeneration | Halt | Hang | Stop
WorkerNews = Message | Record | Planned | SnapshotKept | SnapshotMissed | DataUnreadable


WORKER_COMMANDS = Codec[WorkerCommand](FormGroup, Enter, StartGeneration, Halt, Hang, Stop)
WORKER_NEWS = Codec[WorkerNews](
    *(Ready, Departed, Formed, Beat, Took, Done),
    *(Record, Planned, SnapshotKept, SnapshotMissed, DataUnreadable),
    implied=("member", "time"),  # the supervisor knows better who has sent a line, and when it came
)
