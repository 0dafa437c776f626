"""Processes that have exceeded a deadline: those to be killed, and those that were killed and do not die."""

from collections.abc import Iterator

from swift.elastic.membership.commands import Kill
from swift.elastic.membership.status import Generation, ProcessStatus, State
from swift.elastic.membership.view import MembershipView


def undead(view: MembershipView, time: float) -> list[ProcessStatus]:
    """The processes that were killed and have not died in time."""
    limit_s = view.deadlines.dying
    return [status for status in view.statuses.values() if status.is_dying and time - status.killed > limit_s]


def overdue(view: MembershipView, time: float) -> Iterator[Kill]:
    """The processes to be killed; members of a generation that is about to end have no deadline in it."""
    limits, generation = view.deadlines, view.generation
    for status in view.statuses.values():
        if status.state is State.STARTING and not status.is_dying and time - status.seen > limits.start:
            yield Kill(status.member, f"was not ready {limits.start:g} s after its start")
        if status.is_present and time - status.seen > limits.heartbeat:
            yield Kill(status.member, f"was not heard for {limits.heartbeat:g} s")
    if generation is None or view.is_broken(generation):
        return
    if any(status.is_dying for status in view.members_of(generation)):
        return
    if generation.is_live:
        yield from _behind(view, generation, time - generation.since)
    elif not view.is_winding_down(generation):
        yield from _late(view, generation, time - generation.since)


def _behind(view: MembershipView, generation: Generation, waited_s: float) -> Iterator[Kill]:
    """The members of a live generation without progress that are not as far as others."""
    if waited_s <= view.deadlines.progress:
        return
    newest = max(status.entered for status in view.members_of(generation))
    for status in view.members_of(generation):
        if status.entered < newest:
            yield Kill(status.member, f"is still in iteration {status.entered}, others are in {newest}")


def _late(view: MembershipView, generation: Generation, waited_s: float) -> Iterator[Kill]:
    """The members that others wait for to form a generation."""
    limits = view.deadlines
    for member in generation.staying or generation.missing:
        limit_s = limits.progress if member in generation.linked else limits.forming
        if waited_s > limit_s:
            yield Kill(member, f"did not form generation {generation.form.number} in {limit_s:g} s")
