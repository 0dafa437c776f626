"""Specification of a worker process, and what it shares with the others."""

import os
import threading
from dataclasses import dataclass, field
from typing import NoReturn

from swift.elastic.elastic_programs import is_elastic
from swift.elastic.membership import Process
from swift.elastic.state import Copies, RunFiles, SharedMemoryStore
from swift.train import Experiment

GONE, STUCK = 70, 71
"""Exit codes of a process whose supervisor is gone, and of one that could not be brought out of a generation."""


@dataclass(frozen=True)
class WorkerSpec:
    """Specification of a worker process.

    Attributes:
        experiment: the experiment to run.
        process: the place of this process in the run.
        by_rank: whether each expert rank has a process.
        scratch: the files that it shares with the others.
        keeps_all: keep the state after every window, so that the next life of this process finds it.
    """

    experiment: Experiment
    process: Process
    by_rank: bool
    scratch: RunFiles
    keeps_all: bool = False
    _ending: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def gone(self) -> NoReturn:
        """Ends the process, whose supervisor is gone, after removing what all shared."""
        with self._ending:  # a second thread that detects it must not exit while the first is still removing
            self.scratch.remove()
            os._exit(GONE)

    def states(self) -> SharedMemoryStore:
        """The store of whole states, between two generations."""
        return SharedMemoryStore(self.scratch.states, self.process)

    def snapshots(self) -> SharedMemoryStore:
        """The store of states without slots: to be saved, or as they were restored."""
        return SharedMemoryStore(self.scratch.snapshots, self.process)

    def copies(self) -> Copies:
        """The store of copies of other ranks' slices."""
        return Copies(self.scratch.copies)

    @property
    def is_elastic(self) -> bool:
        """Whether the run can continue with any ranks, see ``swift.elastic.membership.shard_ownership``."""
        return is_elastic(self.experiment, by_rank=self.by_rank)
