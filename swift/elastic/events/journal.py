"""Journal of a run's processes, for the record and for people: what happens to them, and what it costs.

The supervisor reports each event that it gives to ``Membership.on``, with its outcome. No JAX here, no clock and no
I/O: all times are in seconds of the one clock of the events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from swift.elastic.events.goodput import CAUSES, Goodput
from swift.elastic.events.message_texts import back_text, change_text, count, go_on_text, go_text, lost_text
from swift.elastic.events.recovery_timing import Failure, Transition, failure_of, recovery_figures
from swift.elastic.membership import (
    Beat,
    Command,
    Died,
    Enter,
    Event,
    Form,
    GiveUp,
    Go,
    Kill,
    Member,
    Membership,
    Process,
    Ready,
    ReshardState,
    RestartAll,
    RestoreState,
    Retire,
    StageLost,
    StartGeneration,
    StartProcess,
    State,
    StopRun,
    Took,
)


class Note(NamedTuple):
    """An event of the record.

    Attributes:
        event: its name in ``events.jsonl``.
        step: the last iteration that all members had finished.
        fields: its other fields, JSON; never ``time``, ``event`` or ``step``.
        text: a line for people; None where they need none.
    """

    event: str
    step: int
    fields: dict[str, Any]
    text: str | None


class Journal:
    """Makes notes of the events of a run.

    Args:
        time: when the run begins, in seconds.
    """

    def __init__(self, time: float):
        self._goodput = Goodput(time)
        self._killed_at: dict[Process, float] = {}  # on purpose
        self._failures: dict[Member, Failure] = {}
        self._running: tuple[Member, ...] = ()  # of the generation that went last
        self._base: int | None = None  # the iteration after which it resumed; None: not known yet
        self._step = 0
        self._change: Transition | None = None  # that led to it, or will lead to the next one
        self._admission: Transition | None = None  # while it still runs
        self._announced: set[Member] = set()
        self._joined: tuple[Process, ...] = ()
        self._took: dict[tuple[int, str], float] = {}
        self._recoveries: list[Mapping[str, float | None]] = []
        self._num_deaths = self._num_joins = 0

    def chaos(self, process: Process, time: float) -> list[Note]:
        """Notes that fault injection kills a process at this time."""
        self._killed_at[process] = time
        return [self._note("kill", f"process {process} is killed on purpose", process=str(process), why="on purpose")]

    def record(self, step: int) -> None:
        """Notes the record of an iteration: a member has finished it, and may die before a heartbeat says so."""
        self._goodput.tell(step)

    def on(self, event: Event, before: Membership, after: Membership, commands: Sequence[Command]) -> list[Note]:
        """Notes an event, which turned the membership ``before`` into that ``after`` and gave ``commands``."""
        notes = self._heard(event, before, after)
        for command in commands:
            notes += self._ordered(command, event.time, before, after)
        if before.generation is not None and after.generation is None:
            self._goodput.wait(event.time)
        return notes

    def goodput(self, time: float) -> dict[str, Any]:
        """Breaks down the time of the run until now.

        Returns:
            ``total_s``, the sum of ``startup_s``, ``useful_s``, ``detection_s``, ``reconfiguration_s``, ``rerun_s`` and
            ``waiting_s``, see ``swift.elastic.events.goodput.CAUSES``; ``goodput``, the useful share of it;
            ``rerun_steps``, iterations that were run again; ``num_deaths``, ``num_recoveries``, ``num_joins``; and what
            ``recovery_figures`` says.
        """
        spent = self._goodput.seconds(time)
        total_s = sum(spent.values())
        return {
            "total_s": total_s,
            **{f"{cause}_s": spent[cause] for cause in CAUSES},
            "goodput": spent["useful"] / total_s if total_s else 0.0,
            "rerun_steps": self._goodput.rerun_steps,
            "num_deaths": self._num_deaths,
            "num_recoveries": len(self._recoveries),
            "num_joins": self._num_joins,
            **recovery_figures(self._recoveries),
        }

    def _note(self, event: str, text: str | None, **fields: Any) -> Note:
        return Note(event, self._step, fields, text)

    def _heard(self, event: Event, before: Membership, after: Membership) -> list[Note]:
        match event:
            case Died():
                return self._died(event, before, after)
            case Ready(member, time, number):
                was_in = before.statuses[member.process].state in (State.FORMING, State.LIVE)
                if not was_in or after.statuses[member.process].state is not State.WAITING or not before.went:
                    return []
                self._fail(member, Failure(time, time), time)
                text = f"process {member.process} lives, but cannot continue in generation {number}"
                return [self._note("cannot_go_on", text, process=str(member.process), epoch=number)]
            case Beat():
                return self._beat(event, after)
            case Took(_, number, part, seconds, _):
                self._took[number, part] = max(seconds, self._took.get((number, part), 0.0))
        return []

    def _died(self, event: Died, before: Membership, after: Membership) -> list[Note]:
        member, time, why, _ = event
        process, status = member.process, before.statuses[member.process]
        if status.member != member or not status.is_there:
            return []
        self._num_deaths += 1
        killed_at = self._killed_at.pop(process, time)
        failure = self._failures.pop(member, Failure(min(killed_at, time), time))
        text = f"process {process} died ({why})"
        if before.went and before.generation is not None and member in before.generation.form.members:
            self._fail(member, failure, time)
            if after.is_manned:
                text += f"; {go_on_text(len(after.present()), len(after.processes))}"
        elif status.state is State.STARTING:
            text += " before it was ready"
        fields = {"process": str(process), "incarnation": member.incarnation, "why": why}
        detection_s = round(max(failure.known - failure.since, 0.0), 4)
        return [self._note("death", None if failure.is_one_of_all else text, **fields, detection_s=detection_s)]

    def _fail(self, member: Member, failure: Failure, time: float) -> None:
        """Turns the current interval into a recovery; awaited joiners become members of the next generation."""
        self._goodput.fail(failure.since, failure.known, time)
        change = self._change if self._change is not None and self._change.failed else Transition(failure.since)
        self._change = change.after_failure(member.process, failure)

    def _beat(self, beat: Beat, after: Membership) -> list[Note]:
        """A beat of the generation that went last; those that say where it begins have nothing else to say yet."""
        if beat.number != after.went or not beat.entered:
            return []
        if self._base is None:
            self._base = beat.finished
        self._goodput.finish(beat.finished, beat.time)
        statuses = [(member, after.statuses[member.process]) for member in self._running]
        by_all = min(status.finished if status.member == member else 0 for member, status in statuses)
        self._step = max(self._step, self._base, by_all)
        change = self._change
        if change is None or change.went is None or by_all <= self._base:
            return []
        self._change = None
        return [self._changed(change, self._base, beat)]

    def _changed(self, change: Transition, base: int, beat: Beat) -> Note:
        """All have finished the first iteration of a generation."""
        took = {part: took_s for (number, part), took_s in self._took.items() if number == beat.number}
        durations = change.durations(took, beat.time)
        fields: dict[str, Any] = {
            "epoch": beat.number,
            "members": [str(process) for process, _ in self._running],
            "joined": [str(process) for process in self._joined],
            "after": base,
            "rerun_steps": max(0, change.newest - base),
            **durations,
        }
        text = change_text(change, self._joined, fields)
        if change.failed:
            self._recoveries.append(durations)
            return self._note("recovery", text, failed=[str(process) for process in change.failed], **fields)
        self._num_joins += 1
        return self._note("join", text, **fields)

    def _ordered(self, command: Command, time: float, before: Membership, after: Membership) -> list[Note]:
        match command:
            case Form():
                return [self._form(command, time)]
            case Enter() | RestoreState() | ReshardState() | StartGeneration() | StartProcess() | StopRun():
                return []
            case Go():
                return [self._go(command, time, after)]
            case Kill(member, why):
                # A line that was left in the pipe of a dead process speaks after its death: nobody is ended.
                if not _is_to_die(member, after):
                    return []
                self._failures[member] = failure_of(member, time, before)
                text = f"process {member.process} is killed: {why}"
                return [self._note("kill", text, process=str(member.process), why=why)]
            case Retire(member, why):
                text = f"process {member.process} {why}: the run continues without it"
                gone = self._died(Died(member, time, why), before, after)
                return [self._note("retire", text, process=str(member.process), why=why), *gone]
            case RestartAll(why):
                since = time if before.generation is None else before.generation.since
                is_dying = [status.member for status in before.statuses.values() if status.is_there]
                self._failures.update(dict.fromkeys(is_dying, Failure(since, time, is_one_of_all=True)))
                return [self._note("restart_all", f"all processes are started again: {why}", why=why)]
            case StageLost(stages):
                return [self._note("stage_lost", lost_text(stages), stages=list(stages))]
            case GiveUp(process, why):
                # For people, the error that ends the run says it.
                return [self._note("give_up", None, process=str(process), why=why)]

    def _form(self, form: Form, time: float) -> Note:
        self._goodput.form(form.after, time)
        if form.after is not None:
            self._admission = Transition(time)
        back = [member for member in form.members if member.incarnation > 0 and member not in self._running]
        news = [member.process for member in back if member not in self._announced]
        self._announced.update(back)
        text = back_text(news, form.after) if news else None
        if not self._running:
            text = f"forming generation {form.number} with {count(len(form.members), 'process')}"
        members = [str(process) for process, _ in form.members]
        return self._note("form", text, epoch=form.number, members=members, after=form.after)

    def _go(self, go: Go, time: float, after: Membership) -> Note:
        assert after.generation is not None
        members, is_first = after.generation.form.members, not self._running
        self._joined = tuple(member.process for member in members if member not in self._running)
        self._running, self._base = members, go.stamp.step if go.stamp else None
        self._step = self._base or 0
        self._goodput.go(self._base, time)
        change, self._admission = self._change or self._admission, None
        self._change = change and replace(change, went=time, newest=self._goodput.newest)
        text = go_text(len(members), len(after.processes), self._base, is_first)
        names_of = [str(process) for process, _ in members]
        return self._note("epoch", text, epoch=go.number, members=names_of, stamp=go.stamp and list(go.stamp))


def _is_to_die(member: Member, membership: Membership) -> bool:
    status = membership.statuses[member.process]
    return status.member == member and status.is_dying
