"""Failure detection by deadlines: finds processes that are silent or late, and killed processes that do not die.

The exit of a process is detected by its parent, which collects the exit status: ``swift.elastic.transport.children``.

A process in a system call that does not return (state D) cannot be killed. After ``Deadlines.dying`` the supervisor
retires it, and the next generation forms without it. A retired process can no longer harm the run:

- Once SIGKILL has arrived, the process runs no further instruction. The kernel may still complete the system call, but
  files are written under temporary names, and this one is never renamed. The sockets and memory of the process belong
  to the old generation, which is no longer used.
- If SIGKILL has not arrived because the node does not respond either, the process is isolated: the other members have
  left the generation and closed their sockets, so it cannot finish an iteration with them. The next generation has new
  sockets, its own coordination service and devices, and admits only its members. Messages of a retired process are
  ignored; the states that it stores have the stamp of an older generation, and it is never restarted to offer them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from swift.elastic.membership.messages import Kill
from swift.elastic.membership.status import Generation, ProcessState, ProcessStatus, RunStatus


class Stall(NamedTuple):
    """The end of a generation for which no single member can be blamed.

    Attributes:
        reason: cause, in a few words.
        deadline: name of the deadline that all members have exceeded; empty if there is none.
    """

    reason: str
    deadline: str = ""


def unkillable(run: RunStatus, time: float) -> list[ProcessStatus]:
    """Returns the processes that were killed but have not died within ``Deadlines.dying``."""
    limit_s = run.deadlines.dying
    return [status for status in run.statuses.values() if status.is_dying and time - status.killed > limit_s]


def overdue(run: RunStatus, time: float) -> Iterator[Kill]:
    """Yields a ``Kill`` for each process that has missed a deadline.

    Members of a generation that is ending anyway, because a member has died or is dying, have no deadline in it.
    """
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
    """Yields a ``Kill`` for each member that holds up a live generation: the others wait in a later iteration."""
    if waited_s <= run.deadlines.progress:
        return
    newest = max(status.entered for status in run.members_of(generation))
    for status in run.members_of(generation):
        if status.entered < newest:
            yield Kill(status.member, f"is still in iteration {status.entered}, others are in {newest}")


def _late(run: RunStatus, generation: Generation, waited_s: float) -> Iterator[Kill]:
    """Yields a ``Kill`` for each member that has taken too long to form a generation."""
    limits = run.deadlines
    if unformed(run, generation, generation.since + waited_s):
        return
    # No member can connect before every member has left the old generation, so leaving is what to wait for first.
    for member in generation.not_departed or generation.not_formed:
        limit_s = limits.progress if member in generation.linked else limits.forming
        if waited_s > limit_s:
            yield Kill(member, f"did not form generation {generation.form.number} in {limit_s:g} s")


def unformed(run: RunStatus, generation: Generation, time: float) -> Stall | None:
    """Returns a stall if all members are late to form a generation, or None if only some or none of them are.

    If all are late, any of them may be the one that blocks the others, or all may have the same problem. Where a death
    restarts all processes, blaming one of them would be a guess.
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
