"""Handling of messages from processes: the membership records them until its next decision."""

from dataclasses import replace
from typing import TypeVar

from swift.elastic.membership.commands import Commands, Enter, Kill
from swift.elastic.membership.events import Departed, Done, Formed, Heartbeat, Message, PartTimed, Ready
from swift.elastic.membership.known_state import KnownState
from swift.elastic.membership.status import ProcessState, ProcessStatus

Known = TypeVar("Known", bound=KnownState)


def after_message(known: Known, message: Message) -> tuple[Known, Commands]:
    """Returns the membership after a message, and the commands that follow at once.

    A process counted as dead that sends a message was frozen, cut off or retired: it is killed before it does harm.
    """
    member = message.member
    status = known.statuses[member.process]
    if member != status.member or not status.is_there:
        return known, (Kill(member, f"incarnation {member.incarnation} is counted as dead and still sends messages"),)
    status = replace(status, seen=message.time)
    match message:
        case Ready(number=number):
            is_news = status.state is ProcessState.STARTING or _is_current(known, number)
            return known.with_statuses(replace(status, state=ProcessState.WAITING) if is_news else status), ()
        case Departed():
            return _after_departed(known.with_statuses(status), message)
        case Formed():
            return _after_formed(known.with_statuses(status), message), ()
        case Heartbeat():
            return _after_heartbeat(known, status, message), ()
        case PartTimed():
            return _after_part(known.with_statuses(status), message), ()
        case Done():
            return _after_done(known.with_statuses(status), message), ()


def _is_current(known: KnownState, number: int) -> bool:
    """Returns whether a generation is the newest, or the one before in which members still finish an iteration."""
    generation = known.generation
    if generation is None:
        return False
    return number == generation.form.number or (generation.form.after is not None and number == known.last_live)


def _after_departed(known: Known, message: Departed) -> tuple[Known, Commands]:
    generation = known.generation
    if generation is None or message.number != generation.form.number or message.member not in generation.not_departed:
        return known, ()
    generation = replace(generation, since=message.time, departed=generation.departed | {message.member})
    enter = () if generation.not_departed else (Enter(generation.form.number, generation.form.members),)
    return replace(known, generation=generation), enter


def _after_formed(known: Known, message: Formed) -> Known:
    generation, (member, number, held, time, found) = known.generation, message
    if generation is None or number != generation.form.number or member not in generation.not_formed:
        return known
    all_held = {**generation.held, member: held}
    return replace(known, generation=replace(generation, since=time, held=all_held, found=generation.found | found))


def _after_heartbeat(known: Known, status: ProcessStatus, beat: Heartbeat) -> Known:
    """Members of the generation before count as making progress only where the newest waits for their iteration."""
    generation = known.generation
    if generation is None or beat.number != known.last_live or status.last_live != known.last_live:
        return known.with_statuses(status)
    if beat.finished > status.finished and (generation.is_live or generation.form.after is not None):
        generation = replace(generation, since=beat.time)
    updated = known.with_statuses(replace(status, entered=beat.entered, finished=beat.finished))
    return replace(updated, generation=generation)


def _after_part(known: Known, timed: PartTimed) -> Known:
    generation = known.generation
    if timed.part != "link" or generation is None or timed.number != generation.form.number or generation.is_live:
        return known
    return replace(known, generation=replace(generation, since=timed.time, linked=generation.linked | {timed.member}))


def _after_done(known: Known, done: Done) -> Known:
    generation = known.generation
    if generation is None or not generation.is_live or done.number != generation.form.number:
        return known
    return replace(known, generation=replace(generation, done=generation.done | {done.member}))
