"""Specification of a worker process, and the stores that it shares with others."""

import math
import os
import threading
from dataclasses import dataclass, field
from typing import NoReturn

from swift.deadlines import Deadlines
from swift.elastic.accelerators import AcceleratorGroup, MemberDevices, await_deaths
from swift.elastic.elastic_ranks import ElasticSpecs, is_elastic
from swift.elastic.jax_group import JaxGroup
from swift.elastic.membership.members import Process
from swift.elastic.state.run_files import RunFiles
from swift.elastic.state.shared_memory_store import SharedMemoryStore
from swift.elastic.state.slice_copies import SliceCopies
from swift.pipeline.reconfigure.executable_cache import ExecutableCache
from swift.train.settings.experiment import Experiment

GONE, STUCK = 70, 71
"""Exit codes of a process whose supervisor is gone, and of one that could not be brought out of a generation."""
CONNECT_S = 10
"""Seconds in which all processes of a generation on CPUs have to connect."""
_CONNECT_FACTOR = 2
"""Time in which all processes have to have their accelerators, as a multiple of ``Deadlines.forming``. The supervisor
acts on that; a process that gave up before would take the blame for another whose device does not answer."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Specification of a worker process.

    Attributes:
        experiment: settings of the run.
        process: identity of this process in the run.
        by_rank: whether each expert rank has a process.
        scratch: files that it shares with the others.
        copy_every: iterations between copies of its state that its next incarnation finds; 0: none are made.
        devices: accelerators that it holds; None: it computes on the CPU.
        forming_s: the run's ``Deadlines.forming``, in seconds.
    """

    experiment: Experiment
    process: Process
    by_rank: bool
    scratch: RunFiles
    copy_every: int = 0
    devices: MemberDevices | None = None
    forming_s: float = Deadlines.forming
    _ending: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def gone(self) -> NoReturn:
        """Ends the process, whose supervisor is gone, after removing the shared files."""
        with self._ending:  # a second thread that detects it must not exit while the first is still removing
            self.scratch.remove()
            os._exit(GONE)

    def group(self, address: str, index: int, num_processes: int) -> JaxGroup:
        """Makes the process's side of a generation's group, to be joined; see ``JaxGroup``."""
        if self.devices is None:
            return JaxGroup(address, index, num_processes, CONNECT_S)
        timeout_s = math.ceil(_CONNECT_FACTOR * self.forming_s)
        return AcceleratorGroup(self.devices, address, index, num_processes, timeout_s)

    def programs(self) -> ExecutableCache:
        """Cache of compiled programs."""
        if self.devices is None:
            return ExecutableCache(self.scratch.programs)
        # The compilers of a group of GPUs share the search for the fastest kernels, and so work at the same time.
        return ExecutableCache(self.scratch.programs, patience_s=0)

    def step_specs(self) -> ElasticSpecs:
        """Step specs of the run, with the kernel of attention for the devices of this process."""
        return ElasticSpecs(self.experiment, None if self.devices is None else self.devices.platform)

    def states(self) -> SharedMemoryStore:
        """Store of whole states, between two generations."""
        return SharedMemoryStore(self.scratch.states, self.process)

    def snapshots(self) -> SharedMemoryStore:
        """Store of states without slots that are to be saved, or were restored."""
        return SharedMemoryStore(self.scratch.snapshots, self.process)

    def copies(self) -> SliceCopies:
        """Copies of other ranks' slices."""
        return SliceCopies(self.scratch.copies)

    @property
    def is_elastic(self) -> bool:
        """Returns whether the run can continue on any ranks, see ``swift.elastic.membership.shard_ownership``."""
        return is_elastic(self.experiment, by_rank=self.by_rank)

    def await_deaths(self, error: Exception) -> None:
        """Waits before an error ends the process, if it may be the death of another one, see ``accelerators``."""
        if self.devices is not None:
            await_deaths(error)
