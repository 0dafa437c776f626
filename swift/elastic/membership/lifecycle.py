"""Lives of the processes: what the membership notes of their starts, kills and deaths, and which it restarts.

Where all are restarted after a death (``--recovery restart``), a process that fails at its start again and again is
left out, and the others continue without it. Where several fail at the same time, they may have a cause in common, and
none is to blame. Restarts that bring no progress have a limit, too.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from swift.elastic.membership.commands import Commands, GiveUp, LeaveOut, RestartAll, Retire, StartProcess, StopRun
from swift.elastic.membership.events import Died, MayRestart
from swift.elastic.membership.failure_detector import Stall
from swift.elastic.membership.generation import Generation
from swift.elastic.membership.members import Member, Process
from swift.elastic.membership.run_status import ProcessState, ProcessStatus, RunStatus

RunT = TypeVar("RunT", bound=RunStatus)
_MAX_STALLS = 3
"""Number of generations of the same processes, one after the other, without any iteration; then the run ends."""
_TOGETHER_S = 1.0
"""Seconds after the death of a process at its start in which others that fail, too, have failed at the same time."""


def after_start(run: RunT, member: Member, time: float) -> RunT:
    """Returns the membership once a new incarnation of a dead process has been started."""
    last = run.statuses[member.process]
    assert last.state is ProcessState.DEAD, f"{member.process} is started while it is alive"
    assert member.incarnation > last.member.incarnation, "an incarnation is reused"
    status = ProcessStatus(member, ProcessState.STARTING, time, deaths=last.deaths, quick_deaths=last.quick_deaths)
    return run.with_statuses(status)


def after_death(run: RunT, death: Died) -> tuple[RunT, Commands]:
    """Returns the membership after a death, and the commands that follow at once."""
    member, status = death.member, run.statuses[death.member.process]
    if member != status.member or not status.is_alive:
        return run, ()
    # A process that is killed together with all others or on purpose, or dies with its node, is not to blame.
    is_to_blame = death.is_own and not status.is_blameless and not status.has_injected_fault
    is_quick = not has_started(run, status)
    fresh = replace(status, state=ProcessState.DEAD, is_dying=False, is_blameless=False)
    dead = run.with_statuses(fresh if is_quick else replace(fresh, quick_deaths=0))
    restarts_all = run.policy.recovery == "restart" and not status.is_blameless and run.generation is not None
    if restarts_all and (run.failed or (is_to_blame and is_quick)):
        return replace(dead, failed=(*run.failed, death)), ()
    blamed, commands = _blamed(dead, death, is_quick=is_quick) if is_to_blame else (dead, ())
    if restarts_all:
        killing, restart_all = restarted(blamed, f"{member.process} died", death.time)
        return killing, commands + restart_all
    return blamed, commands


def after_failures(run: RunT, generation: Generation, time: float) -> tuple[RunT, Commands]:
    """Returns the membership once it is known who has failed together with a process that failed at its start.

    One that fails alone is to blame. If several do, the cause may be what they have in common, as a network or a
    program that needs too much memory: without any of them the others would fail, too.
    """
    first, *others = run.failed
    if time - first.time <= _TOGETHER_S:
        return run, ()
    known: RunT = replace(run, failed=())
    if others:
        names = ", ".join(sorted(str(death.member.process) for death in run.failed))
        return restarted_or_ended(known, generation, Stall(f"{names} died at the same time"), time)
    blamed, commands = _blamed(known, first, is_quick=True)
    if any(isinstance(command, GiveUp) for command in commands):
        return blamed, commands
    killing, restart_all = restarted(blamed, f"{first.member.process} died", time)
    return killing, commands + restart_all


def _blamed(run: RunT, death: Died, *, is_quick: bool) -> tuple[RunT, Commands]:
    """Returns the membership in which a death counts, and the report of a process that is restarted no more."""
    process = death.member.process
    status = run.statuses[process]
    quick_deaths = status.quick_deaths + is_quick
    dead = run.with_statuses(replace(status, deaths=status.deaths + 1, quick_deaths=quick_deaths))
    if quick_deaths < run.deadlines.max_quick_deaths:
        return dead, ()
    start = "was live" if run.policy.recovery == "live" else "had finished an iteration"
    why = f"died {quick_deaths} times in a row before it {start}: {death.why}"
    return dead, (LeaveOut(process, why) if _fails_alone(dead, process) else GiveUp(process, why),)


def has_started(run: RunStatus, status: ProcessStatus) -> bool:
    """Returns whether an incarnation has got beyond its start.

    Survivors that keep running are not held up by one that fails later. Where all are restarted with it, it has to
    finish an iteration: a device may be found broken by the first computation.
    """
    return bool(status.last_live if run.policy.recovery == "live" else status.last_worked)


def _fails_alone(run: RunStatus, process: Process) -> bool:
    """Returns whether the others can continue without a process that fails at its start, and do not fail themselves.

    Until any generation has finished an iteration, what fails in one process may fail in all.
    """
    if run.policy.recovery == "live" or run.lost_without([one for one in run.processes if run.is_spent(one)]):
        return False
    of_others = sum(status.quick_deaths for other, status in run.statuses.items() if other != process)
    return run.last_worked > 0 or of_others < run.deadlines.max_quick_deaths


def after_stall(run: RunT, generation: Generation, stall: Stall) -> tuple[RunT, Commands]:
    """Returns the membership once a generation ends without an iteration, nobody being to blame; maybe the run's end.

    Args:
        run: present membership.
        generation: newest generation.
        stall: what its members waited for.
    """
    stalled = (*_stalled_before(run, generation), generation) if generation.form.number > run.last_worked else ()
    if len(stalled) < _MAX_STALLS:
        return replace(run, stalled=stalled), ()
    in_vain = f"{len(stalled)} generations in a row of the same members finished no iteration"
    remedy = f" (where it takes longer: --deadline {stall.deadline}=SECONDS)" if stall.deadline else ""
    return replace(run, stalled=stalled), (StopRun(f"{in_vain}: {stall.why}{remedy}"),)


def after_break(run: RunT, generation: Generation, why: str, time: float) -> tuple[RunT, Commands]:
    """Returns the membership once members that all live cannot continue, and maybe the end of the run.

    Connections may fail for a while, and each attempt takes seconds only. So a generation that was never live counts
    where it is the first that stalls, or that was ``Deadlines.progress`` ago.
    """
    before = _stalled_before(run, generation)
    if before and not generation.is_live and time - before[0].since <= run.deadlines.progress:
        return run, ()
    return after_stall(run, generation, Stall(why))


def _stalled_before(run: RunStatus, generation: Generation) -> tuple[Generation, ...]:
    """Returns the generations of the same processes that have stalled since the last iteration of any."""
    if not run.stalled or run.stalled[0].form.number <= run.last_worked:
        return ()
    now, then = ({process for process, _ in one.form.members} for one in (generation, run.stalled[0]))
    return run.stalled if now == then else ()


def restarted_or_ended(run: RunT, generation: Generation, stall: Stall, time: float) -> tuple[RunT, Commands]:
    """Returns the membership once all are restarted and nobody is to blame, or the run ends, see ``after_stall``."""
    stalled, stop = after_stall(run, generation, stall)
    return (stalled, stop) if stop else restarted(stalled, stall.why, time)


def restarted(run: RunT, why: str, time: float) -> tuple[RunT, Commands]:
    """Returns the membership in which all live processes are being killed, to be restarted."""
    everyone = [status.member for status in run.statuses.values() if status.is_alive]
    return killed(run, everyone, time, is_blameless=True), (RestartAll(why),)


def killed(run: RunT, members: Collection[Member], time: float, *, is_blameless: bool = False) -> RunT:
    """Returns the membership with members being killed; those that were killed before get no more time to die."""
    statuses = [run.statuses[member.process] for member in members]
    killed_at = [one.killed if one.is_dying else time for one in statuses]
    return run.with_statuses(
        *(
            replace(one, is_dying=True, killed=at, is_blameless=is_blameless)
            for one, at in zip(statuses, killed_at, strict=True)
        )
    )


def retired(run: RunT, late: Collection[ProcessStatus]) -> tuple[RunT, Commands]:
    """Returns the membership without processes that were killed and do not die, see ``failure_detector``."""
    why = f"was killed, and has not died in {run.deadlines.dying:g} s"
    statuses = [replace(one, state=ProcessState.RETIRED, is_dying=False, is_blameless=False) for one in late]
    return run.with_statuses(*statuses), tuple(Retire(status.member, why) for status in late)


def restarts(run: RunStatus, may: MayRestart) -> Commands:
    """Returns the processes to start now, or the end of a run in which a stage can never be served again.

    Nothing is started during a recovery: starting a process takes seconds of CPU time that the members need.
    """
    dead = run.dead
    if not dead or run.failed or run.is_recovering:
        return ()
    gone = [one for one in dead if run.is_spent(one) or may.away.get(one, 0.0) > run.deadlines.start]
    lost = run.lost_without(gone)
    if lost:
        stages = ", ".join(map(str, lost))
        away = " (or whose node has returned)" if any(may.away.values()) else ""
        which = f"stage {stages} has" if not run.policy.own_cut else f"layers of stages {stages} have"
        return (StopRun(f"{which} no process left that may be restarted{away}"),)
    startable = [one for one in dead if not run.is_spent(one) and not may.away.get(one)]
    # Without a stage no iteration is ever finished, so a process held down until a later iteration would never return.
    down = may.held_down
    needed = run.lost_without([process for process in dead if process in down or process not in startable])
    return tuple(StartProcess(one) for one in startable if one not in down or one.worker[1] in needed)
