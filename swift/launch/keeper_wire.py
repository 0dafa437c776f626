"""What the supervisor and the keeper of checkpoints say to each other: JSON, a line each."""

import json
from typing import Any, Literal, NamedTuple

from swift.mesh.epochs import Process, Stamp


class Save(NamedTuple):
    """Write a checkpoint of the parts that processes have kept.

    Attributes:
        stamp: of the state.
        holders: whose parts, one process for every stage and rank.
    """

    stamp: Stamp
    holders: tuple[Process, ...]


class Load(NamedTuple):
    """Read a checkpoint, and keep for every process its part.

    Attributes:
        step: of the checkpoint; None: the newest.
        epoch: of the stamp under which the parts are kept.
    """

    step: int | None
    epoch: int


class Saved(NamedTuple):
    """A checkpoint is there.

    Attributes:
        step: after this iteration.
        seconds: that it took.
        path: the name of its directory.
        facts: what else the events say of it.
    """

    step: int
    seconds: float
    path: str
    facts: dict[str, Any]


class Loaded(NamedTuple):
    """The parts of all processes are kept.

    Attributes:
        stamp: under which.
        lines: where they came from, for people.
        facts: the same for the events.
    """

    stamp: Stamp
    lines: list[str]
    facts: dict[str, Any]


class Failed(NamedTuple):
    """Nothing came of a command.

    Attributes:
        what: of which.
        step: its iteration; None where the newest checkpoint was asked for and there is none.
        why: a line.
    """

    what: Literal["save", "load"]
    step: int | None
    why: str


Command = Save | Load
Answer = Saved | Loaded | Failed


def command_line(command: Command) -> str:
    """A command as a line."""
    match command:
        case Save(stamp, holders):
            lists = [[*process.worker, process.rank] for process in holders]
            said: dict[str, Any] = {"save": stamp.step, "epoch": stamp.epoch, "holders": lists}
        case Load(step, epoch):
            said = {"load": step, "epoch": epoch}
    return json.dumps(said) + "\n"


def read_command(line: str) -> Command:
    """The command of a line."""
    said = json.loads(line)
    if "load" in said:
        return Load(said["load"], said["epoch"])
    holders = tuple(Process((pipeline, stage), rank) for pipeline, stage, rank in said["holders"])
    return Save(Stamp(said["epoch"], said["save"]), holders)


def answer_line(answer: Answer) -> str:
    """An answer as a line."""
    match answer:
        case Saved(step, seconds, path, facts):
            said: dict[str, Any] = {"saved": step, "seconds": seconds, "path": path, "facts": facts}
        case Loaded(stamp, lines, facts):
            said = {"loaded": stamp.step, "epoch": stamp.epoch, "lines": lines, "facts": facts}
        case Failed(what, step, why):
            said = {"failed": what, "step": step, "why": why}
    return json.dumps(said) + "\n"


def read_answer(line: str) -> Answer:
    """The answer of a line."""
    said = json.loads(line)
    if "saved" in said:
        return Saved(said["saved"], said["seconds"], said["path"], said["facts"])
    if "loaded" in said:
        return Loaded(Stamp(said["epoch"], said["loaded"]), said["lines"], said["facts"])
    return Failed(said["failed"], said["step"], said["why"])
