"""The journal of an elastic run: turns membership events into log entries and terminal lines, and times recoveries.

The supervisor reports each event that it passes to ``Membership.on``, with the outcome. There is no clock and no I/O
here: all times are in seconds, on the clock that the events use.

A transition leads from one generation to the next, to recover from failures, to admit joiners or to move blocks. It is
timed phase by phase. Terminal lines are short, one per event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from swift.elastic.membership.messages import (
    PHASES,
    AbortRun,
    ActivateGeneration,
    Command,
    Connect,
    Died,
    Event,
    ExcludeProcess,
    FormGeneration,
    Heartbeat,
    Kill,
    Member,
    PhaseTimed,
    PreloadPrograms,
    Process,
    Ready,
    RecutFailed,
    ReshardState,
    RestartAll,
    RestoreState,
    Retire,
    StageLost,
    StartGeneration,
    StartProcess,
    StopRun,
)
from swift.elastic.membership.state_machine import Membership
from swift.elastic.membership.status import ProcessState
from swift.elastic.reporting.goodput import CAUSES, Goodput
from swift.schedules.plans.normalize import DEFAULT_ASSIGNMENT, ChunkAssignment

_BEFORE_LIVE = ("leave", "connect", "load_program")
"""The phases, among ``PHASES``, that a member completes before it sends ``Formed``."""


class Failure(NamedTuple):
    """The times at which a member failed and its failure was detected.

    Attributes:
        since: time of the failure, in seconds: the member was killed, sent its last message, or got stuck.
        known: time of the detection, in seconds.
        is_one_of_all: whether all members are killed together.
    """

    since: float
    known: float
    is_one_of_all: bool = False


def _failure_of(member: Member, time: float, membership: Membership) -> Failure:
    """Returns the failure of a member that is killed because it was silent or late.

    A silent member failed when it sent its last message, and a late one when its generation last made progress.
    """
    status, generation = membership.statuses[member.process], membership.generation
    is_silent = status.state is ProcessState.STARTING or time - status.seen > membership.deadlines.heartbeat
    return Failure(status.seen if is_silent or generation is None else generation.since, time)


@dataclass(frozen=True)
class _Transition:
    """The transition from one generation's end to the next one's first iteration; all times are in seconds.

    Attributes:
        since: time of the first failure, or of the admission of joiners.
        failed: failed processes; empty if processes only join.
        known: newest detection of a failure so far; undetected time before it is in ``detection_s`` already.
        detection_s: total time for which some failure was undetected.
        live_at: time when the next generation went live; None until then.
        newest: newest iteration that any member had finished by ``live_at``.
        is_recut: whether members take over blocks and no process joins.
    """

    since: float
    failed: tuple[Process, ...] = ()
    known: float = -float("inf")
    detection_s: float = 0.0
    live_at: float | None = None
    newest: int = 0
    is_recut: bool = False

    def after_failure(self, process: Process, failure: Failure) -> "_Transition":
        """Adds a failure; time during which two failures are both undetected counts only once."""
        failed, known = failure.since, failure.known
        undetected_s = max(0.0, min(known, self.since) - failed) + max(0.0, known - max(failed, self.known))
        return replace(
            self,
            since=min(self.since, failed),
            failed=(*self.failed, process),
            known=max(self.known, known),
            detection_s=self.detection_s + undetected_s,
            live_at=None,
        )

    def durations(self, phase_times: Mapping[str, float], time: float) -> dict[str, float | None]:
        """Returns how long the transition and each phase took; None for a phase that no member has reported.

        Args:
            phase_times: for each phase, the longest duration that a member of the generation has reported, in seconds.
            time: time at which all members have finished the first iteration, in seconds.
        """
        assert self.live_at is not None
        explained_s = self.detection_s + sum(phase_times.get(phase, 0.0) for phase in _BEFORE_LIVE)
        kind = "recovery" if self.failed else "recut" if self.is_recut else "rejoin"
        intervals = {f"{kind}_s": time - self.since}
        if self.failed:
            intervals["detection_s"] = self.detection_s
        # Coordination is the rest: time until the generation went live that neither detection nor a phase explains.
        intervals["coordination_s"] = self.live_at - self.since - explained_s
        phases = {f"{phase}_s": phase_times.get(phase) for phase in PHASES}
        return {name: round(max(seconds, 0.0), 4) for name, seconds in intervals.items()} | phases


def _recovery_figures(recoveries: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Summarizes the durations of recoveries.

    Args:
        recoveries: the ``durations`` of each recovery.

    Returns:
        ``recovery_median_s`` and ``recovery_max_s``, which are None if there was no recovery; and ``recovery_phases``,
        a dict with ``median_s`` and ``max_s`` for each phase that was reported, by name.
    """

    def reported(phase: str) -> list[float]:
        return [phase_s for recovery in recoveries if (phase_s := recovery[f"{phase}_s"]) is not None]

    recovery_s = reported("recovery")
    phases = {phase: reported(phase) for phase in ("detection", "coordination", *PHASES)}
    return {
        "recovery_median_s": median(recovery_s) if recovery_s else None,
        "recovery_max_s": max(recovery_s, default=None),
        "recovery_phases": {
            phase: {"median_s": median(all_s), "max_s": max(all_s)} for phase, all_s in phases.items() if all_s
        },
    }


class JournalEntry(NamedTuple):
    """An entry for ``events.jsonl``, with its line for the terminal.

    Attributes:
        event: name of the event in ``events.jsonl``.
        step: last iteration that all members had finished.
        fields: other fields, JSON; never ``time``, ``event`` or ``step``.
        text: line for the terminal; None if the event is not shown.
    """

    event: str
    step: int
    fields: dict[str, Any]
    text: str | None


class Journal:
    """Turns the events of a run into journal entries, and summarizes its time and its recoveries.

    Args:
        time: time at which the run begins, in seconds.
    """

    def __init__(self, time: float):
        self._goodput = Goodput(time)
        self._injected_at: dict[Process, float] = {}  # times of injected kills
        self._failures: dict[Member, Failure] = {}
        self._running: tuple[Member, ...] = ()  # members of the newest live generation
        self._base: int | None = None  # iteration that this generation resumed from; None: not known yet
        self._step = 0
        self._transition: _Transition | None = None  # the one that led to this generation, or will lead to the next
        self._admission: _Transition | None = None  # the one to the next generation, while this one still runs
        self._announced: set[Member] = set()
        self._rejoined: tuple[Process, ...] = ()
        self._phase_times: dict[tuple[int, str], float] = {}
        self._recoveries: list[Mapping[str, float | None]] = []
        self._cut = DEFAULT_ASSIGNMENT  # of the newest live generation
        self._num_deaths = self._num_rejoins = self._num_recuts = 0

    def kill_injected(self, process: Process, time: float) -> list[JournalEntry]:
        """Returns the entry for a kill by fault injection, and records its time as the time of the failure."""
        self._injected_at[process] = time
        return [
            self._note(
                "process_killed", f"process {process} is killed on purpose", process=str(process), reason="on purpose"
            )
        ]

    def record(self, step: int) -> None:
        """Registers that an iteration has a record, as its member may die before reporting the end of the iteration."""
        self._goodput.record(step)

    def on(
        self, event: Event, before: Membership, after: Membership, commands: Sequence[Command]
    ) -> list[JournalEntry]:
        """Returns the entries for an event and for the ``commands`` that it caused.

        Args:
            event: event that was reported to the membership.
            before: membership before the event.
            after: membership after the event.
            commands: commands that the membership returned.
        """
        notes = self._on_event(event, before, after)
        for command in commands:
            notes += self._on_command(command, event.time, before, after)
        if before.generation is not None and after.generation is None:
            self._goodput.wait(event.time)
        return notes

    def goodput(self, time: float) -> dict[str, Any]:
        """Returns the run's time until ``time`` by cause, with recovery statistics.

        Returns:
            ``total_s``, the sum of ``startup_s``, ``useful_s``, ``detection_s``, ``reconfiguration_s``, ``rerun_s`` and
            ``waiting_s``, see ``swift.elastic.reporting.goodput.CAUSES``; ``goodput``, the useful share of the total;
            ``rerun_steps``, the number of iterations that were run again; ``num_deaths``, ``num_recoveries``,
            ``num_rejoins``, ``num_recuts``; and the figures of ``_recovery_figures``.
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
            "num_rejoins": self._num_rejoins,
            "num_recuts": self._num_recuts,
            **_recovery_figures(self._recoveries),
        }

    def _note(self, event: str, text: str | None, **fields: Any) -> JournalEntry:
        return JournalEntry(event, self._step, fields, text)

    def _on_event(self, event: Event, before: Membership, after: Membership) -> list[JournalEntry]:
        match event:
            case Died():
                return self._on_death(event, before, after)
            case Ready(member, time, number):
                was_in = before.statuses[member.process].state in (ProcessState.FORMING, ProcessState.LIVE)
                is_waiting = after.statuses[member.process].state is ProcessState.WAITING
                if not was_in or not is_waiting or not before.last_live:
                    return []
                self._fail(member, Failure(time, time), time)
                text = f"process {member.process} lost its group in generation {number}"
                return [self._note("cannot_continue", text, process=str(member.process), generation=number)]
            case RecutFailed(member, number, reason, time):
                self._fail(member, Failure(time, time), time)
                refused = f"process {member.process} cannot move blocks: {reason}"
                text = f"{refused}; keeping the current layer assignment until the run resumes"
                return [self._note("recut_failed", text, process=str(member.process), generation=number, reason=reason)]
            case Heartbeat():
                return self._on_heartbeat(event, after)
            case PhaseTimed(_, number, phase, seconds, _):
                self._phase_times[number, phase] = max(seconds, self._phase_times.get((number, phase), 0.0))
        return []

    def _on_death(self, event: Died, before: Membership, after: Membership) -> list[JournalEntry]:
        member, time, reason, _ = event
        process, status = member.process, before.statuses[member.process]
        if status.member != member or not status.is_alive:
            return []
        self._num_deaths += 1
        injected_at = self._injected_at.pop(process, time)
        failure = self._failures.pop(member, Failure(min(injected_at, time), time))
        text = f"process {process} died ({reason})"
        if before.last_live and before.generation is not None and member in before.generation.form.members:
            self._fail(member, failure, time)
            if not after.unserved_stages and not after.failed:
                text += f"; {_continue_text(len(after.present()), len(after.processes))}"
        elif status.state is ProcessState.STARTING:
            text += " before it was ready"
        fields = {"process": str(process), "incarnation": member.incarnation, "reason": reason}
        detection_s = round(max(failure.known - failure.since, 0.0), 4)
        return [self._note("process_died", None if failure.is_one_of_all else text, **fields, detection_s=detection_s)]

    def _fail(self, member: Member, failure: Failure, time: float) -> None:
        """Adds a failure to the transition, which becomes a recovery even if it began in order to admit joiners."""
        self._goodput.fail(failure.since, failure.known, time)
        transition = self._transition
        if transition is None or not transition.failed:
            transition = _Transition(failure.since)
        self._transition = transition.after_failure(member.process, failure)

    def _on_heartbeat(self, beat: Heartbeat, after: Membership) -> list[JournalEntry]:
        """Records progress of the newest live generation; ends the transition once all have finished an iteration."""
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

    def _end_transition(self, transition: _Transition, base: int, beat: Heartbeat) -> JournalEntry:
        """Returns the entry for a completed transition: all members have finished an iteration of the generation."""
        times = {phase: seconds for (number, phase), seconds in self._phase_times.items() if number == beat.number}
        durations = transition.durations(times, beat.time)
        fields: dict[str, Any] = {
            "generation": beat.number,
            "members": [str(process) for process, _ in self._running],
            "rejoined": [str(process) for process in self._rejoined],
            "resumed_from": base,
            "rerun_steps": max(0, transition.newest - base),
            **durations,
        }
        text = _transition_text(transition, self._rejoined, self._cut, fields)
        if transition.failed:
            self._recoveries.append(durations)
            return self._note("recovery", text, failed=[str(process) for process in transition.failed], **fields)
        if transition.is_recut:
            self._num_recuts += 1
            return self._note("recut", text, cuts=self._cut.cuts, positions=self._cut.positions, **fields)
        self._num_rejoins += 1
        return self._note("rejoin", text, **fields)

    def _on_command(self, command: Command, time: float, before: Membership, after: Membership) -> list[JournalEntry]:
        match command:
            case FormGeneration():
                return [self._on_form(command, time)]
            case (
                PreloadPrograms()
                | Connect()
                | RestoreState()
                | ReshardState()
                | StartGeneration()
                | StartProcess()
                | StopRun()
            ):
                return []
            case ActivateGeneration():
                return [self._on_go_live(command, time, after)]
            case Kill(member, reason):
                # The last line of a dead process may be received after its death; the resulting kill has no effect.
                if not _is_to_die(member, after):
                    return []
                self._failures[member] = _failure_of(member, time, before)
                text = f"process {member.process} is killed: {reason}"
                return [self._note("process_killed", text, process=str(member.process), reason=reason)]
            case Retire(member, reason):
                text = f"process {member.process} {reason}: continuing without it"
                death = self._on_death(Died(member, time, reason), before, after)
                return [self._note("process_retired", text, process=str(member.process), reason=reason), *death]
            case RestartAll(reason):
                since = time if before.generation is None else before.generation.since
                is_dying = [status.member for status in before.statuses.values() if status.is_alive]
                self._failures.update(dict.fromkeys(is_dying, Failure(since, time, is_one_of_all=True)))
                return [self._note("restart_all", f"restarting all processes: {reason}", reason=reason)]
            case StageLost(stages):
                text = _stage_lost_text(stages, is_one_cut=not after.policy.own_cut)
                return [self._note("stage_lost", text, stages=list(stages))]
            case ExcludeProcess(process, reason):
                text = f"process {process} {reason}: continuing without it"
                return [self._note("process_excluded", text, process=str(process), reason=reason)]
            case AbortRun(process, reason):
                # The error that ends the run is shown on the terminal.
                return [self._note("run_aborted", None, process=str(process), reason=reason)]

    def _on_form(self, form: FormGeneration, time: float) -> JournalEntry:
        self._goodput.form(form.after, time)
        if form.after is not None or (self._admission is not None and self._admission.is_recut):
            self._admission = None if form.after is None else _Transition(time, is_recut=bool(form.cut))
        joiners = [member for member in form.members if member.incarnation > 0 and member not in self._running]
        news = [member.process for member in joiners if member not in self._announced]
        self._announced.update(joiners)
        text = _rejoin_text(news, form.after) if news else None
        if not self._running:
            text = f"forming generation {form.number} with {_count(len(form.members), 'process')}"
        members = [str(process) for process, _ in form.members]
        return self._note("generation_forming", text, generation=form.number, members=members, starts_after=form.after)

    def _on_go_live(self, go: ActivateGeneration, time: float, after: Membership) -> JournalEntry:
        assert after.generation is not None
        members, is_first = after.generation.form.members, not self._running
        self._cut = after.generation.form.cut
        self._rejoined = tuple(member.process for member in members if member not in self._running)
        self._running, self._base = members, go.stamp.step if go.stamp else None
        self._step = self._base or 0
        has_begun = self._goodput.has_begun or after.policy.begins_with_state
        self._goodput.go_live(self._base, time)
        transition, self._admission = self._transition or self._admission, None
        self._transition = transition and replace(transition, live_at=time, newest=self._goodput.newest)
        text = _live_text(len(members), len(after.processes), self._base, is_first=is_first, has_begun=has_begun)
        names_of = [str(process) for process, _ in members]
        return self._note(
            "generation_live", text, generation=go.number, members=names_of, stamp=go.stamp and list(go.stamp)
        )


def _is_to_die(member: Member, membership: Membership) -> bool:
    status = membership.statuses[member.process]
    return status.member == member and status.is_dying


def _transition_text(
    transition: _Transition, rejoined: Sequence[Process], cut: ChunkAssignment, fields: Mapping[str, Any]
) -> str:
    """Formats a line about a completed transition.

    Args:
        transition: the transition.
        rejoined: processes that were not in the previous generation.
        cut: workers that hold each block in the new generation; falsy for the run's own cut.
        fields: fields of the journal entry.
    """
    again = f", {_count(fields['rerun_steps'], 'iteration')} again" if fields["rerun_steps"] else ""
    if transition.failed:
        several = len(transition.failed) > 1
        cause = f"the first of {len(transition.failed)} failures" if several else "the failure"
    elif transition.is_recut:
        cause = "the decision"
    else:
        cause = f"{_names(rejoined)} {'was' if len(rejoined) == 1 else 'were'} admitted"
    timed = [(phase, fields.get(f"{phase}_s")) for phase in ("detection", "coordination", *PHASES)]
    phases = ", ".join(f"{phase.replace('_', ' ')} {s:.2f}" for phase, s in timed if s and s >= 0.005)
    whole_s = next(fields[name] for name in ("recovery_s", "rejoin_s", "recut_s") if name in fields)
    moved = f"blocks moved among the survivors, {cut.text}: " if cut else ""
    processes = _count(len(fields["members"]), "process")
    return (
        f"{moved}resumed after iteration {fields['resumed_from']} with {processes}{again}: "
        f"{whole_s:.2f} s after {cause}" + (f" ({phases})" if phases else "")
    )


def _rejoin_text(processes: Sequence[Process], after: int | None) -> str:
    """Formats a line about processes that rejoin, after an iteration or at once.

    >>> _rejoin_text([Process((1, 1))], 9), _rejoin_text([Process((0, 0)), Process((1, 1))], None)
    ('process 1:1 has rejoined, admitted after iteration 9', 'processes 0:0 and 1:1 have rejoined')
    """
    have = "has" if len(processes) == 1 else "have"
    return f"{_names(processes)} {have} rejoined" + ("" if after is None else f", admitted after iteration {after}")


def _stage_lost_text(stages: Sequence[int], *, is_one_cut: bool) -> str:
    """Formats a line about lost stages or, if pipelines cut the layers differently, about lost layers of these stages.

    >>> _stage_lost_text([1], is_one_cut=True)
    'stage 1 has no live process; waiting for one to rejoin'
    >>> _stage_lost_text([0, 1], is_one_cut=False)
    'layers of stages 0 and 1 have no live process; waiting for one to rejoin'
    """
    which = f"stage {stages[0]}" if len(stages) == 1 else f"stages {_listed(list(map(str, stages)))}"
    if not is_one_cut:
        return f"layers of {which} have no live process; waiting for one to rejoin"
    return f"{which} {'has' if len(stages) == 1 else 'have'} no live process; waiting for one to rejoin"


def _continue_text(num_left: int, num_processes: int) -> str:
    """Formats a clause that says how many processes continue.

    >>> _continue_text(3, 4), _continue_text(1, 2)
    ('3 of 4 continue', '1 of 2 continues')
    """
    return f"{num_left} of {num_processes} {'continues' if num_left == 1 else 'continue'}"


def _live_text(
    num_members: int, num_processes: int, after: int | None, *, is_first: bool, has_begun: bool = True
) -> str | None:
    """Formats a line about a generation that goes live; returns None if the later line on its first iteration suffices.

    Args:
        num_members: number of members of the generation.
        num_processes: number of processes of the run.
        after: iteration from which it resumes with a state of its members; None if they have no common state.
        is_first: whether it is the first generation.
        has_begun: whether the run has done any iteration, or begins with a loaded state.

    >>> _live_text(4, 4, None, is_first=True), _live_text(3, 4, 20, is_first=True)
    ('running with 4 processes', 'running with 3 of 4 processes after iteration 20')
    >>> _live_text(3, 4, None, is_first=False, has_begun=False)
    'no iteration was done yet: starting again with the first state'
    """
    if is_first:
        process_text = _count(num_processes, "process")
        process_text = process_text if num_members == num_processes else f"{num_members} of {process_text}"
        return f"running with {process_text}" + ("" if after is None else f" after iteration {after}")
    if after is not None:
        return None
    if not has_begun:
        return "no iteration was done yet: starting again with the first state"
    return "no process has the state of some stage: restoring the newest checkpoint"


def reshard_text(num_ranks: int, num_before: int, after: int) -> str:
    """Formats a line about a resharded state.

    >>> reshard_text(3, 4, 17), reshard_text(4, 4, 17)
    ('resumed after iteration 17 on 3 ranks instead of 4', 'resumed after iteration 17 with 4 ranks')
    """
    if num_ranks == num_before:
        return f"resumed after iteration {after} with {_count(num_ranks, 'rank')}"
    return f"resumed after iteration {after} on {_count(num_ranks, 'rank')} instead of {num_before}"


def _names(processes: Sequence[Process]) -> str:
    """Formats the names of processes.

    >>> _names([Process((1, 1))]), _names([Process((0, 0)), Process((0, 1)), Process((1, 1))])
    ('process 1:1', 'processes 0:0, 0:1 and 1:1')
    """
    return ("process " if len(processes) == 1 else "processes ") + _listed(list(map(str, processes)))


def _listed(texts: Sequence[str]) -> str:
    """Joins texts with commas and "and".

    >>> _listed(["0", "1", "2"])
    '0, 1 and 2'
    """
    *head, last = texts
    return f"{', '.join(head)} and {last}" if head else last


def _count(number: int, noun: str) -> str:
    """Formats a number with its noun.

    >>> _count(1, "process"), _count(3, "process"), _count(2, "iteration")
    ('1 process', '3 processes', '2 iterations')
    """
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{plural}"
