"""Detection of failed processes by their deadlines: silent or late ones, and killed ones that do not die.

The exit of a process is detected where its parent collects it, see ``swift.elastic.transport.children``.

A process in a system call that does not return (state D) cannot be killed: after ``Deadlines.dying`` it is retired, and
the next generation forms without it. Nothing that it may still do can harm the run:

- Once SIGKILL was sent, it runs no further instruction of its own. The kernel may complete the system call: a write to
  a file under a temporary name, which is never renamed. Its sockets and memory belong to the old generation, which no
  other process still uses.
- If the signal has not reached it because its node does not respond either, it is alone: the others have left the
  generation and closed their sockets, so it can finish no iteration that needs them. The next generation has new
  sockets, its own coordination service and devices, and admits its members only. Messages of a retired process are
  ignored; states that it keeps have the stamp of an older generation and belong to a process that is never restarted.
"""

from collections.abc import Iterator
from typing import NamedTuple

from swift.elastic.membership.messages import Kill
from swift.elastic.membership.status import Generation, ProcessState, ProcessStatus, RunStatus


class Stall(NamedTuple):
    """End of a generation of which no single member is known to have failed.

    Attributes:
        reason: cause, in a few words.
        deadline: name of the deadline that all of them have exceeded; empty if there is none.
    """

    reason: str
    deadline: str = ""


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
    if unformed(run, generation, generation.since + waited_s):
        return
    for member in generation.not_departed or generation.not_formed:
        limit_s = limits.progress if member in generation.linked else limits.forming
        if waited_s > limit_s:
            yield Kill(member, f"did not form generation {generation.form.number} in {limit_s:g} s")


def unformed(run: RunStatus, generation: Generation, time: float) -> Stall | None:
    """Returns the end of a generation that all members are late to form; None if some are not, or none is.

    Any of them may be the one for which the others wait, or all have the same trouble. Where a death restarts all,
    no single one is to take the blame.
    """
    waited_s, limits, members = time - generation.since, run.deadlines, generation.form.members
    is_any_further = generation.is_live or generation.not_departed or generation.member_states
    if run.policy.recovery == "live" or is_any_further or len(members) == 1:
        return None
    if not generation.linked and waited_s > limits.forming:
        return Stall(f"no process was connected to all others in {limits.forming:g} s", "forming")
    if generation.linked >= set(members) and waited_s > limits.progress:
        return Stall(f"no process had its program in {limits.progress:g} s", "progress")
    return None
