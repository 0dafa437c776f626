"""Timing of the transition between two generations, phase by phase: recovery from failures or admission of joiners."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from swift.elastic.membership.events import PHASES
from swift.elastic.membership.members import Member, Process
from swift.elastic.membership.run_status import ProcessState
from swift.elastic.membership.state_machine import Membership

BEFORE_LIVE = ("leave", "link", "program")
"""``PHASES`` that precede a member's ``Formed``."""


class Failure(NamedTuple):
    """The failure of a member.

    Attributes:
        since: time of the failure, in seconds: the member was killed, sent its last message, or got stuck.
        known: time of its detection, in seconds.
        is_one_of_all: whether all members are killed together.
    """

    since: float
    known: float
    is_one_of_all: bool = False


def failure_of(member: Member, time: float, membership: Membership) -> Failure:
    """Returns the failure of a member that ``membership`` has killed because it was silent or late."""
    status, generation = membership.statuses[member.process], membership.generation
    is_silent = status.state is ProcessState.STARTING or time - status.seen > membership.deadlines.heartbeat
    return Failure(status.seen if is_silent or generation is None else generation.since, time)


@dataclass(frozen=True)
class Transition:
    """The time from the end of one generation to the first iteration of another; all times are in seconds.

    Attributes:
        since: time of the first failure, or of the admission of joiners.
        failed: failed processes; empty if others only join.
        known: time up to which every failure is known, or counted as undetected.
        detection_s: duration for which a failure was undetected.
        live_at: time at which the next generation went live; None before.
        newest: newest iteration that any member had finished by then.
        is_move: whether nobody joins, and members take over blocks.
    """

    since: float
    failed: tuple[Process, ...] = ()
    known: float = -float("inf")
    detection_s: float = 0.0
    live_at: float | None = None
    newest: int = 0
    is_move: bool = False

    def after_failure(self, process: Process, failure: Failure) -> "Transition":
        """Returns the same with one more failure; time in which two are undetected counts once."""
        failed, known = failure.since, failure.known
        undetected_s = max(0.0, min(known, self.since) - failed) + max(0.0, known - max(failed, self.known))
        return replace(
            self,
            since=min(self.since, failed),
            failed=(*self.failed, process),
            known=max(self.known, known),
            detection_s=self.detection_s + undetected_s,
            live_at=None,
        )

    def durations(self, phase_times: Mapping[str, float], time: float) -> dict[str, float | None]:
        """Returns the duration until ``time``, and of each phase; None for a phase that no member has reported.

        Args:
            phase_times: longest duration that a member of the generation has reported, by phase.
            time: when all members have finished the first iteration.
        """
        assert self.live_at is not None
        explained_s = self.detection_s + sum(phase_times.get(phase, 0.0) for phase in BEFORE_LIVE)
        what = "recovery" if self.failed else "move" if self.is_move else "join"
        found = {f"{what}_s": time - self.since}
        if self.failed:
            found["detection_s"] = self.detection_s
        found["agreement_s"] = self.live_at - self.since - explained_s
        phases = {f"{phase}_s": phase_times.get(phase) for phase in PHASES}
        return {name: round(max(found_s, 0.0), 4) for name, found_s in found.items()} | phases


def recovery_figures(recoveries: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Summarizes the durations of recoveries.

    Args:
        recoveries: ``durations`` of each recovery.

    Returns:
        ``recovery_median_s`` and ``recovery_max_s``, None if there was none; and ``recovery_parts``, ``median_s`` and
        ``max_s`` of each phase that was reported, by name.
    """

    def reported(phase: str) -> list[float]:
        return [phase_s for recovery in recoveries if (phase_s := recovery[f"{phase}_s"]) is not None]

    whole = reported("recovery")
    phases = {phase: reported(phase) for phase in ("detection", "agreement", *PHASES)}
    return {
        "recovery_median_s": median(whole) if whole else None,
        "recovery_max_s": max(whole, default=None),
        "recovery_parts": {
            phase: {"median_s": median(all_s), "max_s": max(all_s)} for phase, all_s in phases.items() if all_s
        },
    }
