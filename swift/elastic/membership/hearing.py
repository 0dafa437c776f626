"""Messages of processes, as the membership remembers them until its next decision."""

from dataclasses import replace
from typing import TypeVar

from swift.elastic.membership.commands import Commands, Enter, Kill
from swift.elastic.membership.events import Beat, Departed, Done, Formed, Message, Ready, Took
from swift.elastic.membership.status import ProcessStatus, State
from swift.elastic.membership.view import MembershipView

View = TypeVar("View", bound=MembershipView)


def hear(view: View, message: Message) -> tuple[View, Commands]:
    """The membership after a message.

    A dead process that speaks was frozen, cut off or retired: it is killed before it can do harm.
    """
    member = message.member
    status = view.statuses[member.process]
    if member != status.member or not status.is_there:
        return view, (Kill(member, f"incarnation {member.incarnation} speaks after its death"),)
    status = replace(status, seen=message.time)
    match message:
        case Ready(number=number):
            is_news = status.state is State.STARTING or _is_under_way(view, number)
            return view.with_statuses(replace(status, state=State.WAITING) if is_news else status), ()
        case Departed():
            return _departed(view.with_statuses(status), message)
        case Formed():
            return _formed(view.with_statuses(status), message), ()
        case Beat():
            return _progressed(view, status, message), ()
        case Took():
            return _took(view.with_statuses(status), message), ()
        case Done():
            return _done(view.with_statuses(status), message), ()


def _is_under_way(view: MembershipView, number: int) -> bool:
    """Whether it is the newest generation, or members should still run the one before."""
    generation = view.generation
    if generation is None:
        return False
    return number == generation.form.number or (generation.form.after is not None and number == view.went)


def _departed(view: View, left: Departed) -> tuple[View, Commands]:
    generation = view.generation
    if generation is None or left.number != generation.form.number or left.member not in generation.staying:
        return view, ()
    generation = replace(generation, since=left.time, left=generation.left | {left.member})
    enter = () if generation.staying else (Enter(generation.form.number, generation.form.members),)
    return replace(view, generation=generation), enter


def _formed(view: View, formed: Formed) -> View:
    generation, (member, number, held, time, found) = view.generation, formed
    if generation is None or number != generation.form.number or member not in generation.missing:
        return view
    all_held = {**generation.held, member: held}
    return replace(view, generation=replace(generation, since=time, held=all_held, found=generation.found | found))


def _progressed(view: View, status: ProcessStatus, beat: Beat) -> View:
    """A generation under way leaves members to run in the one before only where it waits for an iteration."""
    generation = view.generation
    if generation is None or beat.number != view.went or status.lived != view.went:
        return view.with_statuses(status)
    if beat.finished > status.finished and (generation.is_live or generation.form.after is not None):
        generation = replace(generation, since=beat.time)
    updated = view.with_statuses(replace(status, entered=beat.entered, finished=beat.finished))
    return replace(updated, generation=generation)


def _took(view: View, took: Took) -> View:
    generation = view.generation
    if took.part != "link" or generation is None or took.number != generation.form.number or generation.is_live:
        return view
    return replace(view, generation=replace(generation, since=took.time, linked=generation.linked | {took.member}))


def _done(view: View, done: Done) -> View:
    generation = view.generation
    if generation is None or not generation.is_live or done.number != generation.form.number:
        return view
    return replace(view, generation=replace(generation, done=generation.done | {done.member}))
