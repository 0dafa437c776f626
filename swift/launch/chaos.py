"""What is done to processes on purpose: killed at an iteration, started again at another."""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from swift.errors import SettingError
from swift.mesh.epochs import Process

SETTING = "--chaos"
_FORM = re.compile(r"\s*step\s+([0-9]+)\s*:\s*(kill|restart)\s+([0-9]+):([0-9]+)\s*")


class Trouble(NamedTuple):
    """An event of chaos: once the iteration ``step`` is done, a process is killed, or may come back."""

    step: int
    kind: Literal["kill", "restart"]
    process: Process


class Chaos:
    """A list of troubles; each happens once."""

    def __init__(self, troubles: Sequence[Trouble] = ()):
        self._troubles, self._killed = sorted(troubles), set[Trouble]()

    def to_kill(self, finished: int) -> list[Process]:
        """Who is to be killed now that this iteration is done; each is told once."""
        due = [t for t in self._troubles if t.kind == "kill" and t.step <= finished and t not in self._killed]
        self._killed.update(due)
        return [trouble.process for trouble in due]

    def keeps_down(self, process: Process, finished: int) -> bool:
        """Whether a process that was killed on purpose is to be started again later only."""
        killed = max((t.step for t in self._killed if t.process == process), default=None)
        if killed is None:
            return False
        returns = [t.step for t in self._troubles if t.kind == "restart" and t.process == process and t.step > killed]
        return not returns or finished < returns[0]


def parse_chaos(lines: Sequence[str], processes: Sequence[Process], num_steps: int) -> Chaos:
    """The troubles of the command line.

    Raises:
        SettingError: a line is not like ``step 20: kill 1:2``, names no process or no iteration of the run, or starts
            again who is not killed before.

    >>> chaos = parse_chaos(["step 3: kill 1:0", "step 5: restart 1:0"], [Process((0, 0)), Process((1, 0))], 9)
    >>> chaos.to_kill(2), chaos.to_kill(3), chaos.to_kill(3)
    ([], [Process(worker=(1, 0), rank=0)], [])
    >>> [chaos.keeps_down(Process((1, 0)), step) for step in (4, 5)]
    [True, False]
    """
    troubles = []
    for line in lines:
        match = _FORM.fullmatch(line)
        if match is None:
            raise SettingError(SETTING, line, "must be like 'step 20: kill 1:2' or 'step 40: restart 1:2'")
        step, kind, pipeline, stage = match.groups()
        process = Process((int(pipeline), int(stage)))
        if process not in processes:
            raise SettingError(SETTING, line, f"names no process; there are {', '.join(map(str, processes))}")
        if not 0 < int(step) < num_steps:
            raise SettingError(SETTING, line, f"must be at a step from 1 to {num_steps - 1}, before the last")
        troubles.append(Trouble(int(step), "kill" if kind == "kill" else "restart", process))
    for trouble in troubles:
        before = [t for t in troubles if t.kind == "kill" and t.process == trouble.process and t.step < trouble.step]
        if trouble.kind == "restart" and not before:
            line = f"step {trouble.step}: restart {trouble.process}"
            raise SettingError(SETTING, line, "starts a process again that is not killed at an earlier step")
    return Chaos(troubles)
