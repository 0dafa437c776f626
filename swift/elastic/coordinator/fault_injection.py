"""Fault injection: faults that hit processes at chosen iterations, and their restarts."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from swift.elastic.membership import Process
from swift.errors import SettingError
from swift.topology import Topology
from swift.train.settings import parse_event, parse_rank

SETTING = "--chaos"
FAULT_KINDS = ("kill", "freeze", "hang")
"""SIGKILL; SIGSTOP; an iteration that never ends while heartbeats continue."""
_RESTART = "restart"


class Fault(NamedTuple):
    """A fault of a process, or the end of one: it happens once iteration ``step`` is done."""

    step: int
    kind: str
    process: Process


class FaultInjection:
    """A list of faults; each happens once."""

    def __init__(self, faults: Sequence[Fault] = ()):
        self._faults, self._done = sorted(faults), set[Fault]()

    def due(self, finished: int) -> list[Fault]:
        """Returns the faults that are due once this iteration is finished; each is returned once."""
        due = [f for f in self._faults if f.kind in FAULT_KINDS and f.step <= finished and f not in self._done]
        self._done.update(due)
        return due

    def keeps_down(self, process: Process, finished: int) -> bool:
        """Returns whether a process with an injected fault is to be restarted at a later iteration only."""
        last = max((f.step for f in self._done if f.process == process), default=None)
        if last is None:
            return False
        returns = [f.step for f in self._faults if f.kind == _RESTART and f.process == process and f.step > last]
        return not returns or finished < returns[0]


def parse_chaos(
    texts: Sequence[str], topology: Topology, processes: Collection[Process], num_steps: int
) -> FaultInjection:
    """Parses the faults of the command line.

    Args:
        texts: lines such as ``step 20: kill 1:2``, or ``step 20: kill 0:0 rank 3`` where an expert rank is a process.
        topology: topology of the run.
        processes: processes of the run.
        num_steps: number of iterations of the run.

    Raises:
        SettingError: a text has another form, names no process or no iteration before the last, or restarts a process
            without an earlier fault.

    >>> faults = parse_chaos(["step 3: kill 1:0", "step 5: restart 1:0"], Topology(2), [Process((1, 0))], num_steps=9)
    >>> [fault.kind for fault in faults.due(3)], faults.due(3)
    (['kill'], [])
    >>> [faults.keeps_down(Process((1, 0)), step) for step in (4, 5)]
    [True, False]
    """
    last_step = ("Experiment.num_steps - 1", num_steps - 1)
    parsed = [(text, _parse(text, topology, last_step)) for text in texts]
    faults = [fault for _, fault in parsed if fault.kind in FAULT_KINDS]
    for text, (step, kind, process) in parsed:
        if process not in processes:
            raise SettingError(SETTING, text, "names no process: here a process is a whole worker, with all its ranks")
        if kind == _RESTART and not any(fault.process == process and fault.step < step for fault in faults):
            raise SettingError(SETTING, text, "restarts a process that has no fault at an earlier step")
    return FaultInjection([fault for _, fault in parsed])


def _parse(text: str, topology: Topology, last_step: tuple[str, int]) -> Fault:
    event, rank = parse_rank(text)
    step, kind, worker = parse_event(SETTING, event, (*FAULT_KINDS, _RESTART), topology, last_step)
    return Fault(step, kind, Process(worker, rank or 0))
