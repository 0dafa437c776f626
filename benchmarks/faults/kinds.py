"""Kinds of faults, and the state of a volley after faults have struck."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from .running import Run

Parameters = Mapping[str, Any]
Draw = Callable[[Random, Run], Parameters]


@dataclass
class Aftermath:
    """Effects of a volley so far, for the judge.

    Attributes:
        dead: names of members that were killed, or will be because they are frozen, each once for every time.
        out_of_reach: names of members on a machine that was cut off, killed or paused, or that could start no threads;
            those that die there are lost.
        heals: ends of faults, with the times when they are due.
        codes: exit codes with which the life may end.
        has_ended: True if the life has to end, or has ended.
        may_be_older: whether a checkpoint was damaged, so that an older one may be restored.
        may_lose_states: whether states and copies in memory were removed, without which a death may cost more.
        excused: iterations whose records were damaged.
        wants_checkpoint: whether a new checkpoint has to be written before all is well.
        awaited: whatever else has to be so before all is well, each with a description for the error.
        may_leave: True if no process was left to remove its files.
        undo: repairs the damage, where the run refuses to continue; None: there is none.
        later: ends of faults once the volley is judged.
        promised: iteration of the checkpoint promised before a fault that may change the record; None: see the record.
        complaints: complaints of the fault itself.
        observed: observations for the record.
    """

    dead: list[str] = field(default_factory=list)
    out_of_reach: set[str] = field(default_factory=set)
    heals: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    codes: set[int] = field(default_factory=set)
    has_ended: bool = False
    may_be_older: bool = False
    may_lose_states: bool = False
    excused: set[int] = field(default_factory=set)
    wants_checkpoint: bool = False
    awaited: list[tuple[Callable[[], bool], str]] = field(default_factory=list)
    may_leave: bool = False
    undo: Callable[[], None] | None = None
    later: list[Callable[[], None]] = field(default_factory=list)
    promised: int | None = None
    complaints: list[str] = field(default_factory=list)
    observed: dict[str, Any] = field(default_factory=dict)

    def lost(self, told: Iterable[dict[str, Any]]) -> set[str]:
        """Finds the members that were killed, and those out of reach whose death the run has reported since."""
        return set(self.dead) | self.out_of_reach & {one["process"] for one in told if one["event"] == "process_died"}

    def heal_after(self, seconds: float, heal: Callable[[], None]) -> None:
        """Schedules the end of a fault after some seconds."""
        self.heals.append((time.monotonic() + seconds, heal))

    def heal_due(self, *, now: bool = False) -> None:
        """Ends the faults that are due, or all."""
        for entry in sorted(self.heals, key=lambda heal: heal[0]):
            if now or time.monotonic() >= entry[0]:
                self.heals.remove(entry)
                entry[1]()


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: for the command line and records.
        strike: does it.
        draw: its parameters, which can be written as JSON.
        fits: whether it can be done to a run.
        ends: whether the life ends with it, so that nothing can follow in the same volley.
        group: of a volley's faults at most one is of the same group; empty: any number.
        is_quiet: whether it strikes at once always: what it is about comes after the life has ended, or takes long.
        regroups: whether members form a new group after it, which another fault may wait for.
    """

    name: str
    strike: Callable[[Run, Parameters, Aftermath], None]
    draw: Draw = lambda _, __: {}
    fits: Callable[[Run], bool] = lambda _: True
    ends: bool = False
    group: str = ""
    is_quiet: bool = False
    regroups: bool = False

    def moments(self, *, regroups: bool) -> list[str]:
        """Moments at which it may strike, see `volleys.Fault`, including those of a forming group."""
        if self.is_quiet:
            return ["now"]
        return ["now", "generation_forming", "generation_forming", "generation_live"] if regroups else ["now", "save"]


def is_launch(run: Run) -> bool:
    """Checks if a run has separate processes for its workers."""
    return run.shape.command == "launch"
