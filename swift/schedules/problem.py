"""The planning problem: micro-batches, live workers, costs and memory."""

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from swift.errors import SettingError, check_count, check_number
from swift.topology import Topology, Worker


@dataclass(frozen=True)
class Costs:
    """Costs of the ops of one micro-batch, in any one unit of time and any one unit of memory.

    Attributes:
        t_f: time of F, the forward pass of one micro-batch through one stage.
        t_b: time of B, the gradient with respect to the stage's input.
        t_w: time of W, the gradient with respect to the stage's parameters.
        t_u: time of U, the reduction over peers and the update; once per iteration.
        t_comm: time from the end of an op to the arrival of its output at the neighbouring stage.
        f_stash: memory that F allocates and B frees.
        w_stash: memory that B leaves for W, and W frees.
        inbox: memory of one message, held from the end of the op that sends it to the end of the op that reads it.
    """

    t_f: float = 1.0
    t_b: float = 1.0
    t_w: float = 1.0
    t_u: float = 0.0
    t_comm: float = 0.0
    f_stash: float = 1.0
    w_stash: float = 1.0
    inbox: float = 0.0

    def __post_init__(self) -> None:
        for name in ("t_f", "t_b", "t_w", "f_stash"):
            check_number(f"Costs.{name}", getattr(self, name), above=0)
        for name in ("t_u", "t_comm", "w_stash", "inbox"):
            check_number(f"Costs.{name}", getattr(self, name), least=0)
        for item in fields(self):
            object.__setattr__(self, item.name, float(getattr(self, item.name)))

    @property
    def op_times(self) -> tuple[float, float, float, float]:
        """Times of F, B, W and U: indexed by ``Kind``."""
        return self.t_f, self.t_b, self.t_w, self.t_u

    @property
    def microbatch_peak(self) -> float:
        """Peak memory of one micro-batch on a worker: the F-stash turns into the W-stash while B runs."""
        return max(self.f_stash, self.w_stash) + self.inbox


@dataclass(frozen=True)
class Problem:
    """A configuration and its work: the input of planners, and the reference for ``verify``.

    Attributes:
        topology: shape of the cluster; expert ranks do not matter here, since a worker's ranks run each op together.
        num_microbatches: micro-batches per pipeline and iteration.
        failed: failed workers.
        memory_limit: limit per worker, in the unit of the costs' stashes; None for no limit.
        num_iterations: length of the window that is planned as one schedule.
        decoupled: False ties every W to its B, as a plain backward pass does; the neighbour's B waits for both
            (ablation).
        staggered: False delays every U until all stages have finished their last W (ablation).

    Raises:
        SettingError: a failed worker is outside the topology, a stage has no survivor, or the memory limit is too
            small for a single micro-batch.
    """

    topology: Topology
    num_microbatches: int
    failed: frozenset[Worker] = frozenset()
    costs: Costs = field(default_factory=Costs)
    memory_limit: float | None = None
    num_iterations: int = 3
    decoupled: bool = True
    staggered: bool = True

    def __post_init__(self) -> None:
        check_count("Problem.num_microbatches", self.num_microbatches, least=1)
        check_count("Problem.num_iterations", self.num_iterations, least=1)
        self.topology.live_workers(self.failed)
        if self.memory_limit is not None:
            self._check_memory(self.memory_limit, self.costs.microbatch_peak)

    @property
    def num_pipelines(self) -> int:
        """Number of pipelines, D."""
        return self.topology.num_pipelines

    @property
    def num_stages(self) -> int:
        """Number of stages, P."""
        return self.topology.num_stages

    @property
    def num_ops(self) -> int:
        """Number of Fs, Bs and Ws of one iteration."""
        return 3 * self.num_pipelines * self.num_microbatches * self.num_stages

    def limited(self, num_stashes: float | None) -> "Problem":
        """Limits the memory of a worker to so many F-stashes, the unit in which users give it; None: no limit.

        Raises:
            SettingError: the limit, in F-stashes, is too small for a single micro-batch.
        """
        if num_stashes is None:
            return replace(self, memory_limit=None)
        unit = self.costs.f_stash
        # A rounding error may make the product less than what a single micro-batch takes.
        self._check_memory(num_stashes, self.costs.microbatch_peak / unit * (1 - 1e-9))
        return replace(self, memory_limit=max(num_stashes * unit, self.costs.microbatch_peak))

    def single_pipeline(self) -> "Problem":
        """Reduces the problem to one pipeline without failures."""
        return replace(self, topology=Topology(num_stages=self.num_stages), failed=frozenset())

    def if_drained(self) -> "Problem":
        """Adds a barrier if the window is one iteration, where only the end of all stages counts."""
        return replace(self, staggered=self.staggered and self.num_iterations > 1)

    def most_loaded(self, num_survivors: int) -> int:
        """Least number of micro-batches, n_p, of the most loaded among ``num_survivors`` live workers of a stage."""
        return math.ceil(self.num_microbatches * self.num_pipelines / num_survivors)

    @cached_property
    def survivors(self) -> tuple[tuple[int, ...], ...]:
        """Peers of every stage: the pipelines whose worker of that stage is live, ascending."""
        live = self.topology.live_workers(self.failed)
        by_stage: list[list[int]] = [[] for _ in range(self.num_stages)]
        for d, p in live:
            by_stage[p].append(d)
        return tuple(tuple(pipelines) for pipelines in by_stage)

    def _check_memory(self, limit: float, least: float) -> None:
        check_number("Problem.memory_limit", limit, above=0)
        if limit < least:
            takes = "which a single micro-batch takes with its message and while B runs"
            allowed = f"must be at least {math.ceil(1000 * least) / 1000:g}, {takes}"
            raise SettingError("Problem.memory_limit", limit, allowed)
