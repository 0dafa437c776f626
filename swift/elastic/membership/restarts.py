"""Restarts of dead processes: which may be started again, when, and how often."""

from swift.elastic.membership.commands import Commands, StartProcess, StopRun
from swift.elastic.membership.events import MayRestart
from swift.elastic.membership.processes import Process
from swift.elastic.membership.status import State
from swift.elastic.membership.view import MembershipView


def restarts(view: MembershipView, chance: MayRestart) -> Commands:
    """The processes to be started now, or the end of a run that nobody can serve any more.

    While members recover nobody is started: starting a process takes seconds of cores that they need.
    """
    dead = view.dead
    if not dead or view.is_recovering:
        return ()
    hopeless = [one for one in dead if is_spent(view, one) or chance.away.get(one, 0.0) > view.deadlines.start]
    lost = view.lost_without(hopeless)
    if lost:
        stages = ", ".join(map(str, lost))
        away = " (or whose node has returned)" if any(chance.away.values()) else ""
        return (StopRun(f"stage {stages} has no process left that may be started again{away}"),)
    startable = [one for one in dead if not is_spent(view, one) and not chance.away.get(one)]
    # Without a stage no iteration is ever finished, so that no later one would bring a process back that is held down.
    down = chance.held_down
    needed = view.lost_without([process for process in dead if process in down or process not in startable])
    return tuple(StartProcess(one) for one in startable if one not in down or one.worker[1] in needed)


def is_spent(view: MembershipView, process: Process) -> bool:
    """Whether a process must not be started again."""
    status = view.statuses[process]
    return status.state is State.RETIRED or status.deaths > view.policy.max_restarts
