"""Handling of messages from processes: the membership records them until its next decision."""

from dataclasses import replace
from typing import TypeVar

from swift.elastic.membership.commands import Commands, Enter, Kill
from swift.elastic.membership.events import (
    CutRefused,
    Departed,
    Done,
    Formed,
    Heartbeat,
    Loaded,
    Message,
    PhaseTimed,
    Ready,
)
from swift.elastic.membership.run_status import ProcessState, ProcessStatus, RunStatus

RunT = TypeVar("RunT", bound=RunStatus)


def after_message(run: RunT, message: Message) -> tuple[RunT, Commands]:
    """Returns the membership after a message, and the commands that follow at once.

    A process counted as dead that sends a message was frozen, cut off or retired: it is killed before it does harm.
    """
    member = message.member
    status = run.statuses[member.process]
    if member != status.member or not status.is_alive:
        return run, (Kill(member, f"incarnation {member.incarnation} is counted as dead and still sends messages"),)
    if isinstance(message, Heartbeat):  # most messages are: one copy of the status fewer
        return _after_heartbeat(run, status, message), ()
    status = replace(status, seen=message.time)
    match message:
        case Ready(number=number):
            is_news = status.state is ProcessState.STARTING or _is_current(run, number)
            return run.with_statuses(replace(status, state=ProcessState.WAITING) if is_news else status), ()
        case CutRefused(number=number):
            refused = replace(run, moves=run.moves.after_refusal())
            is_news = number == run.number and status.state is ProcessState.FORMING  # otherwise it goes on running
            return refused.with_statuses(replace(status, state=ProcessState.WAITING) if is_news else status), ()
        case Departed():
            return _after_departed(run.with_statuses(status), message)
        case Formed():
            return _after_formed(run.with_statuses(status), message), ()
        case PhaseTimed():
            return _after_phase(run.with_statuses(status), message), ()
        case Loaded():
            return _after_loaded(run.with_statuses(status), message), ()
        case Done():
            return _after_done(run.with_statuses(status), message), ()


def _is_current(run: RunStatus, number: int) -> bool:
    """Returns whether a generation is the newest, or the one before in which members still finish an iteration."""
    generation = run.generation
    if generation is None:
        return False
    return number == generation.form.number or (generation.form.after is not None and number == run.last_live)


def _after_departed(run: RunT, message: Departed) -> tuple[RunT, Commands]:
    generation = run.generation
    if generation is None or message.number != generation.form.number or message.member not in generation.not_departed:
        return run, ()
    waiting_since = message.time if generation.waiting_since is None else generation.waiting_since
    departed = generation.departed | {message.member}
    generation = replace(generation, since=message.time, departed=departed, waiting_since=waiting_since)
    enter = () if generation.not_departed else (Enter(generation.form.number, generation.form.members),)
    return replace(run, generation=generation), enter


def _after_formed(run: RunT, message: Formed) -> RunT:
    generation, (member, number, held, time, found) = run.generation, message
    if generation is None or number != generation.form.number or member not in generation.not_formed:
        return run
    all_held = {**generation.held, member: held}
    return replace(run, generation=replace(generation, since=time, held=all_held, found=generation.found | found))


def _after_heartbeat(run: RunT, status: ProcessStatus, beat: Heartbeat) -> RunT:
    """Members of the generation before count as making progress only where the newest waits for their iteration."""
    generation = run.generation
    if generation is None or beat.number != run.last_live or status.last_live != run.last_live:
        return run.with_statuses(replace(status, seen=beat.time))
    beaten = replace(status, seen=beat.time, entered=beat.entered, finished=beat.finished)
    updated = run.with_statuses(beaten)
    # The first heartbeat of a generation tells the iteration after which it runs; none is about to end before that.
    finished_before = (generation.base or 0) if generation.is_live else status.finished
    if beat.finished > finished_before and status.last_worked != beat.number:
        worked = replace(beaten, last_worked=beat.number)
        updated = replace(run.with_statuses(worked), last_worked=beat.number)
    if beat.finished > status.finished and (generation.is_live or generation.form.after is not None):
        return replace(updated, generation=replace(generation, since=beat.time))
    return updated


def _after_phase(run: RunT, timed: PhaseTimed) -> RunT:
    generation = run.generation
    if generation is None or timed.number != generation.form.number:
        return run
    if timed.phase == "state":
        return run.after_move(generation, timed.time)
    if timed.phase != "link" or generation.is_live:
        return run
    return replace(run, generation=replace(generation, since=timed.time, linked=generation.linked | {timed.member}))


def _after_loaded(run: RunT, loaded: Loaded) -> RunT:
    generation = run.generation
    if generation is None or generation.ahead is None or loaded.number != generation.form.number:
        return run
    return replace(run, generation=replace(generation, loaded=generation.loaded | {loaded.member}))


def _after_done(run: RunT, done: Done) -> RunT:
    generation = run.generation
    if generation is None or not generation.is_live or done.number != generation.form.number:
        return run
    return replace(run, generation=replace(generation, done=generation.done | {done.member}))
