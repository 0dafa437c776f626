"""Detection of failed processes by their deadlines: silent or late ones, and killed ones that do not die.

The exit of a process is detected where its parent collects it, see ``swift.elastic.transport.child_processes``.
"""

from collections.abc import Iterator

from swift.elastic.membership.commands import Kill
from swift.elastic.membership.generation import Generation
from swift.elastic.membership.run_status import ProcessState, ProcessStatus, RunStatus


def unkillable(run: RunStatus, time: float) -> list[ProcessStatus]:
    """Returns the processes that were killed and have not died in time."""
    limit_s = run.deadlines.dying
    return [status for status in run.statuses.values() if status.is_dying and time - status.killed > limit_s]


def overdue(run: RunStatus, time: float) -> Iterator[Kill]:
    """Yields the processes to kill; members of a generation that is about to end have no deadline in it."""
    limits, generation = run.deadlines, run.generation
    for status in run.statuses.values():
        if status.state is ProcessState.STARTING and not status.is_dying and time - status.seen > limits.start:
            yield Kill(status.member, f"was not ready {limits.start:g} s after its start")
        if status.is_present and time - status.seen > limits.heartbeat:
            yield Kill(status.member, f"sent no heartbeat for {limits.heartbeat:g} s")
    if generation is None or run.is_broken(generation):
        return
    if any(status.is_dying for status in run.members_of(generation)):
        return
    if generation.is_live:
        yield from _behind(run, generation, time - generation.since)
    elif not run.is_finishing_previous(generation):
        yield from _late(run, generation, time - generation.since)


def _behind(run: RunStatus, generation: Generation, waited_s: float) -> Iterator[Kill]:
    """Yields the members that are behind the others, in a live generation without progress."""
    if waited_s <= run.deadlines.progress:
        return
    newest = max(status.entered for status in run.members_of(generation))
    for status in run.members_of(generation):
        if status.entered < newest:
            yield Kill(status.member, f"is still in iteration {status.entered}, others are in {newest}")


def _late(run: RunStatus, generation: Generation, waited_s: float) -> Iterator[Kill]:
    """Yields the members that the others wait for to form a generation."""
    limits = run.deadlines
    if unconnected(run, generation, generation.since + waited_s):
        return
    for member in generation.not_departed or generation.not_formed:
        limit_s = limits.progress if member in generation.linked else limits.forming
        if waited_s > limit_s:
            yield Kill(member, f"did not form generation {generation.form.number} in {limit_s:g} s")


def unconnected(run: RunStatus, generation: Generation, time: float) -> str:
    """Describes what several members wait for of which none has connected to the others in time; empty otherwise.

    Any of them may be the one that the others wait for. Where all are restarted with it, no other is to take the blame.
    """
    limit_s = run.deadlines.forming
    is_late = time - generation.since > limit_s and len(generation.form.members) > 1
    is_any_known = generation.is_live or generation.not_departed or generation.linked or generation.held
    if run.policy.recovery == "live" or is_any_known or not is_late:
        return ""
    return f"no process was connected to all others in {limit_s:g} s"
