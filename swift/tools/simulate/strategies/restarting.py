"""Elastic restarts from checkpoints: full ones, partial ones (MoC-System), or in memory (Gemini)."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from swift.tools.simulate.job import DETECTION_S, PLT_BUDGET, Job, iterations_of
from swift.tools.simulate.periods import Periods
from swift.tools.simulate.strategies.strategy import Moment, Pace, Pause, Saves, Turn

_LONGEST_S = 1e9
"""What counts as the mean time between failures where there are none."""


class PartialExperts(NamedTuple):
    """Where Dynamic-K is.

    Attributes:
        k: experts of a layer in a checkpoint.
        lost_iterations: whose token updates the experts have lost so far, on average over experts.
    """

    k: int
    lost_iterations: float = 0.0


class Checkpoints(Protocol):
    """What is saved, when, and what getting it back takes."""

    @property
    def name(self) -> str:
        """Of the strategy."""

    @property
    def source(self) -> str:
        """Whose figures it follows."""

    def saves(self, job: Job, partial: PartialExperts, iteration_s: float) -> Saves:
        """When a state is saved, where an iteration takes ``iteration_s``."""

    def load_s(self, job: Job, num_lost: int, from_storage: bool) -> float:
        """Getting the state back after the loss of so many workers."""

    def after_loss(self, job: Job, partial: PartialExperts, iterations: int) -> PartialExperts:
        """What is saved after a loss, where ``iterations`` have been kept so far."""


@dataclass(frozen=True)
class FullCheckpoints:
    """All of the state goes to storage while training waits.

    The interval, where none is set, is Young's: sqrt(2 x time of a save x mean time between failures) (CACM 1974).

    Attributes:
        mtbf_s: mean time between failures.
    """

    mtbf_s: float
    name = "full"
    source = "blocking full checkpoints, Young's interval"

    def saves(self, job: Job, partial: PartialExperts, iteration_s: float) -> Saves:  # noqa: ARG002 - all experts are saved
        """Training waits for all of it."""
        young_s = math.sqrt(2 * job.stored_s * min(self.mtbf_s, _LONGEST_S))
        return Saves(job.checkpoint_every or iterations_of(young_s, iteration_s), job.stored_s)

    def load_s(self, job: Job, num_lost: int, from_storage: bool) -> float:  # noqa: ARG002
        """Everybody reads from storage."""
        return job.stored_s

    def after_loss(self, job: Job, partial: PartialExperts, iterations: int) -> PartialExperts:  # noqa: ARG002
        """As before."""
        return partial


@dataclass(frozen=True)
class PartialCheckpoints:
    """MoC-System (arXiv 2408.04307): K experts of a layer at a time, in two levels, with Dynamic-K.

    A snapshot to the host is hidden behind an iteration as far as it fits there; persisting it is hidden behind the
    iterations up to the next one. Where these are too short, training waits, for three buffers hold no more. The
    interval, where none is set, is what persisting takes. Only what failed workers held is read from storage. A fault
    loses on average (E/K - 1)/2 intervals of every expert's updates; where all that were lost so far are more than the
    budget's share of all iterations so far, K doubles.
    """

    name = "moc"
    source = "MoC-System's formulas, two levels, Dynamic-K"

    def saves(self, job: Job, partial: PartialExperts, iteration_s: float) -> Saves:
        """O_save is what does not fit behind an iteration, or behind an interval."""
        share = 1 - job.expert_share * (1 - partial.k / job.num_experts)
        persist_s = share * job.stored_s
        persisted = iterations_of(persist_s, iteration_s)
        every = job.checkpoint_every or persisted
        stall_s = max(0.0, share * job.snapshot_s - iteration_s, persist_s - every * iteration_s)
        return Saves(every, stall_s, lag=min(every, persisted))

    def load_s(self, job: Job, num_lost: int, from_storage: bool) -> float:  # noqa: ARG002
        """Failed workers' shares come from storage, those of others from their hosts at the same time."""
        return max(job.stored_s * num_lost / job.num_workers, job.snapshot_s)

    def after_loss(self, job: Job, partial: PartialExperts, iterations: int) -> PartialExperts:
        """Dynamic-K."""
        every, k = self.saves(job, partial, job.iteration_s).every, partial.k
        lost = partial.lost_iterations + every * (job.num_experts / k - 1) / 2
        exceeds = lost > PLT_BUDGET * max(1, iterations)
        return PartialExperts(min(job.num_experts, 2 * k) if exceeds else k, lost)


@dataclass(frozen=True)
class InMemoryCheckpoints:
    """Every iteration's state in the memory of the own host and of a buddy's (Gemini, SOSP'23); storage behind that.

    Storage is what is left where both of a pair of buddies are lost at once, or anybody before a restart is over.
    """

    name = "memory"
    source = "a snapshot each iteration with a buddy's copy, storage behind"

    def saves(self, job: Job, partial: PartialExperts, iteration_s: float) -> Saves:  # noqa: ARG002 - all experts are saved
        """Training waits for what does not fit behind an iteration."""
        stall_s = max(0.0, job.snapshot_s - iteration_s)
        stored = iterations_of(job.stored_s, iteration_s)
        return Saves(1, stall_s, lag=1, storage_every=job.checkpoint_every or stored)

    def load_s(self, job: Job, num_lost: int, from_storage: bool) -> float:  # noqa: ARG002
        """From hosts, all at once, or everybody from storage."""
        return job.stored_s if from_storage else job.snapshot_s + job.stage_copy_s

    def after_loss(self, job: Job, partial: PartialExperts, iterations: int) -> PartialExperts:  # noqa: ARG002
        """As before."""
        return partial


class _Cluster(NamedTuple):
    """Who is there.

    Attributes:
        nodes: in their order; the first ones make whole pipelines.
        partial: of Dynamic-K.
    """

    nodes: tuple[str, ...]
    partial: PartialExperts


@dataclass(frozen=True)
class Restarting:
    """Whoever is left starts again, from a checkpoint, in as many whole pipelines as there are nodes for.

    They run 1F1B and share all micro-batches. Where those who come make another pipeline possible, the state is saved,
    and all start again. Nodes beyond whole pipelines are spare: they take the places of failed ones.

    Attributes:
        job: what is trained on what.
        periods: of its problem.
        checkpoints: which.
    """

    job: Job
    periods: Periods
    checkpoints: Checkpoints
    samples = None

    @property
    def name(self) -> str:
        """That of its checkpoints."""
        return self.checkpoints.name

    @property
    def source(self) -> str:
        """That of its checkpoints."""
        return f"elastic restarts; {self.checkpoints.source}"

    @property
    def iteration_s(self) -> float:
        """That of the job."""
        return self.job.iteration_s

    def start(self, nodes: tuple[str, ...]) -> tuple[_Cluster, Turn]:
        """As many pipelines as there are nodes for."""
        cluster = _Cluster(nodes, PartialExperts(self.job.experts_per_checkpoint))
        return cluster, Turn(self._pace(cluster))

    def change(self, state: _Cluster, moment: Moment) -> tuple[_Cluster, Turn | None]:
        """A restart, where a node that is used is lost or another pipeline is possible."""
        job, nodes = self.job, list(state.nodes)
        num_used = self._num_pipelines(state) * job.problem.num_stages
        gone = sorted(nodes.index(node) for node in moment.removed)
        lost = [index for index in gone if index < num_used]
        for index in reversed(gone):
            del nodes[index]
        cluster = state._replace(nodes=(*nodes, *moment.added))
        if lost:
            # Buddies are 0 and 1, 2 and 3, ...
            from_storage = not moment.is_running or len({index // 2 for index in lost}) < len(lost)
            partial = self.checkpoints.after_loss(job, state.partial, moment.iterations_kept)
            cluster = cluster._replace(partial=partial)
            restart = self._restart(self.checkpoints.load_s(job, len(lost), from_storage))
            pace = self._pace(cluster)
            pauses = (Pause("detection", DETECTION_S), *([restart] if pace else []))
            return cluster, Turn(pace, "storage" if from_storage else "checkpoint", pauses)
        before, after = self._num_pipelines(state), self._num_pipelines(cluster)
        if after == before:
            return cluster, None
        assert after > before, "a spare node was part of a pipeline"
        load_s = self.checkpoints.load_s(job, 0, from_storage=before == 0)
        pauses = (self._restart(load_s),)
        pace = self._pace(state)
        if pace is not None and pace.saves is not None:
            pauses = (Pause("saving", pace.saves.stall_s), *pauses)
        return cluster, Turn(self._pace(cluster), "nothing", pauses, saved=before > 0)

    def _num_pipelines(self, cluster: _Cluster) -> int:
        problem = self.job.problem
        return min(problem.num_pipelines, len(cluster.nodes) // problem.num_stages)

    def _pace(self, cluster: _Cluster) -> Pace | None:
        num_pipelines = self._num_pipelines(cluster)
        if not num_pipelines:
            return None
        iteration_s = self.job.iteration_s * self.periods.elastic_ratio(num_pipelines)
        return Pace(iteration_s, self.checkpoints.saves(self.job, cluster.partial, iteration_s))

    def _restart(self, load_s: float) -> Pause:
        return Pause("reconfiguration", self.job.restart_s + self.job.per_worker_s + load_s)
