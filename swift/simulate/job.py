"""The training job: sizes and speeds that turn schedules and states into seconds.

``Periods`` has the duration of an iteration by the live workers, from the real planners.

P: stages.
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
"""Time until a missing heartbeat reveals a lost machine: the supervisor's default."""
MEASURED_RECOVERY_S = 1.05
"""Time from a known death to the end of the next iteration, without the parts that grow with the number of processes:
leave, program, state and first step, which every process does for itself. The median of 40 kills of one of 6 processes
(docs/processes.md)."""
_MEASURED_PER_WORKER_S = 0.15 / 6
"""Agreement and link of the same kills, per process: the supervisor talks to one after the other."""
MEASURED_JOIN_S = 3.0
"""Time from a process being ready until it has rejoined, of the same kills; copying its state is counted separately."""
_MEASURED_RESTART_S = 17.0
"""Time to restart all processes and resume: ``swift launch --recovery restart`` on the same machine."""
PLT_BUDGET = 0.0375
"""Proportion of lost tokens up to which accuracy holds (MoC-System, arXiv 2408.04307)."""

MAX_PLANNED_OPS = 50_000
"""Limit on the ops of an iteration: for a larger problem the planner takes seconds per failure set."""
_BLOCKS_OF_STAGE = 4
"""Blocks of a stage that is cut anew."""


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
        """Number of workers of the whole cluster, each of which is a node of the trace."""
        return self.problem.num_pipelines * self.problem.num_stages

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole cluster."""
        return self.num_workers * self.problem.topology.num_expert_ranks

    @property
    def per_worker_s(self) -> float:
        """Time to agree on a change, which grows with the number of workers."""
        return _MEASURED_PER_WORKER_S * self.num_workers

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


@dataclass(frozen=True)
class Periods:
    """Periods of one problem under any failures, each computed once.

    A problem of at most ``MAX_PLANNED_OPS`` ops is planned by ``adaptive``. For a larger one the tight bound is used,
    which plans of 1,536 workers exceed by 0.3 % with M = P and by 2.4 % with M = 2P, in 1F1B's memory and with unequal
    costs: a trace has thousands of failure sets, and each plan would take seconds.

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
        """True if the periods are those of plans, False if they are bounds."""
        return self.problem.num_ops <= MAX_PLANNED_OPS

    def ratio(self, failures_P: tuple[int, ...]) -> float:
        """Divides the period under failures by the fault-free one; at least 1.

        If it were less, the plan for fewer workers would be better for all workers, too.

        Args:
            failures_P: failures of every stage, each less than D.

        Raises:
            SettingError: a stage has no survivor.
        """
        return max(1.0, self._period(failures_P) / self._period((0,) * self.problem.num_stages))

    def spread(self, num_failures: int) -> tuple[int, ...]:
        """Distributes failures over the stages if roles can be moved; see ``schedules.spread``."""
        if num_failures not in self._known_spread:
            self._known_spread[num_failures] = spread(self.problem, num_failures)
        return self._known_spread[num_failures]

    def elastic_ratio(self, num_pipelines: int) -> float:
        """Divides the 1F1B period of fewer pipelines that share all micro-batches by that of all pipelines.

        Args:
            num_pipelines: number of remaining pipelines, at least one.
        """
        share = self.problem.most_loaded(num_pipelines)
        return self._single_period(share) / self._single_period(self.problem.most_microbatches)

    def recut_ratio(self, num_workers: int) -> float:
        """Divides the period of this many workers, whose pipelines are cut anew, by the fault-free one; at least 1.

        For a problem that is too large to plan, both are tight bounds, as in ``ratio``: how long workers wait for
        each other counts before and after.

        Args:
            num_workers: live workers, at least one for each stage.
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
        # Whole pipelines first: their workers are the first ones.
        plan = recut(work, frozenset(workers[num_workers:]))
        return math.inf if plan is None else plan.period

    def _recut_bound(self, num_workers: int) -> float:
        """Tight bound of pipelines whose stages run as many blocks' micro-batches as each worker's share is.

        Shares are not whole micro-batches: between two bounds, in proportion.
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
