"""The training job: sizes and speeds that turn schedules and states into seconds."""

import math
from dataclasses import dataclass

from swift.errors import SettingError, check_count, check_number
from swift.schedules.problem import Problem

DETECTION_S = 3.0
"""Time until a missing heartbeat reveals a lost machine: the supervisor's default."""
MEASURED_RECOVERY_S = 1.05
"""Time from a known death to the end of the next iteration, without the parts that grow with the number of processes:
leave, program, state and first step, which every process does for itself. The median of 40 kills of one of 6 processes
(docs/processes.md)."""
MEASURED_PER_WORKER_S = 0.15 / 6
"""Agreement and link of the same kills, per process: the supervisor talks to one after the other."""
MEASURED_JOIN_S = 3.0
"""Time from a process being ready until it has rejoined, of the same kills; copying its state is counted separately."""
MEASURED_RESTART_S = 17.0
"""Time to restart all processes and resume: ``swift launch --recovery restart`` on the same machine."""
PLT_BUDGET = 0.0375
"""Proportion of lost tokens up to which accuracy holds (MoC-System, arXiv 2408.04307)."""


@dataclass(frozen=True)
class Job:
    """A training job on a cluster; the defaults are GPT-350M-16E.

    Attributes:
        problem: topology and work without failures; its costs are scaled so that an iteration of the whole cluster
            takes ``iteration_s``.
        iteration_s: time of an iteration on all nodes, for every strategy.
        state_bytes: size of the model's weights and optimizer state; 14 bytes for each of 1.86e9 parameters.
        expert_share: share of ``state_bytes`` that belongs to experts.
        num_experts: experts of a layer.
        host_bandwidth: bandwidth from one device to its host's memory, bytes/s.
        network_bandwidth: bandwidth from one worker to another, bytes/s.
        storage_bandwidth: bandwidth of all devices together to storage, bytes/s.
        restart_s: time from a known failure until all processes have restarted, before any state is loaded.
        checkpoint_every: iterations between checkpoints; None for each strategy's own choice, see its class.
        experts_per_checkpoint: initial number of experts per layer in a partial checkpoint, K.

    Raises:
        SettingError: a value is out of its range, or the problem has failures.
    """

    problem: Problem
    iteration_s: float = 2.0
    state_bytes: float = 26e9
    expert_share: float = 0.86
    num_experts: int = 16
    host_bandwidth: float = 25e9
    network_bandwidth: float = 12.5e9
    storage_bandwidth: float = 2e9
    restart_s: float = MEASURED_RESTART_S
    checkpoint_every: int | None = None
    experts_per_checkpoint: int = 1

    def __post_init__(self) -> None:
        for name in ("iteration_s", "state_bytes", "host_bandwidth", "network_bandwidth", "storage_bandwidth"):
            check_number(f"Job.{name}", getattr(self, name), above=0)
        for name in ("expert_share", "restart_s"):
            check_number(f"Job.{name}", getattr(self, name), least=0)
        if self.expert_share > 1:
            raise SettingError("Job.expert_share", self.expert_share, "must be at most 1")
        check_count("Job.num_experts", self.num_experts, least=1)
        check_count("Job.experts_per_checkpoint", self.experts_per_checkpoint, least=1)
        if self.experts_per_checkpoint > self.num_experts:
            allowed = f"must be at most Job.num_experts = {self.num_experts}"
            raise SettingError("Job.experts_per_checkpoint", self.experts_per_checkpoint, allowed)
        if self.checkpoint_every is not None:
            check_count("Job.checkpoint_every", self.checkpoint_every, least=1)
        if self.problem.failed:
            raise SettingError("Job.problem", sorted(self.problem.failed), "must be without a failure")

    @property
    def num_workers(self) -> int:
        """Number of workers of the whole cluster, each of which is a node of the trace."""
        return self.problem.num_pipelines * self.problem.num_stages

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole cluster."""
        return self.num_workers * self.problem.topology.num_expert_ranks

    @property
    def per_worker_s(self) -> float:
        """Time to agree on a change, which grows with the number of workers."""
        return MEASURED_PER_WORKER_S * self.num_workers

    @property
    def snapshot_s(self) -> float:
        """Time for every device to copy its share of the state to its host."""
        return self.state_bytes / self.num_devices / self.host_bandwidth

    @property
    def stored_s(self) -> float:
        """Time to write the whole state to storage, or to read it back."""
        return self.state_bytes / self.storage_bandwidth

    @property
    def stage_copy_s(self) -> float:
        """Time to copy the state of a stage from a peer."""
        return self.state_bytes / self.problem.num_stages / self.network_bandwidth


def iterations_of(seconds: float, iteration_s: float) -> int:
    """Number of iterations that take at least ``seconds``; at least one."""
    return max(1, math.ceil(seconds / iteration_s - 1e-9))
