"""Timing of the interval between two generations, part by part: recovery from failures or admission of joiners."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from swift.elastic.membership import PARTS, Member, Membership, Process, State

BEFORE_GO = ("leave", "link", "program")
"""Those of ``PARTS`` that a member does before it has formed the generation."""


class Failure(NamedTuple):
    """Why a process is no member any more.

    Attributes:
        since: when it failed: it was killed, was last heard of, or was stuck.
        known: when that was found; in seconds, like ``since``.
        is_one_of_all: all are ended with it.
    """

    since: float
    known: float
    is_one_of_all: bool = False


def failure_of(member: Member, time: float, membership: Membership) -> Failure:
    """The failure of a member that ``membership`` wants to be killed: it was not heard, or all waited for it."""
    status, generation = membership.statuses[member.process], membership.generation
    is_silent = status.state is State.STARTING or time - status.seen > membership.deadlines.heartbeat
    return Failure(status.seen if is_silent or generation is None else generation.since, time)


@dataclass(frozen=True)
class Transition:
    """From what ends a generation to the first iteration of another one; all times are in seconds.

    Attributes:
        since: when the first failure happened, or joiners were admitted.
        failed: who failed; nobody where others only join.
        known: the time up to which what happened is known, or was undetected.
        detection_s: how much of it a failure was not known.
        went: when the generation that follows went; None before.
        newest: the newest iteration that anybody had finished by then.
    """

    since: float
    failed: tuple[Process, ...] = ()
    known: float = -float("inf")
    detection_s: float = 0.0
    went: float | None = None
    newest: int = 0

    def after_failure(self, process: Process, failure: Failure) -> "Transition":
        """With one more failure; where two are undetected at the same time, that time counts once."""
        failed, known = failure.since, failure.known
        undetected_s = max(0.0, min(known, self.since) - failed) + max(0.0, known - max(failed, self.known))
        return replace(
            self,
            since=min(self.since, failed),
            failed=(*self.failed, process),
            known=max(self.known, known),
            detection_s=self.detection_s + undetected_s,
            went=None,
        )

    def durations(self, took: Mapping[str, float], time: float) -> dict[str, float | None]:
        """How long it took until ``time``, and each part of it; None for a part that no member has told.

        Args:
            took: by part, the longest that a member of the generation has told.
            time: when all have finished the first iteration.
        """
        assert self.went is not None
        explained_s = self.detection_s + sum(took.get(part, 0.0) for part in BEFORE_GO)
        found = {f"{'recovery' if self.failed else 'join'}_s": time - self.since}
        if self.failed:
            found["detection_s"] = self.detection_s
        found["agreement_s"] = self.went - self.since - explained_s
        parts = {f"{part}_s": took.get(part) for part in PARTS}
        return {name: round(max(found_s, 0.0), 4) for name, found_s in found.items()} | parts


def recovery_figures(recoveries: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """How long recoveries took.

    Args:
        recoveries: the ``durations`` of each.

    Returns:
        ``recovery_median_s`` and ``recovery_max_s``, None if there was none; and ``recovery_parts``, ``median_s`` and
        ``max_s`` of each part that was told, by name.
    """

    def told(part: str) -> list[float]:
        return [part_s for recovery in recoveries if (part_s := recovery[f"{part}_s"]) is not None]

    whole = told("recovery")
    parts = {part: told(part) for part in ("detection", "agreement", *PARTS)}
    return {
        "recovery_median_s": median(whole) if whole else None,
        "recovery_max_s": max(whole, default=None),
        "recovery_parts": {
            part: {"median_s": median(all_s), "max_s": max(all_s)} for part, all_s in parts.items() if all_s
        },
    }
