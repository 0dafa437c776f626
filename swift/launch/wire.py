"""What the supervisor and a process say to each other: JSON, a line each, through the pipes of the process."""

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from swift.mesh.epochs import Beat, Form, Formed, Go, Member, Message, Process, Ready


class Order(NamedTuple):
    """``Form`` as a member hears it.

    Attributes:
        form: what is to be formed.
        address: of the epoch's coordination service.
    """

    form: Form
    address: str


class Stop(NamedTuple):
    """To a member: end."""


class Done(NamedTuple):
    """A member has run all iterations that it is to run."""

    member: Member


def order_line(order: Order | Go | Stop) -> str:
    """A command as a line."""
    match order:
        case Order(form, address):
            text: dict[str, Any] = {"form": form.number, "members": _lists(form.members), "after": form.after}
            return json.dumps(text | {"address": address}) + "\n"
        case Go(number, step, holders):
            return json.dumps({"go": number, "step": step, "holders": _lists(holders)}) + "\n"
        case Stop():
            return json.dumps({"stop": True}) + "\n"


def read_order(line: str) -> Order | Go | Stop:
    """The command of a line."""
    said = json.loads(line)
    if "form" in said:
        return Order(Form(said["form"], _members(said["members"]), said["after"]), said["address"])
    if "go" in said:
        return Go(said["go"], said["step"], _members(said["holders"]))
    return Stop()


def ready_line() -> str:
    """A process waits for the next epoch."""
    return json.dumps({"ready": True}) + "\n"


def formed_line(number: int, held: Collection[int]) -> str:
    """A member is ready to go, and has its state after these iterations."""
    return json.dumps({"formed": number, "held": sorted(held)}) + "\n"


def beat_line(number: int, entered: int, finished: int) -> str:
    """A sign of life: the epoch, the newest iteration begun and the newest ended."""
    return json.dumps({"beat": number, "entered": entered, "finished": finished}) + "\n"


def done_line() -> str:
    """All iterations are run."""
    return json.dumps({"done": True}) + "\n"


def read_message(line: str, member: Member, time: float) -> Message | Done:
    """What a member has said in a line that came at ``time``."""
    said = json.loads(line)
    if "formed" in said:
        return Formed(member, said["formed"], frozenset(said["held"]), time)
    if "beat" in said:
        return Beat(member, said["beat"], said["entered"], said["finished"], time)
    return Done(member) if "done" in said else Ready(member, time)


def _lists(members: Sequence[Member]) -> list[list[int]]:
    return [[*member.process.worker, member.process.rank, member.incarnation] for member in members]


def _members(lists: Sequence[Sequence[int]]) -> tuple[Member, ...]:
    return tuple(Member(Process((pipeline, stage), rank), incarnation) for pipeline, stage, rank, incarnation in lists)
