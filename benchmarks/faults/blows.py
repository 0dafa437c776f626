"""Faults of processes: killed, frozen, paused, or asked to end."""

import signal
import time
from random import Random

from .kinds import Aftermath, Draw, Kind, Parameters, is_launch
from .processes import send
from .running import Run
from .shapes import STOPPING_S

_NEVER = 1e9
_MOST_DEATHS = 2
"""Most kills of one process in a volley: the third in a row, before it is live, rightly ends a run."""


def _strike_members(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Kills or freezes some members; a pause may be too short to be detected."""
    there = {one.name: one.pid for one in run.processes("worker") if not one.is_stopped}
    names = sorted(name for name in there if after.dead.count(name) < _MOST_DEATHS)
    how, choice = parameters["how"], Random(parameters["choice"])
    if parameters["whom"] == "stage":
        stage = choice.choice(sorted({run.shape.stage_of(name) for name in run.shape.members}))
        victims = [name for name in names if run.shape.stage_of(name) == stage]
    elif parameters["whom"] == "all":
        victims = names
    else:
        victims = choice.sample(names, min(len(names), parameters["whom"]))
    pids = [there[name] for name in victims]
    after.observed.setdefault("hit", []).extend(victims)
    if how == "kill":
        send(pids, signal.SIGKILL)
        after.dead += victims
    else:
        send(pids, signal.SIGSTOP)
        if how == "pause":
            after.heal_after(parameters["seconds"], lambda: send(pids, signal.SIGCONT))
        else:
            after.dead += victims


def _draw_members(how: str, most: int | str) -> Draw:
    def draw(rng: Random, run: Run) -> Parameters:
        whom = most if isinstance(most, str) else rng.randint(1, most)
        seconds = {"seconds": round(rng.uniform(0.2, 1.8), 2)} if how == "pause" else {}
        del run
        return {"how": how, "whom": whom, "choice": rng.randrange(10**6), **seconds}

    return draw


def _strike_helper(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Kills, freezes or pauses the checkpoint service or the compile service."""
    pids = [one.pid for one in run.processes(parameters["whom"])]
    after.observed.setdefault("hit", []).extend([parameters["whom"]] * len(pids))
    send(pids, signal.SIGKILL if parameters["how"] == "kill" else signal.SIGSTOP)
    if parameters["how"] == "pause":
        after.heal_after(parameters["seconds"], lambda: send(pids, signal.SIGCONT))
    after.wants_checkpoint |= parameters["whom"] == "checkpoint-service"


def _draw_helper(whom: str, how: str) -> Draw:
    def draw(rng: Random, run: Run) -> Parameters:
        del run
        seconds = {"seconds": round(rng.uniform(0.5, 8.0), 2)} if how == "pause" else {}
        return {"whom": whom, "how": how, **seconds}

    return draw


def _pause_first(run: Run, parameters: Parameters, after: Aftermath) -> None:
    pid = run.life.first.pid
    send([pid], signal.SIGSTOP)
    after.heal_after(parameters["seconds"], lambda: send([pid], signal.SIGCONT))


def _kill_first(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Kills the supervisor; with `whom` all, everything at once, as in a power failure."""
    after.may_leave |= parameters["whom"] == "all"
    everybody = [one.pid for one in run.processes()] if parameters["whom"] == "all" else []
    send([run.life.first.pid, *everybody], signal.SIGKILL)
    after.codes |= {-signal.SIGKILL}
    after.has_ended = True


def _ask_to_end(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Sends a signal to stop the run; its last complete iteration must be kept."""
    after.observed["step_at_signal"] = run.newest_step()
    send([run.life.first.pid], signal.Signals[parameters["signal"]])
    after.codes |= {130}
    after.has_ended = True
    after.observed["ending_s"] = round(_wait_for_end(run), 2)


def _close_terminal(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Ends the reader of what the run says; the run is to go on as if nothing had happened."""
    del parameters, after
    run.life.terminal.close()


def _still_terminal(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Has nobody read what the run says for a while, so that a write to its full pipe would wait."""
    run.life.terminal.stand_still()
    after.heal_after(parameters["seconds"], run.life.terminal.go_on)


def _hang_up(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Closes the terminal as an ssh that is lost does, with the kernel's signal."""
    run.life.terminal.close()
    _ask_to_end(run, parameters, after)


def _wait_for_end(run: Run) -> float:
    begun = time.monotonic()
    run.wait(run.is_over, "it was asked to end, and has not", STOPPING_S)
    return time.monotonic() - begun


def _members(name: str, how: str, most: int | str) -> Kind:
    return Kind(name, _strike_members, _draw_members(how, most), is_launch, regroups=how != "pause")


def _helper(whom: str, how: str) -> Kind:
    return Kind(f"{how}-{whom}", _strike_helper, _draw_helper(whom, how), is_launch)


def _draw_signal(number: str) -> Draw:
    return lambda _, __: {"signal": number}


KINDS = [
    _members("kill-member", "kill", 2),
    _members("kill-stage", "kill", "stage"),
    _members("kill-all-members", "kill", "all"),
    _members("freeze-member", "freeze", 1),
    _members("freeze-stage", "freeze", "stage"),
    _members("pause-member", "pause", 3),
    *(_helper(whom, how) for whom in ("checkpoint-service", "compile-service") for how in ("kill", "freeze", "pause")),
    Kind("pause-first", _pause_first, lambda rng, _: {"seconds": round(rng.uniform(0.5, 9.0), 2)}, group="first"),
    Kind("kill-first", _kill_first, lambda _, __: {"whom": "first"}, ends=True),
    Kind("power-off", _kill_first, lambda _, __: {"whom": "all"}, ends=True),
    Kind("interrupt", _ask_to_end, _draw_signal("SIGINT"), ends=True),
    Kind("terminate", _ask_to_end, _draw_signal("SIGTERM"), ends=True),
    Kind("hang-up", _hang_up, _draw_signal("SIGHUP"), ends=True),
    Kind("close-terminal", _close_terminal, group="terminal"),
    Kind("still-terminal", _still_terminal, lambda rng, _: {"seconds": round(rng.uniform(1, 9), 2)}, group="terminal"),
]
