"""Journal of a run's processes: notes for the record and the terminal on what happens, and how long it takes.

The supervisor reports each event that it gives to ``Membership.on``, with its outcome. There is no clock and no I/O
here: all times are in seconds of the one clock of the events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from swift.elastic.membership.commands import (
    Command,
    Enter,
    Form,
    GiveUp,
    GoLive,
    Kill,
    LeaveOut,
    LoadAhead,
    ReshardState,
    RestartAll,
    RestoreState,
    Retire,
    StageLost,
    StartGeneration,
    StartProcess,
    StopRun,
)
from swift.elastic.membership.events import CutRefused, Died, Event, Heartbeat, PhaseTimed, Ready
from swift.elastic.membership.members import Member, Process
from swift.elastic.membership.run_status import ProcessState
from swift.elastic.membership.state_machine import Membership
from swift.elastic.reporting.event_texts import (
    continue_text,
    count,
    live_text,
    rejoin_text,
    stage_lost_text,
    transition_text,
)
from swift.elastic.reporting.goodput import CAUSES, Goodput
from swift.elastic.reporting.recovery_timing import Failure, Transition, failure_of, recovery_figures
from swift.schedules.plans.holders import OWN_CUT


class Note(NamedTuple):
    """An event of the record.

    Attributes:
        event: its name in ``events.jsonl``.
        step: last iteration that all members had finished.
        fields: its other fields, JSON; never ``time``, ``event`` or ``step``.
        text: line for the terminal; None if it is not shown.
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
        self._injected_at: dict[Process, float] = {}  # times of injected kills
        self._failures: dict[Member, Failure] = {}
        self._running: tuple[Member, ...] = ()  # members of the newest live generation
        self._base: int | None = None  # iteration after which it resumed; None: not known yet
        self._step = 0
        self._transition: Transition | None = None  # the one that led to it, or will lead to the next one
        self._admission: Transition | None = None  # the one to the next generation, while it still runs
        self._announced: set[Member] = set()
        self._joined: tuple[Process, ...] = ()
        self._phase_times: dict[tuple[int, str], float] = {}
        self._recoveries: list[Mapping[str, float | None]] = []
        self._cut = OWN_CUT  # of the newest live generation
        self._num_deaths = self._num_joins = self._num_moves = 0

    def kill_injected(self, process: Process, time: float) -> list[Note]:
        """Notes that fault injection kills a process at this time."""
        self._injected_at[process] = time
        return [self._note("kill", f"process {process} is killed on purpose", process=str(process), why="on purpose")]

    def record(self, step: int) -> None:
        """Notes the record of an iteration; the member that finished it may die before a heartbeat says so."""
        self._goodput.record(step)

    def on(self, event: Event, before: Membership, after: Membership, commands: Sequence[Command]) -> list[Note]:
        """Notes an event, which turned the membership ``before`` into that ``after`` and gave ``commands``."""
        notes = self._on_event(event, before, after)
        for command in commands:
            notes += self._on_command(command, event.time, before, after)
        if before.generation is not None and after.generation is None:
            self._goodput.wait(event.time)
        return notes

    def goodput(self, time: float) -> dict[str, Any]:
        """Breaks down the time of the run until now.

        Returns:
            ``total_s``, the sum of ``startup_s``, ``useful_s``, ``detection_s``, ``reconfiguration_s``, ``rerun_s`` and
            ``waiting_s``, see ``swift.elastic.reporting.goodput.CAUSES``; ``goodput``, the useful share of it;
            ``rerun_steps``, number of iterations run again; ``num_deaths``, ``num_recoveries``, ``num_joins``,
            ``num_moves``; and the figures of ``recovery_figures``.
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
            "num_moves": self._num_moves,
            **recovery_figures(self._recoveries),
        }

    def _note(self, event: str, text: str | None, **fields: Any) -> Note:
        return Note(event, self._step, fields, text)

    def _on_event(self, event: Event, before: Membership, after: Membership) -> list[Note]:
        match event:
            case Died():
                return self._on_death(event, before, after)
            case Ready(member, time, number):
                was_in = before.statuses[member.process].state in (ProcessState.FORMING, ProcessState.LIVE)
                is_waiting = after.statuses[member.process].state is ProcessState.WAITING
                if not was_in or not is_waiting or not before.last_live:
                    return []
                self._fail(member, Failure(time, time), time)
                text = f"process {member.process} is alive, but cannot continue in generation {number}"
                return [self._note("cannot_go_on", text, process=str(member.process), epoch=number)]
            case CutRefused(member, number, why, time):
                self._fail(member, Failure(time, time), time)
                refused = f"process {member.process} cannot move blocks: {why}"
                text = f"{refused}; blocks stay where they are until the run is resumed"
                return [self._note("move_refused", text, process=str(member.process), epoch=number, why=why)]
            case Heartbeat():
                return self._on_heartbeat(event, after)
            case PhaseTimed(_, number, phase, seconds, _):
                self._phase_times[number, phase] = max(seconds, self._phase_times.get((number, phase), 0.0))
        return []

    def _on_death(self, event: Died, before: Membership, after: Membership) -> list[Note]:
        member, time, why, _ = event
        process, status = member.process, before.statuses[member.process]
        if status.member != member or not status.is_alive:
            return []
        self._num_deaths += 1
        injected_at = self._injected_at.pop(process, time)
        failure = self._failures.pop(member, Failure(min(injected_at, time), time))
        text = f"process {process} died ({why})"
        if before.last_live and before.generation is not None and member in before.generation.form.members:
            self._fail(member, failure, time)
            if not after.unserved_stages and not after.failed:
                text += f"; {continue_text(len(after.present()), len(after.processes))}"
        elif status.state is ProcessState.STARTING:
            text += " before it was ready"
        fields = {"process": str(process), "incarnation": member.incarnation, "why": why}
        detection_s = round(max(failure.known - failure.since, 0.0), 4)
        return [self._note("death", None if failure.is_one_of_all else text, **fields, detection_s=detection_s)]

    def _fail(self, member: Member, failure: Failure, time: float) -> None:
        """Turns the current transition into a recovery; awaited joiners become members of the next generation."""
        self._goodput.fail(failure.since, failure.known, time)
        transition = self._transition
        if transition is None or not transition.failed:
            transition = Transition(failure.since)
        self._transition = transition.after_failure(member.process, failure)

    def _on_heartbeat(self, beat: Heartbeat, after: Membership) -> list[Note]:
        """Notes progress of the newest live generation; heartbeats before its first iteration report none."""
        if beat.number != after.last_live or not beat.entered:
            return []
        if self._base is None:
            self._base = beat.finished
        self._goodput.finish(beat.finished, beat.time)
        statuses = [(member, after.statuses[member.process]) for member in self._running]
        by_all = min(status.finished if status.member == member else 0 for member, status in statuses)
        self._step = max(self._step, self._base, by_all)
        transition = self._transition
        if transition is None or transition.live_at is None or by_all <= self._base:
            return []
        self._transition = None
        return [self._end_transition(transition, self._base, beat)]

    def _end_transition(self, transition: Transition, base: int, beat: Heartbeat) -> Note:
        """Notes that all members have finished the first iteration of a generation."""
        times = {phase: seconds for (number, phase), seconds in self._phase_times.items() if number == beat.number}
        durations = transition.durations(times, beat.time)
        fields: dict[str, Any] = {
            "epoch": beat.number,
            "members": [str(process) for process, _ in self._running],
            "joined": [str(process) for process in self._joined],
            "after": base,
            "rerun_steps": max(0, transition.newest - base),
            **durations,
        }
        text = transition_text(transition, self._joined, self._cut, fields)
        if transition.failed:
            self._recoveries.append(durations)
            return self._note("recovery", text, failed=[str(process) for process in transition.failed], **fields)
        if transition.is_move:
            self._num_moves += 1
            return self._note("move", text, cuts=self._cut.cuts, places=self._cut.places, **fields)
        self._num_joins += 1
        return self._note("join", text, **fields)

    def _on_command(self, command: Command, time: float, before: Membership, after: Membership) -> list[Note]:
        match command:
            case Form():
                return [self._on_form(command, time)]
            case (
                LoadAhead() | Enter() | RestoreState() | ReshardState() | StartGeneration() | StartProcess() | StopRun()
            ):
                return []
            case GoLive():
                return [self._on_go_live(command, time, after)]
            case Kill(member, why):
                # A line left in the pipe of a dead process is received after its death: then no process is killed.
                if not _is_to_die(member, after):
                    return []
                self._failures[member] = failure_of(member, time, before)
                text = f"process {member.process} is killed: {why}"
                return [self._note("kill", text, process=str(member.process), why=why)]
            case Retire(member, why):
                text = f"process {member.process} {why}: the run continues without it"
                death = self._on_death(Died(member, time, why), before, after)
                return [self._note("retire", text, process=str(member.process), why=why), *death]
            case RestartAll(why):
                since = time if before.generation is None else before.generation.since
                is_dying = [status.member for status in before.statuses.values() if status.is_alive]
                self._failures.update(dict.fromkeys(is_dying, Failure(since, time, is_one_of_all=True)))
                return [self._note("restart_all", f"all processes are restarted: {why}", why=why)]
            case StageLost(stages):
                text = stage_lost_text(stages, is_one_cut=not after.policy.own_cut)
                return [self._note("stage_lost", text, stages=list(stages))]
            case LeaveOut(process, why):
                text = f"process {process} {why}: the run continues without it"
                return [self._note("left_out", text, process=str(process), why=why)]
            case GiveUp(process, why):
                # The error that ends the run is shown on the terminal.
                return [self._note("give_up", None, process=str(process), why=why)]

    def _on_form(self, form: Form, time: float) -> Note:
        self._goodput.form(form.after, time)
        if form.after is not None or (self._admission is not None and self._admission.is_move):
            self._admission = None if form.after is None else Transition(time, is_move=bool(form.cut))
        joiners = [member for member in form.members if member.incarnation > 0 and member not in self._running]
        news = [member.process for member in joiners if member not in self._announced]
        self._announced.update(joiners)
        text = rejoin_text(news, form.after) if news else None
        if not self._running:
            text = f"forming generation {form.number} with {count(len(form.members), 'process')}"
        members = [str(process) for process, _ in form.members]
        return self._note("form", text, epoch=form.number, members=members, after=form.after)

    def _on_go_live(self, go: GoLive, time: float, after: Membership) -> Note:
        assert after.generation is not None
        members, is_first = after.generation.form.members, not self._running
        self._cut = after.generation.form.cut
        self._joined = tuple(member.process for member in members if member not in self._running)
        self._running, self._base = members, go.stamp.step if go.stamp else None
        self._step = self._base or 0
        has_begun = self._goodput.has_begun or after.policy.begins_with_state
        self._goodput.go_live(self._base, time)
        transition, self._admission = self._transition or self._admission, None
        self._transition = transition and replace(transition, live_at=time, newest=self._goodput.newest)
        text = live_text(len(members), len(after.processes), self._base, is_first=is_first, has_begun=has_begun)
        names_of = [str(process) for process, _ in members]
        return self._note("epoch", text, epoch=go.number, members=names_of, stamp=go.stamp and list(go.stamp))


def _is_to_die(member: Member, membership: Membership) -> bool:
    status = membership.statuses[member.process]
    return status.member == member and status.is_dying
