"""Elastic restarts from full checkpoints, partial checkpoints (MoC-System), or in-memory checkpoints (Gemini)."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from swift.simulate.job import DETECTION_S, PLT_BUDGET, Job, Periods, iterations_of
from swift.simulate.strategies import ClusterChange, Decision, IterationTiming, Pause, Saves

_LONGEST_S = 1e9
"""Mean time between failures to assume for a trace without failures, in seconds."""


class PartialExperts(NamedTuple):
    """State of MoC-System's Dynamic-K.

    Attributes:
        k: number of experts per layer in a checkpoint.
        lost_iterations: number of iterations whose updates have been lost so far, averaged over experts.
    """

    k: int
    lost_iterations: float = 0.0


class Checkpoints(Protocol):
    """Interface of a checkpointing method."""

    @property
    def name(self) -> str:
        """Name of the strategy."""

    @property
    def source(self) -> str:
        """Source of its figures."""

    def saves(self, job: Job, partial: PartialExperts, iteration_s: float) -> Saves:
        """Decides when to save the state, given the duration of an iteration in seconds."""

    def load_s(self, job: Job, num_lost: int, from_storage: bool) -> float:
        """Returns the time to load the state after the loss of ``num_lost`` workers, in seconds."""

    def after_loss(self, job: Job, partial: PartialExperts, iterations: int) -> PartialExperts:
        """Returns the state of Dynamic-K after a loss, when ``iterations`` have been kept so far."""


@dataclass(frozen=True)
class FullCheckpoints:
    """Full checkpoints to storage, during which training waits.

    The default interval is Young's: sqrt(2 x duration of a save x mean time between failures) (CACM 1974).

    Attributes:
        mtbf_s: mean time between failures, in seconds.
    """

    mtbf_s: float
    name = "full"
    source = "blocking full checkpoints, Young's interval"

    def saves(self, job: Job, partial: PartialExperts, iteration_s: float) -> Saves:  # noqa: ARG002 - all experts are saved
        """Schedules saves of the whole state, during which training waits."""
        young_s = math.sqrt(2 * job.stored_s * min(self.mtbf_s, _LONGEST_S))
        return Saves(job.checkpoint_every or iterations_of(young_s, iteration_s), job.stored_s)

    def load_s(self, job: Job, num_lost: int, from_storage: bool) -> float:  # noqa: ARG002
        """Returns the time for all workers to read the state from storage, in seconds."""
        return job.stored_s

    def after_loss(self, job: Job, partial: PartialExperts, iterations: int) -> PartialExperts:  # noqa: ARG002
        """Returns the state unchanged."""
        return partial


@dataclass(frozen=True)
class PartialCheckpoints:
    """MoC-System (arXiv 2408.04307): K experts per layer at a time, in two levels, with Dynamic-K.

    A snapshot to the host overlaps with one iteration; persisting it overlaps with the iterations up to the next
    snapshot. Training waits for the time that exceeds these, because there are only three buffers. The default interval
    is the time to persist. Only the state of failed workers is read from storage. On average a failure loses
    (E/K - 1)/2 intervals of updates of each expert, where E is the number of experts. When the losses so far exceed the
    fraction ``PLT_BUDGET`` of all iterations so far, K doubles.
    """

    name = "moc"
    source = "MoC-System's formulas, two levels, Dynamic-K"

    def saves(self, job: Job, partial: PartialExperts, iteration_s: float) -> Saves:
        """Schedules saves of K experts per layer.

        Training waits (O_save) for the time by which a snapshot exceeds an iteration or persisting exceeds an interval.
        """
        share = 1 - job.expert_share * (1 - partial.k / job.num_experts)
        persist_s = share * job.stored_s
        persisted = iterations_of(persist_s, iteration_s)
        every = job.checkpoint_every or persisted
        stall_s = max(0.0, share * job.snapshot_s - iteration_s, persist_s - every * iteration_s)
        return Saves(every, stall_s, lag=min(every, persisted))

    def load_s(self, job: Job, num_lost: int, from_storage: bool) -> float:  # noqa: ARG002
        """Returns the time to load failed workers' state from storage and, concurrently, other state from hosts."""
        return max(job.stored_s * num_lost / job.num_workers, job.snapshot_s)

    def after_loss(self, job: Job, partial: PartialExperts, iterations: int) -> PartialExperts:
        """Doubles K when the budget for lost tokens is exceeded (Dynamic-K)."""
        every, k = self.saves(job, partial, job.iteration_s).every, partial.k
        lost = partial.lost_iterations + every * (job.num_experts / k - 1) / 2
        exceeds = lost > PLT_BUDGET * max(1, iterations)
        return PartialExperts(min(job.num_experts, 2 * k) if exceeds else k, lost)


@dataclass(frozen=True)
class InMemoryCheckpoints:
    """Checkpoints for every iteration, in the worker's own host memory and a peer's (Gemini, SOSP'23).

    In the background, checkpoints are also written to storage. Storage is read if both workers of a pair are lost at
    once, or if a worker is lost before a restart is complete.
    """

    name = "memory"
    source = "a snapshot each iteration with a copy at a peer, storage in the background"

    def saves(self, job: Job, partial: PartialExperts, iteration_s: float) -> Saves:  # noqa: ARG002 - all experts are saved
        """Schedules a save in every iteration. Training waits for the time by which a snapshot exceeds an iteration."""
        stall_s = max(0.0, job.snapshot_s - iteration_s)
        stored = iterations_of(job.stored_s, iteration_s)
        return Saves(1, stall_s, lag=1, storage_every=job.checkpoint_every or stored)

    def load_s(self, job: Job, num_lost: int, from_storage: bool) -> float:  # noqa: ARG002
        """Returns the time for all workers to load the state from hosts, or from storage, in seconds."""
        return job.stored_s if from_storage else job.snapshot_s + job.stage_copy_s

    def after_loss(self, job: Job, partial: PartialExperts, iterations: int) -> PartialExperts:  # noqa: ARG002
        """Returns the state unchanged."""
        return partial


class _Cluster(NamedTuple):
    """Nodes that are present, and the state of checkpointing.

    Attributes:
        nodes: nodes in order; the first ones form complete pipelines, the remaining ones are spare.
        partial: state of Dynamic-K.
    """

    nodes: tuple[str, ...]
    partial: PartialExperts


@dataclass(frozen=True)
class Restarting:
    """Elastic restarts from a checkpoint, with as many complete pipelines as the remaining nodes can fill.

    Pipelines run 1F1B and share all micro-batches. If added nodes complete another pipeline, the state is saved, and
    all nodes restart. Nodes beyond complete pipelines are spare and replace failed nodes.

    Attributes:
        job: training job.
        periods: periods of its problem.
        checkpoints: checkpointing method.
    """

    job: Job
    periods: Periods
    checkpoints: Checkpoints
    samples = None

    @property
    def name(self) -> str:
        """Name of the strategy, taken from its checkpointing method."""
        return self.checkpoints.name

    @property
    def source(self) -> str:
        """Source of its figures, for the report."""
        return f"elastic restarts; {self.checkpoints.source}"

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration, as in the job."""
        return self.job.iteration_s

    def start(self, nodes: tuple[str, ...]) -> tuple[_Cluster, Decision]:
        """Starts with as many pipelines as the nodes can fill."""
        cluster = _Cluster(nodes, PartialExperts(self.job.experts_per_checkpoint))
        return cluster, Decision(self._pace(cluster))

    def change(self, state: _Cluster, moment: ClusterChange) -> tuple[_Cluster, Decision | None]:
        """Restarts if a node in use is lost, or if another pipeline can be filled."""
        job, nodes = self.job, list(state.nodes)
        num_used = self._num_pipelines(state) * job.problem.num_stages
        removed = sorted(nodes.index(node) for node in moment.removed)
        lost = [index for index in removed if index < num_used]
        for index in reversed(removed):
            del nodes[index]
        cluster = state._replace(nodes=(*nodes, *moment.added))
        if lost:
            # Workers 0 and 1, 2 and 3, ... hold copies of each other's state.
            from_storage = not moment.is_running or len({index // 2 for index in lost}) < len(lost)
            partial = self.checkpoints.after_loss(job, state.partial, moment.iterations_kept)
            cluster = cluster._replace(partial=partial)
            restart = self._restart(self.checkpoints.load_s(job, len(lost), from_storage))
            pace = self._pace(cluster)
            pauses = (Pause("detection", DETECTION_S), *([restart] if pace else []))
            return cluster, Decision(pace, "storage" if from_storage else "checkpoint", pauses)
        before, after = self._num_pipelines(state), self._num_pipelines(cluster)
        if after == before:
            return cluster, None
        assert after > before, "a spare node was part of a pipeline"
        load_s = self.checkpoints.load_s(job, 0, from_storage=before == 0)
        pauses = (self._restart(load_s),)
        pace = self._pace(state)
        if pace is not None and pace.saves is not None:
            pauses = (Pause("saving", pace.saves.stall_s), *pauses)
        return cluster, Decision(self._pace(cluster), "nothing", pauses, saved=before > 0)

    def _num_pipelines(self, cluster: _Cluster) -> int:
        problem = self.job.problem
        return min(problem.num_pipelines, len(cluster.nodes) // problem.num_stages)

    def _pace(self, cluster: _Cluster) -> IterationTiming | None:
        num_pipelines = self._num_pipelines(cluster)
        if not num_pipelines:
            return None
        iteration_s = self.job.iteration_s * self.periods.elastic_ratio(num_pipelines)
        return IterationTiming(iteration_s, self.checkpoints.saves(self.job, cluster.partial, iteration_s))

    def _restart(self, load_s: float) -> Pause:
        return Pause("reconfiguration", self.job.restart_s + self.job.per_worker_s + load_s)
