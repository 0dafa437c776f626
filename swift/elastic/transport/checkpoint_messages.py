"""What the supervisor and the keeper of checkpoints say to each other: JSON, a line each."""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from swift.elastic.membership.protocol import Process, ShardLayout, Stamp


class SaveCheckpoint(NamedTuple):
    """Write a checkpoint of the parts that processes have kept.

    Attributes:
        stamp: of the state.
        holders: whose parts, one process for every stage and rank.
        is_full: save all experts, whatever K is.
        is_elsewhere: where there is room for it, since it cannot be written where it belongs.
    """

    stamp: Stamp
    holders: tuple[Process, ...]
    is_full: bool = False
    is_elsewhere: bool = False


class LoadCheckpoint(NamedTuple):
    """Read a checkpoint, and keep for every process its part.

    Attributes:
        step: of the checkpoint; None: the newest.
        epoch: of the stamp under which the parts are kept.
        processes: of that epoch.
    """

    step: int | None
    epoch: int
    processes: tuple[Process, ...]


class Reshard(NamedTuple):
    """Cut a state anew for the ranks of an epoch, and keep for every process its part.

    Attributes:
        stamp: of the state, as processes have handed it over.
        cut: how it is cut.
        epoch: of the stamp under which the parts are kept.
        processes: of that epoch.
    """

    stamp: Stamp
    cut: ShardLayout
    epoch: int
    processes: tuple[Process, ...]


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


class Kept(NamedTuple):
    """A checkpoint is not where it belongs, but where there was room for it.

    Attributes:
        step: after this iteration.
        text: a line on the place, and on how to resume from there.
    """

    step: int
    text: str


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


class Anew(NamedTuple):
    """A state is cut anew, and the parts of all processes are kept.

    Attributes:
        stamp: under which.
        lines: where the slices of lost ranks came from, for people.
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
        epoch: for which a state was wanted; 0: for none.
    """

    what: Literal["save", "load", "recut"]
    step: int | None
    why: str
    epoch: int = 0


Command = SaveCheckpoint | LoadCheckpoint | Reshard
Answer = Saved | Kept | Loaded | Anew | Failed


def command_line(command: Command) -> str:
    """A command as a line."""
    match command:
        case SaveCheckpoint(stamp, holders, is_full, is_elsewhere):
            said: dict[str, Any] = {"save": stamp.step, "epoch": stamp.epoch, "holders": _lists(holders)}
            said |= {"is_full": is_full, "elsewhere": is_elsewhere}
        case LoadCheckpoint(step, epoch, processes):
            said = {"load": step, "epoch": epoch, "processes": _lists(processes)}
        case Reshard(stamp, cut, epoch, processes):
            said = {"recut": stamp, "cut": [_lists(cut.processes), cut.epochs]}
            said |= {"epoch": epoch, "processes": _lists(processes)}
    return json.dumps(said) + "\n"


def read_command(line: str) -> Command:
    """The command of a line."""
    said = json.loads(line)
    if "load" in said:
        return LoadCheckpoint(said["load"], said["epoch"], _processes(said["processes"]))
    if "recut" in said:
        processes, epochs = said["cut"]
        cut = ShardLayout(_processes(processes), tuple(epochs))
        return Reshard(Stamp(*said["recut"]), cut, said["epoch"], _processes(said["processes"]))
    holders = _processes(said["holders"])
    return SaveCheckpoint(Stamp(said["epoch"], said["save"]), holders, said["is_full"], said["elsewhere"])


def answer_line(answer: Answer) -> str:
    """An answer as a line."""
    match answer:
        case Saved(step, seconds, path, facts):
            said: dict[str, Any] = {"saved": step, "seconds": seconds, "path": path, "facts": facts}
        case Kept(step, text):
            said = {"kept": step, "text": text}
        case Loaded(stamp, lines, facts):
            said = {"loaded": stamp.step, "epoch": stamp.epoch, "lines": lines, "facts": facts}
        case Anew(stamp, lines, facts):
            said = {"anew": stamp.step, "epoch": stamp.epoch, "lines": lines, "facts": facts}
        case Failed(what, step, why, epoch):
            said = {"failed": what, "step": step, "why": why, "epoch": epoch}
    return json.dumps(said) + "\n"


def read_answer(line: str) -> Answer:
    """The answer of a line."""
    said = json.loads(line)
    if "saved" in said:
        return Saved(said["saved"], said["seconds"], said["path"], said["facts"])
    if "kept" in said:
        return Kept(said["kept"], said["text"])
    if "loaded" in said:
        return Loaded(Stamp(said["epoch"], said["loaded"]), said["lines"], said["facts"])
    if "anew" in said:
        return Anew(Stamp(said["epoch"], said["anew"]), said["lines"], said["facts"])
    return Failed(said["failed"], said["step"], said["why"], said["epoch"])


def _lists(processes: Sequence[Process]) -> list[list[int]]:
    return [[*process.worker, process.rank] for process in processes]


def _processes(lists: list[list[int]]) -> tuple[Process, ...]:
    return tuple(Process((pipeline, stage), rank) for pipeline, stage, rank in lists)
