"""What the supervisor and a process say to each other: JSON, a line each, through the pipes of the process.

A line is the name of its kind and the kind's fields; what either side does not know is an error of the program.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from swift.elastic.membership import (
    Beat,
    Departed,
    Enter,
    Form,
    Formed,
    Go,
    Member,
    Message,
    Process,
    Ready,
    Stamp,
    Took,
)
from swift.errors import RunError


class FormGroup(NamedTuple):
    """``Form`` as a member hears it.

    Attributes:
        form: what is to be formed.
        address: of the generation's coordination service.
    """

    form: Form
    address: str


class StartGeneration(NamedTuple):
    """``Go`` as a member hears it.

    Attributes:
        go: the leave to run.
        written: the last iteration whose record is written.
        is_restored: the state is that of a checkpoint, or cut anew, and lies among every member's snapshots.
    """

    go: Go
    written: int = 0
    is_restored: bool = False


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


class Done(NamedTuple):
    """A member has run all iterations that it is to run in this generation."""

    member: Member
    number: int


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
WorkerNews = Message | Record | Planned | SnapshotKept | SnapshotMissed | Done | DataUnreadable


def order_line(order: WorkerCommand) -> str:
    """A command as a line."""
    match order:
        case FormGroup(form, address):
            return _line("form", number=form.number, members=form.members, after=form.after, address=address)
        case StartGeneration(go, written, is_restored):
            said = {"number": go.number, "stamp": go.stamp, "holders": go.holders}
            return _line("go", **said, written=written, is_restored=is_restored)
        case _:
            return _line(type(order).__name__.lower(), **order._asdict())


def read_order(line: str) -> WorkerCommand:
    """The command of a line."""
    kind, said = _parse(line)
    match kind:
        case "form":
            return FormGroup(Form(said["number"], _members(said["members"]), said["after"]), said["address"])
        case "go":
            go = Go(said["number"], _stamp(said["stamp"]), _members(said["holders"]))
            return StartGeneration(go, said["written"], said["is_restored"])
        case "enter":
            return Enter(said["number"], _members(said["members"]))
        case "halt":
            return Halt(said["number"], said["after"])
        case "hang":
            return Hang()
        case "stop":
            return Stop()
    raise RunError(f"a command that no process knows: {line!r}")


def news_line(kind: type[WorkerNews], **said: Any) -> str:
    """What a member says, as a line: all of ``kind`` but who says it and when, which the supervisor knows better."""
    wanted = [name for name in kind._fields if name not in ("member", "time")]
    assert sorted(said) == sorted(wanted), f"{kind.__name__} has {wanted}"
    return _line(kind.__name__.lower(), **said)


def read_news(line: str, member: Member, time: float) -> WorkerNews:
    """What a member has said in a line that came at ``time``."""
    kind, said = _parse(line)
    match kind:
        case "ready":
            return Ready(member, time, said["number"])
        case "departed":
            return Departed(member, said["number"], time)
        case "formed":
            held = frozenset(Stamp(*pair) for pair in said["held"])
            found = frozenset((_process(place), Stamp(*pair)) for place, pair in said["found"])
            return Formed(member, said["number"], held, time, found)
        case "beat":
            return Beat(member, said["number"], said["entered"], said["finished"], time)
        case "took":
            return Took(member, said["number"], said["part"], said["seconds"], time)
        case "record":
            return Record(said["record"])
        case "planned":
            return Planned(said["number"], said["facts"])
        case "snapshotkept":
            return SnapshotKept(member, Stamp(*said["stamp"]), said["loss"])
        case "snapshotmissed":
            return SnapshotMissed(member, Stamp(*said["stamp"]), said["why"])
        case "done":
            return Done(member, said["number"])
        case "dataunreadable":
            return DataUnreadable(member, said["number"], said["why"])
    raise RunError(f"a message that no supervisor knows: {line!r}")


def _line(kind: str, **said: Any) -> str:
    return json.dumps({"kind": kind} | said, default=sorted) + "\n"


def _parse(line: str) -> tuple[str, Mapping[str, Any]]:
    try:
        said = json.loads(line)
        return said["kind"], said
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"a line that is none of ours: {line!r}") from error


def _stamp(pair: list[int] | None) -> Stamp | None:
    return None if pair is None else Stamp(*pair)


def _members(lists: list[Any]) -> tuple[Member, ...]:
    return tuple(Member(_process(place), incarnation) for place, incarnation in lists)


def _process(place: list[Any]) -> Process:
    (pipeline, stage), rank = place
    return Process((pipeline, stage), rank)
