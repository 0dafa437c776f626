"""What the supervisor and the keeper of checkpoints say to each other: JSON, a line each."""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from swift.elastic.membership import Process, ShardLayout, Stamp


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
        generation: of the stamp under which the parts are kept.
        processes: of that generation.
    """

    step: int | None
    generation: int
    processes: tuple[Process, ...]


class Reshard(NamedTuple):
    """Cut a state anew for the ranks of a generation, and keep for every process its part.

    Attributes:
        stamp: of the state, as processes have handed it over.
        cut: how it is cut.
        generation: of the stamp under which the parts are kept.
        processes: of that generation.
    """

    stamp: Stamp
    cut: ShardLayout
    generation: int
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
        generation: for which a state was wanted; 0: for none.
    """

    what: Literal["save", "load", "recut"]
    step: int | None
    why: str
    generation: int = 0


CheckpointCommand = SaveCheckpoint | LoadCheckpoint | Reshard
CheckpointAnswer = Saved | Kept | Loaded | Anew | Failed


def command_line(command: CheckpointCommand) -> str:
    """A command as a line."""
    match command:
        case SaveCheckpoint(stamp, holders, is_full, is_elsewhere):
            said: dict[str, Any] = {"save": stamp.step, "generation": stamp.generation, "holders": _lists(holders)}
            said |= {"is_full": is_full, "elsewhere": is_elsewhere}
        case LoadCheckpoint(step, generation, processes):
            said = {"load": step, "generation": generation, "processes": _lists(processes)}
        case Reshard(stamp, cut, generation, processes):
            said = {"recut": stamp, "cut": [_lists(cut.processes), cut.generations]}
            said |= {"generation": generation, "processes": _lists(processes)}
    return json.dumps(said) + "\n"


def read_command(line: str) -> CheckpointCommand:
    """The command of a line."""
    said = json.loads(line)
    if "load" in said:
        return LoadCheckpoint(said["load"], said["generation"], _processes(said["processes"]))
    if "recut" in said:
        processes, generations = said["cut"]
        cut = ShardLayout(_processes(processes), tuple(generations))
        return Reshard(Stamp(*said["recut"]), cut, said["generation"], _processes(said["processes"]))
    holders = _processes(said["holders"])
    return SaveCheckpoint(Stamp(said["generation"], said["save"]), holders, said["is_full"], said["elsewhere"])


def answer_line(answer: CheckpointAnswer) -> str:
    """An answer as a line."""
    match answer:
        case Saved(step, seconds, path, facts):
            said: dict[str, Any] = {"saved": step, "seconds": seconds, "path": path, "facts": facts}
        case Kept(step, text):
            said = {"kept": step, "text": text}
        case Loaded(stamp, lines, facts):
            said = {"loaded": stamp.step, "generation": stamp.generation, "lines": lines, "facts": facts}
        case Anew(stamp, lines, facts):
            said = {"anew": stamp.step, "generation": stamp.generation, "lines": lines, "facts": facts}
        case Failed(what, step, why, generation):
            said = {"failed": what, "step": step, "why": why, "generation": generation}
    return json.dumps(said) + "\n"


def read_answer(line: str) -> CheckpointAnswer:
    """The answer of a line."""
    said = json.loads(line)
    if "saved" in said:
        return Saved(said["saved"], said["seconds"], said["path"], said["facts"])
    if "kept" in said:
        return Kept(said["kept"], said["text"])
    if "loaded" in said:
        return Loaded(Stamp(said["generation"], said["loaded"]), said["lines"], said["facts"])
    if "anew" in said:
        return Anew(Stamp(said["generation"], said["anew"]), said["lines"], said["facts"])
    return Failed(said["failed"], said["step"], said["why"], said["generation"])


def _lists(processes: Sequence[Process]) -> list[list[int]]:
    return [[*process.worker, process.rank] for process in processes]


def _processes(lists: list[list[int]]) -> tuple[Process, ...]:
    return tuple(Process((pipeline, stage), rank) for pipeline, stage, rank in lists)
