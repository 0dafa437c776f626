"""Training job: sizes and speeds that convert schedules and model states to seconds.

``Periods`` computes the relative duration of an iteration under failures, with the real planners.

Shape suffix: P stages.
"""

import math
from dataclasses import dataclass, field, replace

from swift.errors import SettingError, check_count, check_number
from swift.schedules.adapt.choice import recut
from swift.schedules.adapt.layouts import BlockProblem
from swift.schedules.bounds import tight_bound
from swift.schedules.planners.adaptive import adaptive
from swift.schedules.planners.baselines import one_f_one_b
from swift.schedules.plans.normalize import canonical, spread
from swift.schedules.problem import Chunk, Problem
from swift.schedules.schedule import period

DETECTION_S = 3.0
"""Time in seconds until a missing heartbeat reveals a lost machine, the supervisor's default."""
MEASURED_RECOVERY_S = 1.05
"""Time in seconds from the detection of a death to the end of the next iteration.

It consists of leaving the old group, loading the program, preparing the state, and the first step. Each process does
these by itself, so the time does not grow with the number of processes. Median over 40 kills of one of 6 processes
(docs/design.md)."""
_MEASURED_PER_WORKER_S = 0.15 / 6
"""Time in seconds per process to agree on a change and set up links, in the same measurement.

It grows with the number of processes, since the supervisor contacts them one after another."""
MEASURED_JOIN_S = 3.0
"""Time in seconds from a process being ready until it has rejoined, in the same measurement, excluding state copies."""
_MEASURED_RESTART_S = 17.0
"""Time in seconds to restart all processes and resume: ``swift launch --recovery restart`` on the same machine."""
PLT_BUDGET = 0.0375
"""Largest proportion of lost tokens at which accuracy is preserved (MoC-System, arXiv 2408.04307)."""

MAX_PLANNED_OPS = 50_000
"""Limit on the number of ops in an iteration; beyond it the planner takes seconds for each failure set."""
_BLOCKS_OF_STAGE = 4
"""Number of blocks per stage when planning a recut."""


@dataclass(frozen=True)
class Job:
    """A training job on a cluster; the defaults are GPT-350M-16E.

    Attributes:
        problem: topology and work without failures. Its costs are scaled so that an iteration on the whole cluster
            takes ``iteration_s``.
        iteration_s: duration of an iteration on all nodes in seconds, the same for every strategy.
        state_bytes: size of the model's weights and optimizer state in bytes; the default is 14 bytes for each of
            1.86e9 parameters.
        expert_share: fraction of ``state_bytes`` that belongs to experts.
        num_experts: number of experts per layer.
        host_bandwidth: bandwidth from one device to its host's memory, in bytes/s.
        network_bandwidth: bandwidth from one worker to another, in bytes/s.
        storage_bandwidth: bandwidth from all devices together to storage, in bytes/s.
        restart_s: time in seconds from the detection of a failure until all processes have restarted, before they load
            any state.
        checkpoint_every: number of iterations between checkpoints; None to let each strategy choose.
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
    restart_s: float = _MEASURED_RESTART_S
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
        """Number of workers in the whole cluster; each is one node in a trace."""
        return self.problem.num_pipelines * self.problem.num_stages

    @property
    def num_devices(self) -> int:
        """Number of devices in the whole cluster."""
        return self.num_workers * self.problem.topology.num_expert_ranks

    @property
    def per_worker_s(self) -> float:
        """Time to agree on a change in seconds, proportional to the number of workers."""
        return _MEASURED_PER_WORKER_S * self.num_workers

    @property
    def snapshot_s(self) -> float:
        """Time to copy the state to host memory in seconds, where every device copies its share."""
        return self.state_bytes / self.num_devices / self.host_bandwidth

    @property
    def stored_s(self) -> float:
        """Time to write the whole state to storage, or to read it, in seconds."""
        return self.state_bytes / self.storage_bandwidth

    @property
    def stage_copy_s(self) -> float:
        """Time to copy a stage's state from a peer, in seconds."""
        return self.state_bytes / self.problem.num_stages / self.network_bandwidth


def iterations_of(seconds: float, iteration_s: float) -> int:
    """Returns the smallest number of iterations that take at least ``seconds``; at least one."""
    return max(1, math.ceil(seconds / iteration_s - 1e-9))


@dataclass(frozen=True)
class Periods:
    """Periods of one problem under arbitrary failures, each computed once and cached.

    A problem with at most ``MAX_PLANNED_OPS`` ops is planned by ``adaptive``. For a larger problem the tight bound is
    used, since a trace has thousands of failure sets, and each plan would take seconds. The periods of plans for 1,536
    workers exceed the bound by 0.3 % with M = P and by 2.4 % with M = 2P, in 1F1B's memory and with unequal costs.

    Attributes:
        problem: problem without failures.
    """

    problem: Problem
    _known: dict[tuple[int, ...], float] = field(default_factory=dict, repr=False, compare=False)
    _known_single: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    _known_spread: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    _known_recut: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def are_planned(self) -> bool:
        """Whether periods are those of plans; otherwise they are lower bounds."""
        return self.problem.num_ops <= MAX_PLANNED_OPS

    def ratio(self, failures_P: tuple[int, ...]) -> float:
        """Returns the period under failures relative to the fault-free period; at least 1.

        A smaller ratio would only mean that the plan for fewer workers is also better for all workers.

        Args:
            failures_P: number of failures in each stage, each less than D.

        Raises:
            SettingError: a stage has no survivor.
        """
        return max(1.0, self._period(failures_P) / self._period((0,) * self.problem.num_stages))

    def spread(self, num_failures: int) -> tuple[int, ...]:
        """Distributes failures over the stages as if roles were moved; see ``schedules.plans.normalize.spread``."""
        if num_failures not in self._known_spread:
            self._known_spread[num_failures] = spread(self.problem, num_failures)
        return self._known_spread[num_failures]

    def elastic_ratio(self, num_pipelines: int) -> float:
        """Returns the 1F1B period if fewer pipelines share all micro-batches, relative to that of all pipelines.

        Args:
            num_pipelines: number of remaining pipelines; at least one.
        """
        share = self.problem.most_loaded(num_pipelines)
        return self._single_period(share) / self._single_period(self.problem.most_microbatches)

    def recut_ratio(self, num_workers: int) -> float:
        """Returns the period after a recut to this many workers, relative to the fault-free period; at least 1.

        For a problem that is too large to plan, both periods are tight bounds, as in ``ratio``, which include the time
        that workers wait for each other.

        Args:
            num_workers: number of live workers, at least one per stage.
        """
        if num_workers not in self._known_recut:
            self._known_recut[num_workers] = self._recut_period(num_workers)
        return max(1.0, self._known_recut[num_workers] / self._period((0,) * self.problem.num_stages))

    def _recut_period(self, num_workers: int) -> float:
        problem, workers = self.problem, self.problem.topology.workers
        if num_workers == len(workers):
            return self._period((0,) * problem.num_stages)
        if not self.are_planned:
            return self._recut_bound(num_workers)
        blocks = (Chunk.of_size(1 / _BLOCKS_OF_STAGE, 1),) * (_BLOCKS_OF_STAGE * problem.num_stages)
        work = BlockProblem(problem, blocks, (_BLOCKS_OF_STAGE,) * problem.num_stages)
        # The last workers fail, so that ``recut`` can keep whole pipelines.
        plan = recut(work, frozenset(workers[num_workers:]))
        return math.inf if plan is None else plan.period

    def _recut_bound(self, num_workers: int) -> float:
        """Returns the tight bound for stages in which every worker has the work of an average worker.

        That work is a fractional number of micro-batches, so the bounds for the nearest whole numbers are interpolated.
        """
        problem = self.problem
        units = math.ceil(problem.total_microbatches * problem.num_stages * _BLOCKS_OF_STAGE / num_workers)
        number, more = divmod(units, _BLOCKS_OF_STAGE)
        low, high = (tight_bound(replace(problem, num_microbatches=number + extra)) for extra in (0, 1))
        return low + more / _BLOCKS_OF_STAGE * (high - low)

    def _single_period(self, num_microbatches: int) -> float:
        if num_microbatches not in self._known_single:
            lone = replace(self.problem.single_pipeline(), num_microbatches=num_microbatches)
            self._known_single[num_microbatches] = period(one_f_one_b(lone))
        return self._known_single[num_microbatches]

    def _period(self, failures_P: tuple[int, ...]) -> float:
        if failures_P not in self._known:
            problem = canonical(self.problem, failures_P)
            self._known[failures_P] = period(adaptive(problem)) if self.are_planned else tight_bound(problem)
        return self._known[failures_P]
