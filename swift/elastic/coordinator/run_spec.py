"""Specification of how a run of processes is executed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swift.deadlines import Deadlines
from swift.elastic.coordinator.fault_injection import FaultInjection
from swift.elastic.jax_group import LOOPBACK
from swift.elastic.membership import Process, RecoveryPolicy


@dataclass(frozen=True)
class RunSpec:
    """Everything that is settled before the run begins.

    Attributes:
        processes: all processes of the run.
        command: the command that starts one of them.
        logs: the directory of their logs; a process has one, for all its lives.
        deadlines: the time limits.
        policy: how the run recovers from failures.
        chaos: the faults to be injected.
        services: where coordination services listen, see ``CoordinationService``.
    """

    processes: Sequence[Process]
    command: Callable[[Process], Sequence[str]]
    logs: Path
    deadlines: Deadlines = field(default_factory=Deadlines)
    policy: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    chaos: FaultInjection = field(default_factory=FaultInjection)
    services: Path | str = LOOPBACK

    def log(self, name: str) -> Path:
        """The log of a process, of all its lives."""
        return self.logs / f"{name.replace(':', '-').replace(' ', '-')}.log"
