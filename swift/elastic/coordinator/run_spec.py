"""Specification of a run of several processes, and the objects that its supervisor works with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swift.deadlines import Deadlines
from swift.elastic.coordinator.checkpoint_client import CheckpointClient
from swift.elastic.coordinator.compile_client import CompileClient
from swift.elastic.coordinator.fault_injection import FaultInjection
from swift.elastic.membership.members import Process
from swift.elastic.membership.run_status import RecoveryPolicy
from swift.elastic.reporting.reporter import Reporter
from swift.elastic.transport.child_processes import Children
from swift.mesh.process_group import LOOPBACK


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that is settled before the run begins.

    Attributes:
        processes: all processes of the run.
        command: function that returns the command that starts a process.
        logs: directory of the logs; a process has one log for all its incarnations.
        deadlines: time limits.
        policy: settings of recovery from failures.
        faults: faults to be injected.
        services: socket directory or address of coordination services, see ``CoordinationService``.
    """

    processes: Sequence[Process]
    command: Callable[[Process], Sequence[str]]
    logs: Path
    deadlines: Deadlines = field(default_factory=Deadlines)
    policy: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    faults: FaultInjection = field(default_factory=FaultInjection)
    services: Path | str = LOOPBACK

    def log(self, name: str) -> Path:
        """Path of the log of a process."""
        return self.logs / f"{name.replace(':', '-').replace(' ', '-')}.log"


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The settings and objects of a run that its supervisor works with.

    Attributes:
        spec: specification of the run.
        children: processes that the run has started.
        checkpoints: client of the checkpoint service.
        programs: client of the compile service.
        reporter: writer of the record and of the terminal.
        mend: makes again the directories of the run that somebody has removed, see ``RunFiles``.
    """

    spec: RunSpec
    children: Children
    checkpoints: CheckpointClient
    programs: CompileClient
    reporter: Reporter
    mend: Callable[[], bool] = lambda: False

    @property
    def remedy(self) -> str:
        """Advice to the user of a run that has stopped."""
        newest = self.checkpoints.newest
        if newest is None:
            return "there is no checkpoint; start again in another --run-dir"
        return f"resume from the checkpoint of iteration {newest} with --resume"
