"""Messages between the supervisor and a worker process, through the pipes of the process."""

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
        form: the generation to be formed.
        address: the address of its coordination service.
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
    """The results of an iteration, see ``metrics.jsonl``."""

    record: dict[str, Any]


class Planned(NamedTuple):
    """The plan of a generation, see ``plan_facts``."""

    number: int
    facts: dict[str, Any]


class SnapshotKept(NamedTuple):
    """A member has its part of a state, without slots, among its snapshots.

    Attributes:
        member: the sender.
        stamp: the stamp of the state.
        loss: the loss of this state on a batch that is not trained on, in nats per token; None: there was no
            time for it.
    """

    member: Member
    stamp: Stamp
    loss: float | None


class SnapshotMissed(NamedTuple):
    """A member cannot keep its part of a state that was to be saved.

    Attributes:
        member: the sender.
        stamp: the stamp of the state.
        why: the reason, in a few words.
    """

    member: Member
    stamp: Stamp
    why: str


class DataUnreadable(NamedTuple):
    """The data of the next iteration, or of an evaluation, cannot be read.

    Attributes:
        member: the sender; it waits for the next generation with the state it has.
        number: the generation.
        why: the reason, a line.
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
