"""What is done to processes on purpose: killed at an iteration, started again at another."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from swift.errors import SettingError
from swift.mesh.epochs import Process
from swift.topology import Topology
from swift.train.failures import parse_event

SETTING = "--chaos"


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


def parse_chaos(texts: Sequence[str], topology: Topology, num_steps: int) -> Chaos:
    """The troubles of the command line, whose processes are the workers of a topology.

    Raises:
        SettingError: a text is not like ``step 20: kill 1:2``, names no process, or no iteration before the last, or
            starts again who is not killed before.

    >>> chaos = parse_chaos(["step 3: kill 1:0", "step 5: restart 1:0"], Topology(2), num_steps=9)
    >>> chaos.to_kill(2), chaos.to_kill(3), chaos.to_kill(3)
    ([], [Process(worker=(1, 0), rank=0)], [])
    >>> [chaos.keeps_down(Process((1, 0)), step) for step in (4, 5)]
    [True, False]
    """
    last_step = ("Experiment.num_steps - 1", num_steps - 1)
    told = [(text, _parse(text, topology, last_step)) for text in texts]
    kills = [trouble for _, trouble in told if trouble.kind == "kill"]
    for text, (step, kind, process) in told:
        if kind == "restart" and not any(kill.process == process and kill.step < step for kill in kills):
            raise SettingError(SETTING, text, "starts a process again that is not killed at an earlier step")
    return Chaos([trouble for _, trouble in told])


def _parse(text: str, topology: Topology, last_step: tuple[str, int]) -> Trouble:
    step, kind, worker = parse_event(SETTING, text, ("kill", "restart"), topology, last_step)
    return Trouble(step, "kill" if kind == "kill" else "restart", Process(worker))
