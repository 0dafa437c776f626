"""Restarts of dead processes: which ones, when and how often."""

from swift.elastic.membership.commands import Commands, StartProcess, StopRun
from swift.elastic.membership.events import MayRestart
from swift.elastic.membership.members import Process
from swift.elastic.membership.run_status import ProcessState, RunStatus


def restarts(run: RunStatus, may: MayRestart) -> Commands:
    """Returns the processes to start now, or the end of a run in which a stage can never be served again.

    Nothing is started during a recovery: starting a process takes seconds of CPU time that the members need.
    """
    dead = run.dead
    if not dead or run.is_recovering:
        return ()
    gone = [one for one in dead if is_spent(run, one) or may.away.get(one, 0.0) > run.deadlines.start]
    lost = run.lost_without(gone)
    if lost:
        stages = ", ".join(map(str, lost))
        away = " (or whose node has returned)" if any(may.away.values()) else ""
        which = f"stage {stages} has" if not run.policy.stage_of_chunk else f"layers of stages {stages} have"
        return (StopRun(f"{which} no process left that may be restarted{away}"),)
    startable = [one for one in dead if not is_spent(run, one) and not may.away.get(one)]
    # Without a stage no iteration is ever finished, so a process held down until a later iteration would never return.
    down = may.held_down
    needed = run.lost_without([process for process in dead if process in down or process not in startable])
    return tuple(StartProcess(one) for one in startable if one not in down or one.worker[1] in needed)


def is_spent(run: RunStatus, process: Process) -> bool:
    """Returns whether a process must not be restarted."""
    status = run.statuses[process]
    return status.state is ProcessState.RETIRED or status.deaths > run.policy.max_restarts
