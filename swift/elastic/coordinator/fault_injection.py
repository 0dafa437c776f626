"""Fault injection (``--chaos``): kills, freezes or hangs processes at chosen iterations, and delays their restarts."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from swift.config.failures import parse_event, parse_rank
from swift.elastic.membership.messages import Process
from swift.errors import SettingError
from swift.topology import Topology

SETTING = "--chaos"
_FAULT_KINDS = ("kill", "freeze", "hang")
"""``kill`` sends SIGKILL, ``freeze`` SIGSTOP; ``hang`` makes an iteration last forever while heartbeats continue."""
_RESTART = "restart"
_WAITS = " once compiled"


class Fault(NamedTuple):
    """A fault or a restart of a process, which happens once some process has finished iteration ``step``."""

    step: int
    kind: str
    process: Process

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind} {self.process}"


class FaultInjection:
    """A schedule of faults, each to happen once.

    Args:
        faults: faults and restarts.
        waiting: faults that wait until the programs for the survivors are compiled.
    """

    def __init__(self, faults: Sequence[Fault] = (), waiting: Collection[Fault] = ()):
        self._faults, self._waiting, self._done = sorted(faults), frozenset(waiting), set[Fault]()

    def due(
        self,
        finished: int,
        is_compiled: Callable[[Process], bool] = lambda process: True,  # noqa: ARG005
    ) -> list[Fault]:
        """Returns the faults that are due after an iteration; each fault is returned only once.

        Args:
            finished: newest finished iteration.
            is_compiled: returns whether the programs for the loss of a process are compiled.
        """
        due = [f for f in self._faults if f.kind in _FAULT_KINDS and f.step <= finished and f not in self._done]
        due = [f for f in due if f not in self._waiting or is_compiled(f.process)]
        self._done.update(due)
        return due

    def still_waiting(self, finished: int) -> list[Fault]:
        """Returns the faults that are due after an iteration but still wait for compiled programs."""
        return [fault for fault in self._faults if fault in self._waiting - self._done and fault.step <= finished]

    def keeps_down(self, process: Process, finished: int) -> bool:
        """Returns whether a process with an injected fault must stay down, as its restart is due later or never."""
        last = max((f.step for f in self._done if f.process == process), default=None)
        if last is None:
            return False
        returns = [f.step for f in self._faults if f.kind == _RESTART and f.process == process and f.step > last]
        return not returns or finished < returns[0]


def parse_chaos(
    texts: Sequence[str],
    topology: Topology,
    processes: Collection[Process],
    num_steps: int,
    why_uncompiled: str | None = None,
) -> FaultInjection:
    """Parses the faults given on the command line.

    Args:
        texts: lines such as ``step 20: kill 1:2``, or ``step 20: kill 0:0 rank 3`` if each expert rank is a process.
            With ``once compiled`` at the end, the fault waits until the programs for the survivors are compiled.
        topology: topology of the run.
        processes: processes of the run.
        num_steps: number of iterations of the run.
        why_uncompiled: reason why this run never compiles programs in advance; None if it does compile them.

    Raises:
        SettingError: a text does not have this format, its process does not exist, its step is not before the last
            iteration, it restarts a process without an earlier fault, or it would wait forever.

    >>> faults = parse_chaos(["step 3: kill 1:0", "step 5: restart 1:0"], Topology(2), [Process((1, 0))], num_steps=9)
    >>> [fault.kind for fault in faults.due(3)], faults.due(3)
    (['kill'], [])
    >>> [faults.keeps_down(Process((1, 0)), step) for step in (4, 5)]
    [True, False]
    """
    last_step = ("Experiment.num_steps - 1", num_steps - 1)
    parsed = [(text, _parse(text, topology, last_step)) for text in texts]
    faults = [fault for _, fault in parsed if fault.kind in _FAULT_KINDS]
    for text, (step, kind, process) in parsed:
        if process not in processes:
            raise SettingError(SETTING, text, "names no process: here a process is a whole worker, with all its ranks")
        if kind == _RESTART and not any(fault.process == process and fault.step < step for fault in faults):
            raise SettingError(SETTING, text, "restarts a process that has no fault at an earlier step")
        if text.endswith(_WAITS) and kind == _RESTART:
            raise SettingError(SETTING, text, f"only a fault can wait for programs: leave out '{_WAITS.strip()}'")
        if text.endswith(_WAITS) and why_uncompiled is not None:
            raise SettingError(SETTING, text, f"would wait forever: {why_uncompiled}")
    waiting = [fault for text, fault in parsed if text.endswith(_WAITS)]
    return FaultInjection([fault for _, fault in parsed], waiting)


def _parse(text: str, topology: Topology, last_step: tuple[str, int]) -> Fault:
    event, rank = parse_rank(text.removesuffix(_WAITS))
    step, kind, worker = parse_event(SETTING, event, (*_FAULT_KINDS, _RESTART), topology, last_step)
    return Fault(step, kind, Process(worker, rank or 0))
