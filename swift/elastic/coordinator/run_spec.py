"""How a run of processes goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from swift.deadlines import Deadlines
from swift.elastic.coordinator.fault_injection import FaultInjection
from swift.elastic.jax_group import LOOPBACK
from swift.elastic.membership import Process

Recovery = Literal["live", "restart"]


@dataclass(frozen=True)
class RunSpec:
    """What was settled before the run began.

    Attributes:
        processes: all that the run has.
        command: that starts one of them.
        logs: each process has a log there, of all its lives.
        deadlines: how long to wait for what.
        recovery: ``live``: survivors stay in their processes; ``restart``: they are started again, too.
        max_restarts: how often a process is started again that was not killed on purpose.
        chaos: what is done to processes on purpose.
        resumed: the run goes on from its newest checkpoint.
        services: where coordination services listen, see ``Service``.
        is_elastic: any processes can go on without the others, see ``swift.elastic.membership.shard_ownership``.
    """

    processes: Sequence[Process]
    command: Callable[[Process], Sequence[str]]
    logs: Path
    deadlines: Deadlines = field(default_factory=Deadlines)
    recovery: Recovery = "live"
    max_restarts: int = 10
    chaos: FaultInjection = field(default_factory=FaultInjection)
    resumed: bool = False
    services: Path | str = LOOPBACK
    is_elastic: bool = False

    def log(self, name: str) -> Path:
        """Of all lives of a process."""
        return self.logs / f"{name.replace(':', '-').replace(' ', '-')}.log"
