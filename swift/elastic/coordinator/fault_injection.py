"""Fault injection: processes are harmed at an iteration, and may restart at another."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from swift.elastic.membership import Process
from swift.errors import SettingError
from swift.topology import Topology
from swift.train.settings import parse_event, parse_rank

SETTING = "--chaos"
HARMS = ("kill", "freeze", "hang")
"""SIGKILL; SIGSTOP; an iteration that never ends while the heart beats."""
_RESTART = "restart"


class InjectedFault(NamedTuple):
    """An event of chaos: once the iteration ``step`` is done, a process is harmed, or may come back."""

    step: int
    kind: str
    process: Process


class FaultInjection:
    """A list of faults; each happens once."""

    def __init__(self, troubles: Sequence[InjectedFault] = ()):
        self._troubles, self._done = sorted(troubles), set[InjectedFault]()

    def harm(self, finished: int) -> list[InjectedFault]:
        """The faults that are due once this iteration is done; each is returned once."""
        due = [t for t in self._troubles if t.kind in HARMS and t.step <= finished and t not in self._done]
        self._done.update(due)
        return due

    def keeps_down(self, process: Process, finished: int) -> bool:
        """Whether a process that was harmed is to be started again later only."""
        harmed = max((t.step for t in self._done if t.process == process), default=None)
        if harmed is None:
            return False
        returns = [t.step for t in self._troubles if t.kind == _RESTART and t.process == process and t.step > harmed]
        return not returns or finished < returns[0]


def parse_chaos(
    texts: Sequence[str], topology: Topology, processes: Collection[Process], num_steps: int
) -> FaultInjection:
    """Parses the faults of the command line.

    Args:
        texts: lines such as ``step 20: kill 1:2``, or ``step 20: kill 0:0 rank 3`` where an expert rank is a process.
        topology: the topology of the run.
        processes: the processes of the run.
        num_steps: the number of iterations of the run.

    Raises:
        SettingError: a text is not like these, names no process, or no iteration before the last, or starts again who
            is not harmed before.

    >>> chaos = parse_chaos(["step 3: kill 1:0", "step 5: restart 1:0"], Topology(2), [Process((1, 0))], num_steps=9)
    >>> [trouble.kind for trouble in chaos.harm(3)], chaos.harm(3)
    (['kill'], [])
    >>> [chaos.keeps_down(Process((1, 0)), step) for step in (4, 5)]
    [True, False]
    """
    last_step = ("Experiment.num_steps - 1", num_steps - 1)
    told = [(text, _parse(text, topology, last_step)) for text in texts]
    harms = [trouble for _, trouble in told if trouble.kind in HARMS]
    for text, (step, kind, process) in told:
        if process not in processes:
            raise SettingError(SETTING, text, "names no process: here a process is a whole worker, with all its ranks")
        if kind == _RESTART and not any(harm.process == process and harm.step < step for harm in harms):
            raise SettingError(SETTING, text, "starts a process again that is not harmed at an earlier step")
    return FaultInjection([trouble for _, trouble in told])


def _parse(text: str, topology: Topology, last_step: tuple[str, int]) -> InjectedFault:
    event, rank = parse_rank(text)
    step, kind, worker = parse_event(SETTING, event, (*HARMS, _RESTART), topology, last_step)
    return InjectedFault(step, kind, Process(worker, rank or 0))
